"""A policy finds the number of drafts that commits most tokens per second, and never changes the text."""

import math
import random
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from support.models import bound_drafter, plain_greedy, target

from dflash import DFlashSpeculativeDecoder, Proposal
from dflash.decode import Decoding, decode, prefill
from dflash.errors import DFlashError
from dflash.policy import Adaptive, BlockRecord, Calibration, CostCurve, Drafts, Fixed, Policy, register_policy

BLOCK = 16

# --- a world in which everything is known ----------------------------------------------------------------


def staircase(tokens: int, base: float, step: float, tile: int) -> float:
    """Seconds of a pass: a fixed cost, and one for every tile of tokens that is begun."""
    return base + step * math.ceil(tokens / tile)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class World:
    """Blocks whose drafts survive with a known chance, at known costs; both change after ``change`` tokens.

    A draft is accepted with ``sigmoid(z)``; the drafter says ``sigmoid(z + too_sure)`` of it.
    """

    draft_seconds = 0.01

    def __init__(self, seed: int, levels: tuple[float, float], too_sure: tuple[float, float], change: int = 2000):
        self.random = random.Random(seed)
        self.levels, self.too_sure, self.change = levels, too_sure, change

    def cost(self, tokens: int, at: int) -> float:
        return staircase(tokens, 0.04, 0.02, 4) if at < self.change else staircase(tokens, 0.03, 0.06, 6)

    def plain(self, at: int) -> float:
        return 0.95 * self.cost(1, at)

    def block(self, at: int) -> tuple[list[float], list[float], int]:
        """The drafter's confidence, the true chances, and how many drafts would be accepted."""
        part = int(at >= self.change)
        level = self.random.gauss(self.levels[part], 1.0)
        z = [level + self.random.gauss(0, 0.7) - 0.03 * i for i in range(BLOCK - 1)]
        hits = [self.random.random() < sigmoid(x) for x in z]
        accepted = next((i for i, hit in enumerate(hits) if not hit), len(hits))
        return [sigmoid(x + self.too_sure[part]) for x in z], [sigmoid(x) for x in z], accepted

    def noise(self) -> float:
        return self.random.lognormvariate(0, 0.05)


def best_length(chances: list[float], draft: float, cost: Callable[[int], float]) -> int:
    expected, survival, rates = 1.0, 1.0, [1 / (draft + cost(1))]
    for k, chance in enumerate(chances, 1):
        survival *= chance
        expected += survival
        rates.append(expected / (draft + cost(k + 1)))
    return int(np.argmax(rates))


def speed(world: World, policy: Policy, tokens: int = 4000) -> float:
    """Tokens per second under ``policy``."""
    at, seconds = 0, 0.0
    policy.begin()
    while at < tokens:
        if policy.sleep():
            spent = world.plain(at) * world.noise()
            policy.observe(BlockRecord(0, 0, 0, None, spent, asleep=True))
            at, seconds = at + 1, seconds + spent
            continue
        confidence, _, accepted = world.block(at)
        k = policy.verify_length(Drafts(BLOCK - 1, confidence))
        spent, accepted = world.cost(k + 1, at) * world.noise(), min(accepted, k)
        policy.observe(BlockRecord(BLOCK - 1, k, accepted, confidence, world.draft_seconds + spent))
        at, seconds = at + 1 + accepted, seconds + world.draft_seconds + spent
    return at / seconds


def oracle_speed(make: Callable[[], World], tokens: int = 4000) -> float:
    """Knows every chance and cost, and for each half of the text whether to draft at all."""
    seconds = 0.0
    for begin, end in ((0, 2000), (2000, tokens)):
        world, at, drafted = make(), begin, 0.0
        while at < end:
            _, chances, accepted = world.block(at)
            k = best_length(chances, world.draft_seconds, lambda n, at=at, world=world: world.cost(n, at))
            drafted += world.draft_seconds + world.cost(k + 1, at) * world.noise()
            at += 1 + min(accepted, k)
        seconds += min(drafted * (end - begin) / (at - begin), (end - begin) * world.plain(begin))
    return tokens / seconds


WORLDS = {
    "good, then fair and too sure": ((2.5, 0.5), (0.0, 2.0)),
    "fair, then good": ((0.5, 3.0), (2.0, 0.0)),
    "good, then worthless": ((3.0, -4.0), (0.0, 4.0)),
    "worthless, then good": ((-4.0, 3.0), (4.0, 0.0)),
}


@pytest.mark.parametrize("name", WORLDS)
def test_adaptive_follows_chances_and_costs_that_change(name):
    """Against an oracle that knows both and never pays to find out."""
    seconds = {"ours": 0.0, "oracle": 0.0}
    for seed in range(3):
        seconds["ours"] += 1 / speed(World(seed, *WORLDS[name]), Adaptive())
        seconds["oracle"] += 1 / oracle_speed(lambda seed=seed: World(seed + 100, *WORLDS[name]))
    assert seconds["oracle"] / seconds["ours"] > 0.88


def test_adaptive_is_as_fast_as_the_best_fixed_length():
    """Which nobody knows beforehand."""
    for seed in range(2):
        fixed = max(speed(World(seed, (2.5, 0.5), (0.0, 2.0)), Fixed(k)) for k in (2, 3, 5, 7, 11, 15))
        assert speed(World(seed, (2.5, 0.5), (0.0, 2.0)), Adaptive()) > 0.97 * fixed


def test_a_worthless_drafter_costs_adaptive_at_most_three_percent():
    for seed in range(3):
        world = World(seed, (-4.0, -4.0), (4.0, 4.0))
        assert speed(world, Adaptive(), 512) * world.plain(0) > 0.97


# --- its parts ---------------------------------------------------------------------------------------------


def test_a_cost_curve_interpolates_and_moves_as_a_whole():
    curve = CostCurve()
    with pytest.raises(KeyError):
        curve[4]
    curve.observe(1, 0.010)
    curve.observe(5, 0.030)
    assert curve[3] == pytest.approx(0.020)
    assert curve[16] == pytest.approx(0.030)
    for _ in range(60):
        curve.observe(5, 0.060)  # everything takes twice as long now
    assert curve[5] == pytest.approx(0.060, rel=0.02)
    assert 0.012 < curve[1] < 0.021


def test_calibration_learns_that_a_drafter_is_too_sure():
    rng, calibration = random.Random(0), Calibration()
    assert calibration.chance(0.9) == pytest.approx(0.9)
    for _ in range(400):
        z = rng.gauss(0, 1)
        calibration.observe(sigmoid(z + 2), rng.random() < sigmoid(z))
    assert calibration.chance(sigmoid(2.0)) == pytest.approx(0.5, abs=0.12)


def test_without_confidence_the_rate_of_acceptance_is_learned():
    calibration = Calibration()
    for i in range(300):
        calibration.observe(None, i % 4 > 0)
    assert calibration.chance(None) == pytest.approx(0.75, abs=0.1)


def test_confidence_is_the_probability_of_each_draft():
    logits = mx.log(mx.array([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]]))
    chances = [0.5, 0.2]
    tokens, candidates = mx.array([[0, 1]]), mx.array([[[2, 1, 0], [0, 1, 2]]])
    assert Proposal(tokens, logits).acceptance_chances().tolist() == pytest.approx(chances)
    assert Proposal(tokens, mx.take_along_axis(logits, candidates, 2), candidates).acceptance_chances().tolist() == (
        pytest.approx(chances)
    )
    assert Proposal(tokens, logits, confidence=mx.array([[0.3, 0.4]])).acceptance_chances().tolist() == (
        pytest.approx([0.3, 0.4])
    )
    assert Proposal(tokens).acceptance_chances() is None


# --- in the loop -------------------------------------------------------------------------------------------


class Dozing(Policy):
    """Three plain tokens, then a block of which two drafts are verified, and so on."""

    reads_confidence = True

    def __init__(self):
        self.blocks, self.left = [], 3

    def sleep(self):
        return self.left

    def verify_length(self, drafts):
        assert len(drafts.confidence) == drafts.count
        return min(2, drafts.count)

    def observe(self, block):
        self.blocks.append(block)
        self.left = self.left - 1 if block.asleep else 3


@pytest.mark.parametrize("kind", ["qwen3", "llama", "sliding"])
@pytest.mark.parametrize("policy", [Fixed(0), Fixed(3), Adaptive(), Dozing()], ids=["0", "3", "adaptive", "dozing"])
def test_no_policy_changes_the_text(kind, policy):
    expected, lead = plain_greedy(target(kind, 1).model, [3, 1, 4, 1, 5], 40)
    assert lead > 1e-4
    decoder = DFlashSpeculativeDecoder(target(kind, 1), bound_drafter(kind, 2))
    tokens = decoder.spec_generate([3, 1, 4, 1, 5], 40, policy=policy, stop_token_ids=[])
    assert tokens[0, 5:].tolist() == expected


def test_logits_processors_see_every_token_before_theirs_in_naps_too():
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2))
    options = {"repetition_penalty": 1.5, "stop_token_ids": []}
    full = decoder.spec_generate([3, 1, 4, 1, 5], 40, **options)
    assert full.tolist() != decoder.spec_generate([3, 1, 4, 1, 5], 40, stop_token_ids=[]).tolist()
    assert decoder.spec_generate([3, 1, 4, 1, 5], 40, policy=Dozing(), **options).tolist() == full.tolist()


@pytest.mark.parametrize("kind", ["qwen3", "sliding"])
def test_after_a_nap_both_caches_hold_what_was_committed(kind):
    models, policy = (target(kind, 1), bound_drafter(kind, 2)), Dozing()
    run = Decoding(*models, policy=policy)
    state = prefill(run, [3, 1, 4, 1, 5])
    for block in decode(run, state, 24, 16):
        if block.drafted:
            break
    fresh = prefill(Decoding(*models), state.tokens[:-1])
    assert fresh.tokens == state.tokens
    assert state.draft_cache.offset == fresh.draft_cache.offset == len(state.tokens) - 1
    for ours, theirs in zip(state.draft_cache.layers, fresh.draft_cache.layers, strict=True):
        for a, b in zip(ours.state, theirs.state, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
    assert [cache.offset for cache in state.target_cache] == [len(state.tokens) - 1] * len(state.target_cache)
    assert [block.drafted for block in policy.blocks] == [0, 0, 0, 15]


def test_a_policy_is_chosen_by_name_or_number_and_unknown_ones_are_named():
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2), policy="adaptive")
    decoder.spec_generate([3, 1, 4], 8)
    assert list(decoder._policies) == ["adaptive"]
    assert decoder._policies["adaptive"].costs[1] > 0
    with pytest.raises(DFlashError, match="Unknown policy 'adaptif'; did you mean 'adaptive'"):
        decoder.spec_generate([3, 1, 4], 8, policy="adaptif")

    @register_policy("one-at-a-time")
    class OneAtATime(Policy):
        def verify_length(self, drafts):
            return min(1, drafts.count)

    lengths = [len(r) for r in blocks_of(decoder, policy="one-at-a-time")]
    assert max(lengths) <= 2


def test_drafts_that_were_drawn_are_verified_whatever_they_are():
    """To look at them first would prefer some, and the text would not be the target's."""
    policy = Dozing()
    policy.verify_length = lambda drafts: told.append(drafts.confidence) or drafts.count
    told: list[list[float] | None] = []
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2), policy=policy)
    for verify in ("first_mismatch", "speculative_sampling"):
        decoder.spec_generate([3, 1, 4, 1, 5], 12, 1.0, verify=verify, seed=1)
        assert all((confidence is None) == (verify == "speculative_sampling") for confidence in told)
        assert told
        told.clear()


def blocks_of(decoder: DFlashSpeculativeDecoder, **options) -> list[list[int]]:
    blocks: list[list[int]] = []
    decoder.spec_generate([3, 1, 4], 12, stream_callback=blocks.append, **options)
    return blocks
