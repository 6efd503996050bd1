"""What results say: rows of cells, effects in pairs of drafters, seeds counted once."""

import csv
import dataclasses
import io
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash.evaluation.statistics import Interval, student
from dflash.study.cache import Answer
from dflash.study.effects import Effect, effects, matched
from dflash.study.files import as_csv
from dflash.study.results import CellAnswers
from dflash.study.settings import Cell

# --- cells ------------------------------------------------------------------------------------------------


def cell(
    level: str, lengths: list[int], seed: int = 0, other: str = "a", *, plain: bool = False, trained: str | None = None
) -> CellAnswers:
    """Answers of two passes each, that committed ``lengths`` tokens in all, in a tenth of a second a token.

    ``trained`` is the key of the drafter's training.
    """
    options = Cell({"factor": level, "other": other}, seed, {}, {})
    name = f"{level}{seed}{other}"
    planned: Any = SimpleNamespace(cell=options, training=trained, answers=name, name=name, plain="plain")
    answers = [Answer([1] * (n + 1), n / 10, [n - 1, 1], [3, 3], [n - 2, 0], "today") for n in lengths]
    slow = [Answer(a.tokens, 2 * a.seconds, [], [], [], "today") for a in answers] if plain else []
    return CellAnswers(planned, "set", answers, slow, len(lengths), {})


def test_a_row_has_lengths_speeds_and_what_plain_decoding_took():
    row = cell("x", [4, 8, 6], plain=True).row()
    assert (row["cell"], row["factor"], row["other"], row["seed"], row["answers"]) == ("x0a", "x", "a", 0, 3)
    assert (row["acceptance_length"], row["tokens_per_s"], row["speedup"]) == (3.0, 10.0, 2.0)
    assert row["drafted_per_pass"] == 3.0
    assert row["identical"] is True
    assert row["acceptance_length_low"] < 3 < row["acceptance_length_high"]
    table = csv.DictReader(io.StringIO(as_csv([{"cell": "a", "x": 1}, {"cell": "b", "y": "q,r"}])))
    assert list(table) == [{"cell": "a", "x": "1", "y": ""}, {"cell": "b", "x": "", "y": "q,r"}]


def effects_of(cells: list[CellAnswers], metric: str = "acceptance_length", **factors: str) -> dict[tuple, Effect]:
    """Effects by the labels before and after, and by what they are within; ``factors`` have their levels as letters."""
    levels = {name: dict.fromkeys(labels) for name, labels in factors.items()}
    plan: Any = SimpleNamespace(study=SimpleNamespace(factors=levels, prompt_sets={"set": None}))
    found = [effect for effect in effects(plan, cells) if effect.metric == metric]
    return {(e.before, e.after, *[e.within] * bool(e.within)): e for e in found}


def test_an_effect_is_the_mean_ratio_of_complete_cells_alike_in_everything_else():
    cells = [cell("x", [4, 8, 6, 4, 6]), cell("y", [8, 16, 12, 8, 12]), cell("z", [4, 8, 6, 4, 6])]
    cells.append(cell("x", [6] * 5, other="b"))
    (group,) = matched(cells, "factor")
    assert [c.planned.cell.levels["factor"] for c in group] == ["x", "y", "z"]  # the fourth has no partner
    found = effects_of(cells, factor="xyz")
    doubled, same = found["x", "y"], found["x", "z"]
    assert (doubled.ratio.value, doubled.ratio.low, doubled.ratio.high) == pytest.approx((2, 2, 2))
    assert (doubled.pairs, doubled.agreeing, doubled.tied, doubled.verdict) == (1, 1, 0, "higher")
    assert (same.ratio.value, same.pairs, same.agreeing, same.tied) == (1, 1, 0, 1)
    assert not effects_of([cells[0], dataclasses.replace(cells[1], expected=6)], factor="xy")


def trained(level: str, n: int, seed: int, other: str = "a") -> CellAnswers:
    return cell(level, [n] * 5, seed, other, trained=f"{level}{seed}")


def test_the_spread_between_drafters_widens_what_prompts_alone_would_say():
    cells = [trained(x, n + 2 * seed * (x == "y"), seed) for x, n in (("x", 20), ("y", 22)) for seed in (0, 1)]
    effect = effects_of(cells, factor="xy")["x", "y"]
    assert effect.ratio.value == pytest.approx(math.sqrt(22 * 24) / 20)
    spread = math.log(24 / 22) / 2  # one pair of drafters apart, one equal: two degrees of freedom
    half = student(2) * spread  # two pairs: the square root of 2 / 2
    assert math.log(effect.ratio.high / effect.ratio.value) == pytest.approx(half)
    assert (effect.verdict, effect.pairs) == ("not told apart", 2)
    copies = [
        trained(x.planned.cell.levels["factor"], sum(x.answers[0].committed), seed, way)
        for x in cells
        for seed in [x.planned.cell.seed]
        for way in "abcdef"
    ]
    sixfold = effects_of(copies, factor="xy", other="abcdef")["x", "y"]
    assert dataclasses.replace(sixfold, cells=2) == effect  # one drafter, however often it decodes


def test_ways_of_decoding_are_averaged_before_drafters_are_compared():
    """One drafter of each level has 20 either way, the other 25 and 16: on average, they are alike."""
    lengths = {(0, "a"): 20, (0, "b"): 20, (1, "a"): 25, (1, "b"): 16}
    cells = [trained(x, times * n, *key) for x, times in (("x", 1), ("y", 2)) for key, n in lengths.items()]
    ratio = effects_of(cells, factor="xy")["x", "y"].ratio
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))


def test_the_drafters_own_luck_cancels_where_both_cells_of_a_pair_have_it():
    """Drafters of 10 and of 40, each a tenth better by the other way of decoding."""
    cells = [trained("x", n, seed, way) for seed, n in ((0, 10), (1, 40)) for way, n in (("a", n), ("b", n + n // 10))]
    effect = effects_of(cells, other="ab")["a", "b"]
    assert (effect.ratio.value, effect.ratio.low, effect.ratio.high) == pytest.approx((1.1, 1.1, 1.1))
    assert (effect.pairs, effect.agreeing, effect.verdict) == (2, 2, "higher")
    cells[-1] = trained("x", 50, 1, "b")
    assert effects_of(cells, other="ab")["a", "b"].verdict == "not told apart"  # two drafters that disagree


def test_without_a_second_seed_a_drafter_stands_for_itself_alone():
    cells = [trained("x", 20, 0), trained("y", 30, 0), cell("z", [40] * 5)]
    found = effects_of(cells, factor="xyz")
    assert found["x", "y"].verdict == found["x", "z"].verdict == "higher, one seed"
    assert effects_of([cell("x", [20] * 5), cell("y", [30] * 5)], factor="xy")["x", "y"].verdict == "higher"


@pytest.mark.parametrize(("last", "depends"), [(40, True), (24, False)])
def test_an_effect_that_depends_on_another_factor_is_shown_within_its_levels(last, depends):
    """From x to y: a fifth more within a, and ``last`` over 20 within b."""
    noise = [0, 1, -1, 0, 1, -1]
    cells = [
        cell(level, [10 * n + move for move in noise], other=other)
        for level, other, n in (("x", "a", 20), ("y", "a", 24), ("x", "b", 20), ("y", "b", last))
    ]
    found = effects_of(cells, factor="xy", other="ab")
    assert found["x", "y"].depends_on == (("other",) if depends else ())
    assert ("depends on other" in found["x", "y"].verdict) == depends
    within = {key: effect.ratio.value for key, effect in found.items() if len(key) == 3 and key[0] == "x"}
    expected = {("x", "y", "other a"): 1.2, ("x", "y", "other b"): 2.0}
    assert within == (pytest.approx(expected) if depends else {})


@pytest.mark.parametrize(("lucky", "depends"), [(20, True), (24, False)])
def test_a_drafters_luck_with_one_way_of_decoding_is_no_dependence_on_it(lucky, depends):
    """By way b, y has twice the length of x. One drafter of each level is ``lucky`` by way a, the other by way b."""
    lengths = {(0, "a"): lucky, (1, "a"): 20, (0, "b"): 20, (1, "b"): lucky}
    cells = [
        trained(level, n * (1 + (level == "y" and way == "b")), seed, way)
        for level in "xy"
        for (seed, way), n in lengths.items()
    ]
    effect = effects_of(cells, factor="xy", other="ab")["x", "y"]
    assert effect.ratio.value == pytest.approx(math.sqrt(2))
    assert effect.depends_on == (("other",) if depends else ())


def test_a_speed_is_compared_prompt_by_prompt_and_a_stall_moves_nothing():
    cells = [cell(level, [10] * 7, other=other) for other in "ab" for level in "xy"]
    for number, factor in ((1, 2.0), (3, 8.0)):
        quicker = [dataclasses.replace(a, seconds=a.seconds / factor) for a in cells[number].answers]
        quicker[number] = dataclasses.replace(quicker[number], seconds=900.0)
        cells[number] = dataclasses.replace(cells[number], answers=quicker)
    assert effects_of(cells, "tokens_per_s", factor="xy")["x", "y"].ratio.value == pytest.approx(4)


def test_a_speed_is_compared_only_where_one_process_timed_both_sides():
    """The second cell is twice as fast, but on prompts that a busier process timed."""
    one, other = cell("x", [10] * 9, plain=True), cell("y", [10] * 9, plain=True)
    told = "timed by different processes"
    for apart, verdict, ratio, pairs, speedup in ((3, "higher", 2, 1, 4), (9, told, None, 0, None)):
        other.answers[:] = [dataclasses.replace(a, seconds=0.5) for a in one.answers]
        other.answers[:apart] = [dataclasses.replace(a, seconds=9.0, at="tomorrow") for a in one.answers[:apart]]
        row = effects_of([one, other], "tokens_per_s", factor="xy")["x", "y"].row()
        assert (row["verdict"], row["ratio"], row["pairs"]) == (verdict, ratio, pairs)
        assert dataclasses.replace(other).row()["speedup"] == speedup  # a copy, in which nothing is cached
        assert effects_of([one, other], factor="xy")["x", "y"].verdict == "not told apart"
    pair = [cell(level, [10] * 9, other="b") for level in "xy"]  # which one process timed
    found = effects_of([one, other, *pair], "tokens_per_s", factor="xy", other="ab")["x", "y"]
    assert (found.ratio.value, found.row()["pairs"]) == (1, 1)


@pytest.mark.parametrize(("policy", "marked"), [(None, 1), ("adaptive", 1), ("full", 0)])
def test_passes_without_a_draft_are_counted_where_a_policy_may_leave_drafts_out(policy, marked):
    one = cell("x", [4, 6])
    one.planned.cell.options.update({} if policy is None else {"policy": policy})
    one.answers[:] = [dataclasses.replace(a, drafted=d) for a, d in zip(one.answers, ([0, 3], [3, 0]), strict=True)]
    assert one.row()["plain_passes"] == marked  # the last pass of an answer may have room for one token


# --- simulated studies --------------------------------------------------------------------------------------


def simulated(rng: np.random.Generator, seeds: int, ways: int) -> list[CellAnswers]:
    """Two levels without any effect: drafters whose luck spreads by 4 %, ten prompts, ``ways`` of decoding.

    Each drafter has prompts that suit it, and ways of decoding that do.
    """
    hard, cells = rng.normal(0, 0.3, 10), []
    for level in "xy":
        for seed in range(seeds):
            own = rng.normal(0, 0.04) + rng.normal(0, 0.05, 10)
            for way in "abcdef"[:ways]:
                rates = np.exp(hard + own + rng.normal(0, 0.01) + rng.normal(0, 0.02, 10))
                cells.append(cell(level, [round(60 * rate) for rate in rates], seed, way, trained=f"{level}{seed}"))
    return cells


@pytest.mark.parametrize("studies", [40, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("seeds", "ways"), [(2, 1), (2, 6), (3, 1), (3, 6)])
def test_at_most_one_study_in_twenty_finds_an_effect_where_there_is_none(seeds, ways, studies):
    rng = np.random.default_rng(seeds)
    found = [effects_of(simulated(rng, seeds, ways), factor="xy", other="ab"[:ways]) for _ in range(studies)]
    for pair in [("x", "y"), ("a", "b")][: 1 + (ways > 1)]:
        false = sum(effects[pair].verdict != "not told apart" for effects in found)
        assert false <= studies * 0.05 + 3 * math.sqrt(studies * 0.05 * 0.95)


@pytest.mark.parametrize(
    ("low", "high", "answers", "verdict"),
    [
        (1.1, 1.3, 9, "higher"),
        (0.5, 0.9, 9, "lower"),
        (0.9, 1.1, 9, "not told apart"),
        (1.1, 1.3, 4, "too few prompts"),
    ],
)
def test_verdicts(low, high, answers, verdict):
    effect = Effect("f", "a", "b", "set", "acceptance_length", "", Interval(1.0, low, high), 2, 2, 0, 2, answers)
    assert effect.verdict == verdict
