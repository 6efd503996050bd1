"""A policy finds the number of drafts that commits most tokens per second, and never changes the text."""

import json
import math
import random
import time
from collections.abc import Iterator
from statistics import NormalDist

import mlx.core as mx
import numpy as np
import pytest
from support.errors import refused
from support.models import bound_drafter, plain_greedy, target

from dflash import DFlashSpeculativeDecoder, Proposal
from dflash.block import Decoding
from dflash.decode import decode, prefill
from dflash.errors import DFlashError, GenerationError
from dflash.policies.adaptive import ENOUGH, Adaptive
from dflash.policies.base import BlockRecord, Drafts, Fixed, Policy, register_policy
from dflash.policies.estimates import PLAIN, BlockCosts, Calibration, DraftCosts

BLOCK = 16
CHANGE = 2000
NORMAL = NormalDist()

# --- a world in which everything is known ----------------------------------------------------------------


def staircase(tokens: int, base: float, step: float, tile: int) -> float:
    """Seconds of a pass: a fixed cost, and one for every tile of tokens that is begun."""
    return base + step * math.ceil(tokens / tile)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class World:
    """Blocks whose drafts survive with a known chance, at known costs; both change after ``CHANGE`` tokens.

    A draft is accepted with ``sigmoid(z)``; the drafter says ``sigmoid(z + too_sure)`` of it, and ``wait`` seconds pass
    where a policy waits for that.
    """

    def __init__(self, seed: int, levels: tuple[float, float], too_sure: tuple[float, float], wait: float = 0.0):
        self.random, self.blocks = random.Random(seed), 0.37 * seed
        self.levels, self.too_sure, self.wait = levels, too_sure, wait

    def seconds(self, k: int, at: float) -> float:
        """Of a block that verifies ``k`` drafts."""
        return 0.01 + (staircase(k + 1, 0.04, 0.02, 4) if at < CHANGE else staircase(k + 1, 0.03, 0.06, 6))

    def plain(self, at: float) -> float:
        return 0.95 * (self.seconds(0, at) - 0.01)

    def block(self, at: float) -> tuple[list[float], list[float]]:
        """The drafter's confidence and the true chances; levels are spread evenly, so that few blocks tell much."""
        part, self.blocks = int(at >= CHANGE), self.blocks + 1
        level = self.levels[part] + NORMAL.inv_cdf(0.001 + 0.998 * (self.blocks * 0.618034 % 1))
        z = [level + self.random.gauss(0, 0.7) - 0.03 * i for i in range(BLOCK - 1)]
        return [sigmoid(x + self.too_sure[part]) for x in z], [sigmoid(x) for x in z]

    def accepted(self, chances: list[float]) -> int:
        """Of all drafts."""
        return next((i for i, chance in enumerate(chances) if self.random.random() >= chance), len(chances))

    def noise(self) -> float:
        return self.random.lognormvariate(0, 0.05)


def expected_tokens(chances: list[float]) -> list[float]:
    """Tokens that a block commits on average if it verifies 0, 1, .. drafts."""
    survival, tokens = 1.0, [1.0]
    for chance in chances:
        survival *= chance
        tokens.append(tokens[-1] + survival)
    return tokens


def speed(world: World, policy: Policy, tokens: int = 2 * CHANGE) -> float:
    """Tokens per second under ``policy``, every block counted with its expectation."""
    at = seconds = 0.0
    policy.begin()
    while at < tokens:
        if policy.sleep():
            spent, committed = world.plain(at), 1.0
            policy.observe(BlockRecord(0, 0, 0, 0, None, spent * world.noise(), asleep=True))
        else:
            confidence, chances = world.block(at)
            count = policy.draft_length(BLOCK - 1)
            confidence, chances = confidence[:count], chances[:count]
            told = policy.reads_confidence and policy.waits_for_confidence("")
            k = policy.verify_length(Drafts(count, confidence if told else None))
            policy.catch_up()
            wait = world.wait if told else 0.0
            spent, committed, hits = world.seconds(k, at) + wait, expected_tokens(chances)[k], world.accepted(chances)
            noisy, matched = spent * world.noise(), min(hits, k + 1, count)
            waited = {"drafting": 0.01 * noisy / spent, "choosing": wait} if told else {}
            policy.observe(BlockRecord(count, k, min(hits, k), matched, confidence, noisy, **waited))
        at, seconds = at + committed, seconds + spent
    return at / seconds


def oracle_speed(world: World) -> float:
    """Knows every chance and cost, and for each half of the text whether to draft at all; it never pays to find out.

    Where blocks differ, the best length is not the one of the greatest quotient of the block: a second is worth what
    the whole text makes of it (Dinkelbach 1967), found in a few rounds.
    """
    seconds = 0.0
    for begin in (0, CHANGE):
        blocks = [expected_tokens(world.block(begin)[1]) for _ in range(300)]
        best, rate = 1 / world.plain(begin), 0.0
        for _ in range(4):
            lengths = [max(range(BLOCK), key=lambda k: tokens[k] - rate * world.seconds(k, begin)) for tokens in blocks]
            spent = sum(world.seconds(k, begin) for k in lengths)
            rate = sum(tokens[k] for tokens, k in zip(blocks, lengths, strict=True)) / spent
            best = max(best, rate)
        seconds += CHANGE / best
    return 2 * CHANGE / seconds


WORLDS = {
    "good": ((3.0, 3.0), (0.0, 0.0)),
    "fair": ((1.0, 1.0), (1.0, 1.0)),
    "poor": ((-0.5, -0.5), (2.0, 2.0)),
    "worthless": ((-4.0, -4.0), (4.0, 4.0)),
    "good, then fair and too sure": ((2.5, 0.5), (0.0, 2.0)),
    "fair, then good": ((0.5, 3.0), (2.0, 0.0)),
    "good, then worthless": ((3.0, -4.0), (0.0, 4.0)),
    "worthless, then good": ((-4.0, 3.0), (4.0, 0.0)),
}


@pytest.mark.parametrize("name", WORLDS)
def test_adaptive_loses_less_than_three_percent_to_an_oracle(name):
    """Chances and costs change in the middle; it is told neither."""
    ours = sum(1 / speed(World(seed, *WORLDS[name]), Adaptive()) for seed in range(8))
    oracle = sum(1 / oracle_speed(World(seed, *WORLDS[name])) for seed in range(8))
    assert oracle / ours > 0.97


def test_adaptive_is_faster_than_the_best_fixed_length_where_blocks_differ():
    """Which nobody knows beforehand."""
    world = (2.5, 0.5), (0.0, 2.0)
    fixed = max(speed(World(0, *world), Fixed(k)) for k in (2, 3, 5, 7, 11, 15))
    assert speed(World(0, *world), Adaptive()) > 1.05 * fixed


class Waits(Adaptive):
    """Counts how often it waits."""

    def __init__(self):
        super().__init__()
        self.waits: list[bool] = []

    def waits_for_confidence(self, source):
        self.waits.append(super().waits_for_confidence(source))
        return self.waits[-1]


def test_adaptive_waits_for_the_probabilities_where_they_gain_more_than_that_costs():
    alike = (5.0, 5.0), (0.0, 0.0), 0.01  # nearly every draft is right, and to wait costs a tenth of a block
    mixed = (1.0, 1.0), (1.0, 1.0), 0.002
    seldom, often = Waits(), Waits()
    assert speed(World(0, *alike), seldom) > 0.97 * max(speed(World(0, *alike), Fixed(k)) for k in (3, 7, 11, 15))
    assert speed(World(0, *mixed), often) > 1.05 * max(speed(World(0, *mixed), Fixed(k)) for k in (1, 2, 3, 5, 7, 15))
    assert np.mean(seldom.waits) < 0.1
    assert np.mean(often.waits) > 0.7


def test_a_drafter_of_single_drafts_is_not_waited_for_where_every_draft_is_verified():
    policy, told = Adaptive(), []
    for i in range(60):
        confidence = [0.4 + 0.01 * (i % 20)]
        waits = policy.waits_for_confidence("")
        told.append(waits)
        policy.verify_length(Drafts(1, confidence if waits else None))
        waited = {"drafting": 0.005, "choosing": 0.001} if waits else {}
        policy.observe(BlockRecord(1, 1, i % 2, i % 2, confidence, 0.041 if waits else 0.040, **waited))
    assert told[0]
    assert not any(told[20:])


def test_a_worthless_drafter_costs_adaptive_at_most_three_percent():
    for seed in range(3):
        world = World(seed, (-4.0, -4.0), (4.0, 4.0))
        assert speed(world, Adaptive(), 512) * world.plain(0) > 0.97


def time_of_text(policy: Policy, tokens: int, matches: Iterator[bool]) -> float:
    """Plain steps that a text takes whose blocks have one draft, a tenth of a step, and a pass of a twentieth more."""
    policy.begin()
    spent = 0.0
    while tokens > 0:
        nap, right = policy.sleep() > 0, False
        if nap:
            policy.observe(BlockRecord(0, 0, 0, 0, None, 0.04, asleep=True))
        else:
            k, right = policy.verify_length(Drafts(1)), next(matches)
            policy.observe(BlockRecord(1, k, k * right, int(right), None, 0.042 + 0.004 * k, drafting=0.004))
        spent += 1 if nap else 1.05 + 0.1 * k
        tokens -= 1 + (not nap and k * right)
    return spent


@pytest.mark.parametrize("tokens", [7, 20])
def test_a_text_with_no_right_draft_loses_little_after_texts_that_gained(tokens):
    draw = random.Random(0)

    def lost(policy: Policy) -> float:
        assert sum(time_of_text(policy, 48, iter(lambda: draw.random() < 0.5, None)) for _ in range(20)) < 0.9 * 20 * 48
        return time_of_text(policy, tokens, iter(lambda: False, None)) - tokens

    # What a text may lose, and the first block, which is always tried.
    little = lost(Adaptive(loss=0.04))
    assert little < 0.04 * tokens + 0.2
    assert lost(Adaptive(loss=100)) > 1.3 * little


def test_where_blocks_gain_much_a_few_bad_ones_are_soon_made_up_for():
    policy = Adaptive()
    for _ in range(4):
        policy.observe(BlockRecord(0, 0, 0, 0, None, 0.0065, asleep=True))
    for _ in range(20):
        policy.observe(BlockRecord(15, 15, 15, 15, None, 0.024))
    policy.begin()
    naps = []
    for _ in range(6):
        policy.observe(BlockRecord(15, 15, 0, 0, None, 0.024))
        naps.append(policy.sleep())
        policy.wake()
    assert naps[:3] == [0, 0, 0], "less is lost than a block gains"
    assert 0 < max(naps) < 20, "a block gains as much as twelve plain steps take"


def test_saved_costs_are_known_from_the_first_block_on(tmp_path):
    world, policy = World(0, *WORLDS["fair"]), Adaptive()
    speed(world, policy, CHANGE)
    policy.save(tmp_path / "costs.json")
    loaded = Adaptive.load(tmp_path / "costs.json")
    assert loaded.verify_length(Drafts(BLOCK - 1, [0.9] + [0.1] * 14)) < 4
    assert Adaptive().verify_length(Drafts(BLOCK - 1, [0.9] + [0.1] * 14)) == BLOCK - 1


DAMAGED = {
    "words": lambda saved: {"": {"1": "no"}},
    "no drafting": lambda saved: {"": {"blocks": saved["blocks"]}},
    "one number of two": lambda saved: {"": saved | {"drafting": [0.1]}},
    "drafts that take no time": lambda saved: {"": saved | {"drafting": [0.0, 0.0]}},
    "a draft that is not a number": lambda saved: {"": saved | {"drafting": [0.1, math.nan]}},
    "a block that takes no time": lambda saved: {"": saved | {"blocks": saved["blocks"] | {"3": 0.0}}},
    "a block without end": lambda saved: {"": saved | {"blocks": saved["blocks"] | {"3": math.inf}}},
    "a length is missing": lambda saved: {"": saved | {"blocks": {"3": 0.1}}},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_costs_are_refused(tmp_path, name):
    policy, path = Adaptive(), tmp_path / "costs.json"
    drafts_asked(policy, 10, 0.01, 0.01)
    policy.save(path)
    Adaptive.load(path)
    path.write_text(json.dumps(DAMAGED[name](json.loads(path.read_text())[""])))
    with pytest.raises(DFlashError, match="holds no costs of blocks"):
        Adaptive.load(path)


def test_what_a_block_that_gained_teaches_waits_for_the_next_pass():
    """Such a block leaves the drafter awake. What one that lost teaches may put it to sleep, and is learned at once."""
    policy = Adaptive()

    def chance_after(accepted: int) -> float:
        policy.observe(BlockRecord(15, 15, accepted, accepted, [0.9] * 15, 0.1))
        return policy._source("").chances.chance(0.9)

    chances = [chance_after(5) for _ in range(ENOUGH)]
    assert len(set(chances)) == ENOUGH, "at first each block is learned at once"
    assert chance_after(15) == chances[-1]
    policy.catch_up()
    learned = policy._source("").chances.chance(0.9)
    assert learned > chances[-1]
    assert chance_after(15) == learned
    policy.begin()
    assert policy._source("").chances.chance(0.9) > learned, "the end of a text is no reason to forget"
    learned = policy._source("").chances.chance(0.9)
    assert chance_after(0) < learned


def test_the_drafter_falls_asleep_after_a_block_and_not_while_the_next_is_verified():
    policy = Adaptive()
    for _ in range(2 * ENOUGH):
        policy.observe(BlockRecord(15, 15, 0, 0, [0.5] * 15, 0.1))
    while policy.sleep():
        policy.observe(BlockRecord(0, 0, 0, 0, None, 0.05, asleep=True))
    policy.observe(BlockRecord(15, 15, 4, 4, [0.5] * 15, 0.1))  # it gained by luck
    asleep = policy.sleep()
    policy.catch_up()
    assert policy.sleep() == asleep


def test_each_source_of_drafts_has_costs_and_chances_of_its_own():
    policy = Adaptive()
    for _ in range(30):
        policy.observe(BlockRecord(15, 15, 0, 0, [0.5] * 15, 0.1, "model"))
        policy.observe(BlockRecord(15, 15, 15, 15, [0.5] * 15, 0.05, "lookup"))
    assert policy.verify_length(Drafts(15, [0.5] * 15, "lookup")) > 8
    assert policy.why()["tokens"] / policy.why()["seconds"] > 100
    assert policy.verify_length(Drafts(15, [0.5] * 15, "model")) < 3


# --- its parts ---------------------------------------------------------------------------------------------


def test_costs_of_one_length_tell_of_the_others():
    costs = BlockCosts()
    assert not costs.known
    for _ in range(20):
        costs.observe(0, 0.010)
        costs.observe(8, 0.030)
    assert costs.expected(0) == pytest.approx(0.010, rel=0.05)
    assert 0.013 < costs.expected(4) < 0.024
    assert costs.hoped_to(4)[4] < 0.9 * costs.expected(4), "it was never tried"
    assert costs.hoped_to(8)[8] > 0.9 * costs.expected(8)
    for _ in range(20):
        costs.observe(8, 0.060)  # everything takes twice as long now
    assert costs.expected(8) == pytest.approx(0.060, rel=0.05)
    assert costs.expected(0) > 0.013


def test_a_plain_step_takes_no_longer_than_a_block_whenever_it_was_observed():
    costs = BlockCosts()
    for drafts, seconds in [(1, 0.05)] * 10 + [(PLAIN, 0.09)] * 4 + [(1, 0.05)] * 4:  # the machine was slow meanwhile
        costs.observe(drafts, seconds)
    assert costs.expected(PLAIN) > 0.06
    assert costs.plain_step() == pytest.approx(0.05, rel=0.05)


def test_one_slow_block_is_soon_forgotten():
    costs = BlockCosts()
    for seconds in [0.03] * 20 + [0.3] + [0.03] * 3:
        costs.observe(8, seconds)
    assert costs.expected(8) == pytest.approx(0.03, rel=0.08)


def test_on_a_noisy_machine_costs_are_means_of_more_blocks_and_a_change_is_still_followed():
    """Blocks of one length take a quarter more or less; those of 15 drafts take a fifth longer than those of 7."""
    wrong, blocks = [], []
    for seed in range(10):
        noise = random.Random(seed)
        costs = BlockCosts()
        for i in range(150):
            for drafts, seconds in ((7, 0.020), (11, 0.022), (15, 0.024)):
                costs.observe(drafts, seconds * noise.lognormvariate(0, 0.25))
            if i > 50:
                wrong.append(abs(costs.expected(15) / costs.expected(7) / 1.2 - 1))
        for block in range(50):  # everything takes twice as long now
            costs.observe(15, 0.048 * noise.lognormvariate(0, 0.25))
            if costs.expected(15) > 0.9 * 0.048:
                blocks.append(block + 1)
                break
    assert np.mean(wrong) < 0.1
    assert np.mean(blocks) < 9


class NoisyWorld(World):
    def noise(self) -> float:
        return self.random.lognormvariate(0, 0.25)


def test_on_a_noisy_machine_adaptive_loses_less_than_eight_percent_to_an_oracle():
    names = ("good", "fair", "poor", "fair, then good")
    ours = sum(1 / speed(NoisyWorld(seed, *WORLDS[name]), Adaptive()) for name in names for seed in range(4))
    oracle = sum(1 / oracle_speed(NoisyWorld(seed, *WORLDS[name])) for name in names for seed in range(4))
    assert oracle / ours > 0.92


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
        assert not drafts.count or len(drafts.confidence) == drafts.count
        return min(2, drafts.count)

    def observe(self, block):
        self.blocks.append(block)
        self.left = self.left - 1 if block.asleep else 3


class Patient(Policy):
    """Learns the probabilities in every block, and waits for them in every other one."""

    reads_confidence = True

    def __init__(self):
        self.told, self.blocks = [], []

    def waits_for_confidence(self, source):
        return len(self.blocks) % 2 == 1

    def verify_length(self, drafts):
        self.told.append(drafts.confidence)
        return min(5, drafts.count)

    def observe(self, block):
        self.blocks.append(block)


def test_who_does_not_wait_for_the_probabilities_learns_them_after_the_block():
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2))
    policy = Patient()
    decoder.spec_generate([3, 1, 4, 1, 5], 20, policy=policy, stop_token_ids=[])
    drafted = [i for i, block in enumerate(policy.blocks) if block.drafted]
    assert len(drafted) > 2
    for i in drafted:
        told, block = policy.told[i], policy.blocks[i]
        assert len(block.confidence) == block.drafted
        assert told == (block.confidence if i % 2 else None)
        assert (block.choosing > 0) == (block.drafting > 0) == (i % 2 == 1)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "sliding"])
@pytest.mark.parametrize("policy", [lambda: Fixed(0), lambda: Fixed(3), Adaptive, Dozing, Patient])
def test_no_policy_changes_the_text(kind, policy):
    expected, lead = plain_greedy(target(kind, 1).model, [3, 1, 4, 1, 5], 40)
    assert lead > 1e-4
    decoder = DFlashSpeculativeDecoder(target(kind, 1), bound_drafter(kind, 2))
    tokens = decoder.spec_generate([3, 1, 4, 1, 5], 40, policy=policy(), stop_token_ids=[])
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


def test_the_steps_of_a_nap_take_all_of_its_time(monkeypatch):
    model, policy = target("qwen3", 1), Dozing()
    forward = model.forward_with_hidden_states

    def slowly(*inputs, **early):
        time.sleep(0.1)
        return forward(*inputs, **early)

    monkeypatch.setattr(model, "forward_with_hidden_states", slowly)
    run = Decoding(model, bound_drafter("qwen3", 2), policy=policy)
    blocks = decode(run, prefill(run, [3, 1, 4, 1, 5]), 24, 16)
    for _ in range(3):
        next(blocks)
    assert sum(block.seconds for block in policy.blocks) >= 3 * 0.1


@pytest.mark.looks_at_the_clock
def test_by_default_it_is_the_adaptive_policy_that_decides():
    expected, _ = plain_greedy(target("qwen3", 1).model, [3, 1, 4], 30)
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2))
    assert decoder.spec_generate([3, 1, 4], 30, stop_token_ids=[])[0, 3:].tolist() == expected
    assert isinstance(decoder._policies["adaptive"], Adaptive)


@pytest.mark.looks_at_the_clock
def test_a_policy_is_chosen_by_name_or_number_and_unknown_ones_are_named():
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2), policy="adaptive")
    decoder.spec_generate([3, 1, 4], 8)
    assert list(decoder._policies) == ["adaptive"]
    assert decoder._policies["adaptive"]._sources[""].costs.known
    with pytest.raises(DFlashError, match="Unknown policy 'adaptif'; did you mean 'adaptive'"):
        decoder.spec_generate([3, 1, 4], 8, policy="adaptif")

    @register_policy("one-at-a-time")
    class OneAtATime(Policy):
        def verify_length(self, drafts):
            return min(1, drafts.count)

    lengths = [len(r) for r in blocks_of(decoder, policy="one-at-a-time")]
    assert max(lengths) <= 2
    register_policy("no policy")(dict)
    with pytest.raises(DFlashError, match="is a dict; it must be a subclass"):
        decoder.spec_generate([3, 1, 4], 8, policy="no policy")
    with pytest.raises(DFlashError, match="a registered name or a dflash"):
        decoder.spec_generate([3, 1, 4], 8, policy=lambda drafts: 3)


@pytest.mark.parametrize(
    ("method", "returned"), [("verify_length", 2.5), ("verify_length", -3), ("draft_length", None), ("sleep", 1.5)]
)
@pytest.mark.parametrize("told", [False, True])
def test_what_a_policy_returns_is_checked(method, returned, told):
    class Emma(Policy):
        reads_confidence = told

        def answer(self, *_):
            return returned

    setattr(Emma, method, Emma.answer)
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2))
    with pytest.raises(GenerationError) as error:
        decoder.spec_generate([3, 1, 4], 40, policy=Emma(), stop_token_ids=[])
    refused(error, f"Emma.answer returned {returned}; expected a whole number of at least 0")


@pytest.mark.parametrize("number", [np.int64, mx.array, lambda n: 0, lambda n: 99])
def test_any_whole_number_is_one_and_one_beyond_the_most_means_all(number):
    class Two(Policy):
        def draft_length(self, most):
            return number(min(2, most))

        def verify_length(self, drafts):
            return number(drafts.count)

    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2))
    assert decoder.spec_generate([3, 1, 4], 5, policy=Two(), stop_token_ids=[]).size == 8


def test_of_drafts_that_were_drawn_a_policy_is_told_what_they_were_drawn_from():
    policy, told = Dozing(), []
    policy.verify_length = lambda drafts: told.append(drafts.confidence) or drafts.count
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2), policy=policy)
    decoder.spec_generate([3, 1, 4, 1, 5], 12, 1.0, verify="speculative_sampling", seed=1)
    expected = np.concatenate([confidence for confidence in told if confidence])
    assert (expected > 1 / 32).all()
    assert (expected < 1).all()


def blocks_of(decoder: DFlashSpeculativeDecoder, **options) -> list[list[int]]:
    blocks: list[list[int]] = []
    decoder.spec_generate([3, 1, 4], 12, stream_callback=blocks.append, **options)
    return blocks


# --- how many drafts to ask for --------------------------------------------------------------------------


def drafts_asked(policy: Policy, blocks: int, fixed: float, each: float) -> list[int]:
    """Of each block, where ``n`` drafts take ``fixed + each * n`` seconds and each has a chance of 0.9."""
    rng, asked = random.Random(0), []
    for _ in range(blocks):
        n = policy.draft_length(BLOCK - 1)
        drafting = fixed + each * n
        k = policy.verify_length(Drafts(n, [0.9] * n))
        policy.catch_up()
        accepted = next((i for i in range(k) if rng.random() > 0.9), k)
        seconds = drafting + 0.04 + 0.0005 * k
        policy.observe(BlockRecord(n, k, accepted, min(accepted + 1, n), [0.9] * n, seconds, drafting=drafting))
        while policy.sleep():
            policy.observe(BlockRecord(0, 0, 0, 0, None, 0.04, asleep=True))
        asked.append(n)
    return asked


@pytest.mark.parametrize(("fixed", "each", "fewest", "most"), [(0.01, 0.0, 12, 15), (0.0, 0.02, 1, 4)])
def test_drafts_that_cost_something_each_are_asked_for_while_they_pay(fixed, each, fewest, most):
    """Of chances of 0.9 nearly all drafts pay if they are there, and few if each costs half a plain step."""
    assert fewest <= np.median(drafts_asked(Adaptive(), 200, fixed, each)[50:]) <= most


def test_a_drafter_with_fewer_drafts_than_there_is_room_for_is_asked_for_half_of_its_own():
    """As the model's part of ``ngram+``: copies fill longer blocks than it does."""
    costs = DraftCosts()
    assert costs.trial(15) == 15
    costs.observe(3, 0.01)
    for _ in range(DraftCosts.trials):
        assert not costs.known
        assert (costs.trial(15), costs.trial(3), costs.trial(2)) == (1, 1, 2)
        costs.observe(1, 0.01)
    assert costs.known


def test_a_shorter_draft_is_tried_where_it_costs_no_right_ones():
    policy = Adaptive()
    for drafted, matched, expected in [(15, 15, 15), (15, 8, 15), (15, 7, 7), (7, 7, 15), (0, 0, 15)]:
        policy.observe(BlockRecord(drafted, drafted, matched, matched, [0.9] * drafted, 0.05, drafting=0.01))
        policy.catch_up()
        assert policy.draft_length(15) == expected
    policy.observe(BlockRecord(15, 15, 0, 0, [0.9] * 15, 0.05, drafting=0.01))
    policy.begin()
    assert policy.draft_length(15) == 15, "the last text says nothing of this one"


def test_a_shorter_draft_is_tried_at_last_where_every_draft_is_right():
    policy, asked = Adaptive(), []
    for _ in range(40):
        asked.append(policy.draft_length(15))
        policy.observe(BlockRecord(asked[-1], asked[-1], asked[-1], asked[-1], [0.99] * asked[-1], 0.05, drafting=0.01))
        policy.catch_up()
    assert asked.count(7) == DraftCosts.trials
    assert 7 not in asked[:20]


def test_a_loaded_policy_knows_what_was_saved_and_tries_no_lengths_anew(tmp_path):
    policy = Adaptive()
    assert drafts_asked(policy, 100, 0.0, 0.02)[:5].count(7) == 3, "what a draft costs is found by trying"
    policy.save(tmp_path / "costs.json")
    loaded = Adaptive.load(tmp_path / "costs.json")
    for count in range(BLOCK):
        assert loaded._sources[""].costs.expected(count) == pytest.approx(policy._sources[""].costs.expected(count))
        assert loaded._sources[""].drafting.expected(count) == (
            pytest.approx(policy._sources[""].drafting.expected(count))
        )
    asked = drafts_asked(loaded, 60, 0.0, 0.02)
    assert max(asked[1:]) < 7, "one block tells what drafts are worth"
    assert 1 <= np.median(asked) <= 4


def test_a_drafter_does_not_sleep_for_a_length_that_was_only_tried():
    """All drafts of the first block took four plain steps; one draft, the only good one, takes one."""
    policy = Adaptive(first_nap=1)
    policy._source("").costs.observe(PLAIN, 0.04)
    for _ in range(20):
        policy._source("").costs.observe(1, 0.04)
    policy.observe(BlockRecord(15, 15, 1, 1, [0.9] + [0.01] * 14, 0.16))
    assert not policy.sleep()
