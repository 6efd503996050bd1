"""The default policy on real requests, replayed: the fate of every draft is known, and what each length costs.

``replays.json`` was recorded on two cores of a server CPU: the bundled models on held-out requests, beginnings of
standard library functions and both in one prompt, SmolLM2-135M-Instruct with its drafter on the handwritten requests.
``matched[i]`` counts the leading drafts of a whole block after token ``i`` that are what the target wrote, and
``milliseconds[k]`` is the median time of a block that drafts and verifies ``k``; of a plain step, where that is 0.
"""

import json
import random
from pathlib import Path
from statistics import fmean

import pytest

from dflash import BlockRecord, Drafts, Policy
from dflash.policies.adaptive import Adaptive

REPLAYS = json.loads(Path(__file__).with_name("replays.json").read_text())


def speed_of_length(length: int, requests: list[list[int]], costs: list[float]) -> float:
    """Tokens per millisecond if every block drafts ``length`` tokens, or as many as are left."""
    spent = 0.0
    for matched in requests:
        at = 0
        while at < len(matched):
            drafts = min(length, len(matched) - 1 - at)
            spent, at = spent + costs[drafts], at + 1 + min(matched[at], drafts)
    return sum(map(len, requests)) / spent


def speed(policy: Policy, requests: list[list[int]], costs: list[float], draw: random.Random) -> float:
    """The same under ``policy``, which sees times with noise of a twentieth."""
    spent = 0.0
    for matched in requests:
        policy.begin()
        at = 0
        while at < len(matched):
            asleep, most = policy.sleep() > 0, min(len(costs) - 1, len(matched) - 1 - at)
            length = 0 if asleep or not most else min(policy.draft_length(most), most)
            verified = 0 if asleep else min(policy.verify_length(Drafts(length)), length)
            accepted = min(matched[at], verified)
            known = {i: i < matched[at] for i in range(min(accepted + 1, length))}
            seen = costs[verified] * draw.lognormvariate(0, 0.05)
            policy.observe(
                BlockRecord(length, verified, accepted, sum(known.values()), None, seen, "", asleep, outcomes=known)
            )
            spent, at = spent + costs[verified], at + 1 + accepted
    return sum(map(len, requests)) / spent


@pytest.mark.parametrize(
    ("name", "least"), [("held-out", 0.97), ("outside", 0.97), ("mixed", 1.0), ("SmolLM2, handwritten", 0.97)]
)
def test_it_is_as_fast_as_the_best_fixed_length_or_plain_decoding(name, least):
    costs, requests = REPLAYS[name]["milliseconds"], REPLAYS[name]["matched"]
    best = max(speed_of_length(length, requests, costs) for length in range(len(costs)))
    ours = []
    for seed in range(6):
        draw = random.Random(seed)
        ours.append(speed(Adaptive(), draw.sample(requests, len(requests)), costs, draw) / best)
    print(name, fmean(ours), ours)
    assert fmean(ours) > least, ours
