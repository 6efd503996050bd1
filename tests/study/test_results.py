"""What results say: intervals that hold the truth as often as they claim, effects in pairs, seeds counted once."""

import csv
import dataclasses
import io
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash.evaluation.statistics import Interval, bootstrap, median_of, ratio_of_sums, t_quantile, widened
from dflash.study.cache import Answer
from dflash.study.files import as_csv
from dflash.study.plan import PlannedCell
from dflash.study.results import CellAnswers, Effect, effects, matched
from dflash.study.settings import Cell


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says():
    rng, held = np.random.default_rng(1), 0
    for trial in range(200):
        blocks = rng.integers(5, 40, 24)
        tokens = rng.poisson(3.0 * blocks * rng.gamma(20, 1 / 20, 24))
        interval = bootstrap(ratio_of_sums(tokens, blocks), 24, seed=trial)
        assert interval.low <= interval.value <= interval.high
        held += interval.low <= 3.0 <= interval.high
    assert 0.88 <= held / 200 <= 0.99


def test_pairs_have_the_same_prompts_in_every_resample():
    hard, blocks = np.array([1.0, 2, 5, 9, 20, 1, 3, 8]), np.full(8, 4.0)
    one, other = ratio_of_sums(hard, blocks), ratio_of_sums(1.1 * hard, blocks)
    paired = bootstrap(lambda weights: other(weights) / one(weights), 8)
    assert (paired.low, paired.high) == pytest.approx((1.1, 1.1))
    alone = bootstrap(one, 8)
    assert alone.high / alone.low > 2
    assert bootstrap(ratio_of_sums([3], [2]), 1) == Interval(1.5)  # one prompt says nothing of others


def test_a_median_weighs_prompts_and_one_stall_moves_nothing():
    values = [4.0, 1.0, math.nan, 2.0, 900.0]
    weights = np.array([[1.0, 1, 1, 1, 1], [0, 3, 5, 1, 0], [0, 0, 2, 0, 0], [1, 1, 0, 0, 0]])
    assert median_of(values)(weights).tolist() == pytest.approx([3.0, 1.0, math.nan, 2.5], nan_ok=True)
    slow, stalled = [[Answer([1] * 5, s, [5], [3], [3], "") for s in times] for times in ([2.0] * 5, [1.0] * 4 + [300])]
    planned = PlannedCell(Cell({}, 0, {}, {}), None, "key", "plain")
    cells = CellAnswers(planned, "set", stalled, slow, 5, {})
    assert cells.row()["speedup"] == 2.0


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228)])
def test_students_quantile(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, rel=0.011)
    assert widened(Interval(1.0, 0.7, 1.4), 0.3) == Interval(1.0, 1 - math.hypot(0.3, 0.3), 1 + math.hypot(0.4, 0.3))


# --- cells ------------------------------------------------------------------------------------------------


def cell(level: str, lengths: list[int], seed: int = 0, other: str = "a", plain: bool = False) -> CellAnswers:
    """Answers of two passes each, that committed ``lengths`` tokens in all, in a tenth of a second a token."""
    planned = PlannedCell(Cell({"factor": level, "other": other}, seed, {}, {}), None, f"{level}{seed}{other}", "plain")
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


def effects_of(cells: list[CellAnswers], **factors: str) -> dict[tuple[str, str], Effect]:
    """Effects on acceptance by the labels before and after; ``factors`` have their levels as letters."""
    levels = {name: dict.fromkeys(labels) for name, labels in factors.items()}
    plan: Any = SimpleNamespace(study=SimpleNamespace(factors=levels, prompt_sets={"set": None}))
    found = [effect for effect in effects(plan, cells) if effect.metric == "acceptance_length"]
    return {(effect.before, effect.after): effect for effect in found}


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


def test_the_spread_between_seeds_widens_what_prompts_alone_would_say():
    cells = [cell(x, [n + 2 * seed * (x == "y")] * 5, seed) for x, n in (("x", 20), ("y", 22)) for seed in (0, 1)]
    effect = effects_of(cells, factor="xy")["x", "y"]
    assert effect.ratio.value == pytest.approx(math.sqrt(22 * 24) / 20)
    spread = math.log(24 / 22) / 2  # one pair of seeds apart, one equal: two degrees of freedom
    half = t_quantile(2) * spread  # two pairs: the square root of 2 / 2
    assert math.log(effect.ratio.high / effect.ratio.value) == pytest.approx(half)
    assert effect.verdict == "not told apart"


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
    effect = Effect("f", "a", "b", "set", "acceptance_length", Interval(1.0, low, high), 2, 2, 0, answers)
    assert effect.verdict == verdict
