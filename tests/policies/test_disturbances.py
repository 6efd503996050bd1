"""The default policy recovers from any times that it was told, and costs little where drafts are wrong.

The worlds are simulated: every cost and chance is known, so that a speed tells what was decided and not how lucky it
was.
"""

import math
import random
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.worlds import PLAIN, Clock, World, decode, staircase, through, tiles

from dflash.policies.adaptive import Adaptive
from dflash.policies.base import BlockRecord, Drafts

# SmolLM2 with its drafter on two cores; a drafter that is nearly always right, on a small target.
PUBLIC = World(0.055, staircase(0.055, 0.057, 0.080, 0.091, 0.088, 0.084), (0.5, 0.45, 0.4), draft=0.008, most=3)
PAIR = World(0.0065, staircase(0.007, 0.0075, 0.008, 0.0085, 0.0092, 0.0095, 0.010, 0.0105), (0.93, 0.95), draft=0.0056)
GPU = World(0.02, tiles(8, 0.018, 0.003), (0.7, 0.75, 0.8), draft=0.002)

USEFUL = {
    "public model": PUBLIC,
    "bundled pair": PAIR,
    "tiles of eight": GPU,
    "steps of four tokens": World(0.02, tiles(4, 0.012, 0.008), (0.85,), draft=0.001),
    "dear passes": World(0.02, tiles(1, 0.01, 0.01), (0.95,), draft=0.001),
    "autoregressive": World(0.05, tiles(8, 0.047, 0.004), (0.8,), each=0.01, most=8),
    "proposes now and then": GPU.but(chances=(0.9,), offers=0.4),
    "tree": GPU.but(chances=(0.6, 0.6, 0.5, 0.5), most=8, parents=(-1, 0, -1, 1, 2, 3, 0, 5)),
}
USELESS = {
    "cheap": PUBLIC.but(chances=(0.03,)),
    "as dear as two steps": PAIR.but(chances=(0.03,)),
    "as dear as four steps": World(0.01, tiles(4, 0.02, 0.01), (0.02,), draft=0.01),
    "nearly pays": PUBLIC.but(chances=(0.15,)),
    "proposes seldom": GPU.but(chances=(0.1,), offers=0.1),
}
WORLDS = USEFUL | USELESS

DISTURBANCES = {
    "none": lambda number, plain, draw: 1,
    "the first two passes are compiled": lambda number, plain, draw: 50 if number < 2 else 1,
    "the first two blocks are compiled": lambda number, plain, draw: 50 if 4 <= number < 6 else 1,
    "blocks are slow": lambda number, plain, draw: 1 if plain else 4,
    "everything is slow": lambda number, plain, draw: 4,
    "plain steps are slow": lambda number, plain, draw: 4 if plain else 1,
    "plain steps are fast": lambda number, plain, draw: 0.4 if plain else 1,
    "one time in five is long": lambda number, plain, draw: 20 if draw.random() < 0.2 else 1,
    "every other time is long": lambda number, plain, draw: 20 if draw.random() < 0.5 else 1,
    "times mean nothing": lambda number, plain, draw: 10 ** draw.uniform(-1.5, 1.5),
}


LUCKY = "tree", "proposes now and then"
"""Worlds in which drafts are right, or made, at random: elsewhere their fates are spread evenly."""


def quiet_end(world: World, policy: Adaptive, clock: Clock, tokens: int = 600) -> float:
    """The share of the best fixed length's speed that is reached by the end of ``tokens`` quiet tokens."""
    clock.disturb = lambda number, plain: 1.0
    decode(world, policy, 200, clock)
    return decode(world, policy, tokens - 200, clock) / world.best


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("name", WORLDS)
def test_600_tokens_after_a_disturbance_it_is_within_5_percent_of_the_best_fixed_length(name, disturbance):
    ends = []
    for seed in range(6):
        policy, draw = Adaptive(), random.Random(seed)
        clock = Clock(seed, 0.05, lambda number, plain, draw=draw: DISTURBANCES[disturbance](number, plain, draw))
        policy.begin()
        decode(WORLDS[name], policy, 200, clock)
        ends.append(quiet_end(WORLDS[name], policy, clock))
    assert fmean(ends) > (0.92 if name in LUCKY else 0.95), ends
    assert min(ends) > (0.8 if name in LUCKY else 0.85)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(WORLDS)),
    st.lists(st.tuples(st.floats(0.02, 100), st.floats(0.02, 100)), max_size=150),
    st.integers(0, 9),
)
@example("public model", [(4.0, 1.0)] * 60, 0)
@example("bundled pair", [(100.0, 100.0)] * 3, 0)
def test_after_any_times_600_quiet_tokens_end_near_the_best_fixed_length(name, factors, seed):
    """``factors`` are those of each time of a block and of a plain step."""
    policy = Adaptive()
    clock = Clock(seed, 0.0, lambda number, plain: factors[number][plain] if number < len(factors) else 1.0)
    policy.begin()
    for _ in factors:
        decode(WORLDS[name], policy, 1, clock)
    assert quiet_end(WORLDS[name], policy, clock) > (0.8 if name in LUCKY else 0.9)


@settings(max_examples=100)
@given(st.sampled_from(sorted(WORLDS)), st.integers(0, 120), st.floats(0, 1e6))
@example("public model", 5, 1e4)
@example("public model", 70, 0.0)
def test_one_time_of_any_size_changes_no_decision(name, number, factor):
    """One that is much too short may at most have a length tried that is not known yet."""
    decided: list[list[int]] = [[], []]
    for times, lengths in zip((1.0, max(factor, 1.0)), decided, strict=True):
        policy, clock = Adaptive(), Clock(0, 0.0, lambda n, plain, times=times: times if n == number else 1.0)
        policy.begin()
        decode(WORLDS[name], policy, 150, clock, lengths)
    assert decided[0] == decided[1]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", USELESS)
def test_a_useless_drafter_costs_at_most_4_percent_of_600_tokens(name, noise):
    """Those that it needs to find out included; where a block takes as long as four steps, 6 %."""
    for seed in range(4):
        policy = Adaptive()
        policy.begin()
        lost = 1 - USELESS[name].plain * decode(USELESS[name], policy, 600, Clock(seed, noise))
        assert lost < (0.06 if name == "as dear as four steps" else 0.04)


def test_the_same_records_give_the_same_decisions():
    def lengths(seed: int) -> list[int]:
        policy, decided = Adaptive(), []
        policy.begin()
        decode(PAIR, policy, 400, Clock(seed, 0.3), decided)
        return decided

    assert lengths(0) == lengths(0)
    assert lengths(0) != lengths(1)


@pytest.mark.parametrize("name", ["public model", "bundled pair", "tiles of eight", "autoregressive"])
def test_a_drafter_that_becomes_useless_and_good_again_is_noticed_both_times(name):
    good, policy, clock = WORLDS[name], Adaptive(), Clock(0)
    useless = good.but(chances=(0.02,))
    policy.begin()
    for _ in range(2):
        assert decode(good, policy, 300, clock) > 0.75 * good.best
        assert decode(useless, policy, 300, clock) > 0.75 * useless.best


@pytest.mark.parametrize("name", USEFUL)
def test_the_next_request_finds_a_good_drafter_within_a_few_tokens(name):
    good, policy, clock = USEFUL[name], Adaptive(), Clock(0)
    policy.begin()
    decode(good, policy, 200, clock)
    decode(good.but(chances=(0.0,)), policy, 300, clock)
    policy.begin()
    decided: list[int] = []
    decode(good, policy, 60, clock, decided)
    assert decided[0] != PLAIN
    assert decided.count(PLAIN) < 40


@pytest.mark.parametrize("name", ["public model", "bundled pair"])
def test_a_context_that_grows_is_followed(name):
    """Passes take up to three times as long; the best fixed length at the end is another one."""
    world, policy, clock = WORLDS[name], Adaptive(), Clock(0, 0.05)
    policy.begin()
    for step in range(20):
        grown = 1 + step / 10
        longer = world.but(plain=grown * world.plain, passes=lambda n, by=grown**2: by * world.passes(n))
        decode(longer, policy, 60, clock)
    assert quiet_end(longer, policy, clock) > 0.92


def test_a_drafter_that_finds_something_ends_a_pause():
    policy = Adaptive()
    policy.begin()
    decode(USELESS["cheap"], policy, 40, Clock(0))
    policy.wake()
    assert policy.sleep() == 0
    left = [policy.observe(BlockRecord(0, 0, 0, 0, None, 0.07, asleep=True, rows=n)) or policy.sleep() for n in (2, 1)]
    assert left == [4, 0], "steps of two rows are not timed yet; the pause that times them ends with them"
    fresh = Adaptive()
    fresh.wake()
    assert fresh.sleep() > 0, "plain steps are timed first"


@pytest.mark.parametrize("seconds", [0.12, 0.085], ids=["pauses", "nearly pays"])
def test_no_longer_block_is_tried_before_a_draft_is_right(seconds: float):
    """Where a pass of two drafts costs much more than one of one, wrong drafts are no reason to find that out."""
    policy, lengths = Adaptive(), []
    for _ in range(200):
        if policy.sleep():
            policy.observe(BlockRecord(0, 0, 0, 0, None, 0.07, asleep=True))
        else:
            lengths.append(policy.verify_length(Drafts(min(policy.draft_length(15), 15), None)))
            policy.observe(BlockRecord(lengths[-1], lengths[-1], 0, 0, None, seconds, outcomes={0: False}))
    assert len(lengths) > 5
    assert set(lengths) == {1}


# --- batches: what a pass costs depends on the tokens of all rows ------------------------------------------

BUSY = through({1: 0.050, 2: 0.044, 4: 0.088, 8: 0.104, 16: 0.175, 32: 0.310})  # SmolLM2 on one core
BATCHES = {
    "public model": World(0.0, BUSY, (0.45, 0.4, 0.35), draft=0.010, most=3),
    "public model, useless": World(0.0, BUSY, (0.03,), draft=0.010, most=3),
    "bundled pair": World(0.0, through({1: 0.006, 8: 0.009, 64: 0.030, 256: 0.110}), (0.93, 0.95), draft=0.0056),
    "GPU": World(0.0, through({1: 0.02, 64: 0.022, 256: 0.04}), (0.7, 0.75, 0.8), draft=0.002),
    "GPU, useless": World(0.0, through({1: 0.02, 64: 0.022, 256: 0.04}), (0.03,), draft=0.002),
    "tiles of 16": World(0.0, tiles(16, 0.012, 0.008), (0.8,), draft=0.002),
    "text by text": World(0.0, through({1: 0.05, 32: 0.06, 256: 0.3}), (0.8,), each=0.002, most=8),
}
ROWS = {
    "eight": [8],
    "rows leave": [16, 14, 11, 8, 7, 5, 4, 3, 2, 1],
    "rows join": [1, 2, 3, 4, 6, 8, 12, 16],
    "rows come and go": [4, 16, 1, 8, 2, 12, 3],
}


def share(world: World, policy: Adaptive, clock: Clock, rows: list[int], tokens: float, each: float = 20) -> float:
    """The speed over that of the best fixed length for each number of rows, which changes after ``each`` tokens."""
    spent = least = 0.0
    for step in range(math.ceil(tokens / each)):
        here = world.at(rows[step % len(rows)])
        spent += each / decode(here, policy, each, clock)
        least += each / here.best
    return least / spent


@pytest.mark.parametrize("disturbance", ["blocks are slow", "times mean nothing"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_ends_near_the_best_fixed_lengths_whatever_the_times_were_before(name, rows, disturbance):
    ends = []
    for seed in range(2):
        policy, draw = Adaptive(), random.Random(seed)
        clock = Clock(seed, 0.05, lambda number, plain, draw=draw: DISTURBANCES[disturbance](number, plain, draw))
        policy.begin()
        share(BATCHES[name], policy, clock, ROWS[rows], 200)
        clock.disturb = lambda number, plain: 1.0
        share(BATCHES[name], policy, clock, ROWS[rows], 200 if len(ROWS[rows]) == 1 else 600)
        ends.append(share(BATCHES[name], policy, clock, ROWS[rows], 400))
    assert fmean(ends) > (0.9 if "useless" in name else 0.85), ends


@pytest.mark.parametrize("name", BATCHES)
def test_a_width_that_is_new_begins_with_what_others_cost(name):
    """Four rows first, then two, which a policy that knows nothing would have to find out about."""
    world, known, fresh = BATCHES[name], [], []
    for seed in range(4):
        for rows, shares in (([4], known), ([], fresh)):
            policy, clock = Adaptive(), Clock(seed, 0.05)
            policy.begin()
            for before in rows:
                share(world, policy, clock, [before], 200)
            shares.append(share(world, policy, clock, [2], 60))
    assert fmean(known) > fmean(fresh) - 0.005, (known, fresh)


def test_where_no_block_can_pay_at_a_new_width_one_is_tried_at_most():
    """Two rows with one draft are four tokens, and those took as long as two steps of two rows."""
    policy, clock, decided = Adaptive(), Clock(0, 0.05), []
    world = BATCHES["public model"]
    policy.begin()
    decode(world.at(4), policy, 200, clock)
    decode(world.at(2), policy, 48, clock, decided)
    assert len(decided) - decided.count(PLAIN) <= 1
