"""Intervals hold the truth as often as they say, on counts of the bundled pair's 100 held-out requests."""

import math
from pathlib import Path

import numpy as np
import pytest

from dflash.evaluation.statistics import Interval, Median, Ratio, geometric_mean, student

COUNTS = Path(__file__).with_name("heldout_counts.csv")  # of `dflash eval --json`, by_prompt
TOKENS, BLOCKS = np.loadtxt(COUNTS, delimiter=",", skiprows=1).T


def ratio_of(chosen: np.ndarray) -> Ratio:
    return Ratio.of(TOKENS[chosen], BLOCKS[chosen])


def median_of(chosen: np.ndarray) -> Median:
    return Median(TOKENS[chosen] / BLOCKS[chosen] + 1e-6 * chosen)  # no two alike: a median of ties is easy to enclose


def coverage(quantity, prompts: int, trials: int) -> float:
    truth, rng = quantity(np.arange(100)).value, np.random.default_rng(prompts)
    return np.mean([quantity(rng.integers(0, 100, prompts)).interval().contains(truth) for _ in range(trials)])


@pytest.mark.parametrize("trials", [400, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("quantity", "prompts"), [*((ratio_of, n) for n in (5, 10, 20, 60)), *((median_of, n) for n in (6, 10, 20, 60))]
)
def test_95_percent_are_94_to_96(quantity, prompts, trials):
    chance = 3 * math.sqrt(0.05 * 0.95 / trials)
    assert 0.94 - chance <= coverage(quantity, prompts, trials) <= 0.96 + chance


def test_a_paired_ratio_knows_nothing_of_what_is_hard_about_a_prompt():
    hard, blocks = np.array([1.0, 2, 5, 9, 20, 1, 3, 8]), np.full(8, 4.0)
    one, other = Ratio.of(hard, blocks), Ratio.of(1.1 * hard, blocks)
    paired, alone = (other / one).interval(), one.interval()
    assert (paired.value, paired.low, paired.high) == pytest.approx((1.1, 1.1, 1.1))
    assert alone.high / alone.low > 2


def test_means_are_geometric_and_of_each_prompt_where_medians_are_taken():
    ratios = [Ratio.of([4, 5], [1, 2]), Ratio.of([20, 7], [3, 6])]
    assert [r.value for r in ratios] == [3.0, 3.0]
    assert geometric_mean([ratios[0], ratios[1] / ratios[0]]).value == pytest.approx(math.sqrt(3))
    medians = [Median(np.array(values)) for values in ([1.0, 8, 2], [4.0, 2, 32])]
    assert geometric_mean(medians).value == 4.0  # of 2, 4, 8; the means of the medians is the root of 8
    assert (medians[1] / medians[0]).value == 4.0


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        (Ratio.of([3], [2]), 1.5),
        (Ratio.of([0, 0], [2, 3]), 0.0),
        (Ratio.of([], []), math.nan),
        (Ratio.of([1, 2], [0, 0]), math.inf),
        (Median(np.array([1.0, 2, 3, 4, 5])), 3.0),
        (Median(np.array([math.nan] * 9 + [2.0])), 2.0),
        (Median(np.array([])), math.nan),
    ],
)
def test_what_says_nothing_of_other_prompts_has_no_limits(quantity, value):
    found = quantity.interval()
    assert (found.low, found.high) == (None, None)
    assert found.value == pytest.approx(value, nan_ok=True)
    assert found.contains(1e9)


def test_one_stall_moves_no_median_and_six_prompts_reach_from_least_to_greatest_nearly():
    values = np.array([4.0, 1, 2, 5, 3, 900])
    interval = Median(values).interval()
    assert interval.value == 3.5
    assert 1 < interval.low < 1.5 < 5 < interval.high < 900
    many = Median(np.append(np.arange(1.0, 60), 9e9)).interval()
    assert 22 < many.low < many.value < many.high < 39


def test_two_prompts_have_students_interval_at_least_and_resamples_of_one_of_them_move_nothing():
    interval = Ratio.of([10, 20], [5, 5]).interval()  # shares of tokens and blocks: 1/3 and 1/2, 2/3 and 1/2
    error = math.sqrt(2 * (1 / 36 + 1 / 36))
    limits = [3 * math.exp(side * student(1) * error) for side in (-1, 1)]
    assert (interval.low, interval.high) == pytest.approx(tuple(limits))
    bounded = interval.bounded(1, 5)
    assert (bounded.value, bounded.low, bounded.high) == (3, 1, 5)


def test_an_interval_shows_its_limits_if_it_has_some():
    assert f"{Interval(1.0, 0.7, 1.4):.2f}, {Interval(2.0):.1f}" == "1.00 (0.70-1.40), 2.0"


def test_widened_by_an_independent_uncertainty():
    assert student(2) == pytest.approx(4.3027, abs=1e-4)
    assert Interval(1.0, 0.7, 1.4).widened(0.3) == Interval(1.0, 1 - math.hypot(0.3, 0.3), 1 + math.hypot(0.4, 0.3))
    assert Interval(1.0).widened(0.3) == Interval(1.0)
