"""Summary statistics: spreads and bootstrap intervals of plain numbers, and the figures of benchmark runs.

Intervals are those of the percentile bootstrap over prompts (Efron 1979); what is compared in pairs is resampled in
pairs. Shapes: P prompts, R resamples.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .runs import PromptResult, Run

Floats = np.ndarray
RESAMPLES, LEVEL = 2000, 0.95

Score = Callable[[list[tuple[str, dict[str, Any]]]], list[bool]]
"""Judges answers, given as text and ``check`` of the request, all in one call."""


# --- numbers -----------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, least and greatest of ``values``; ``None`` if there are none."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


@dataclass(frozen=True)
class Interval:
    """An estimate with the limits of its 95 % interval; ``None`` if a single prompt says nothing about others."""

    value: float
    low: float | None = None
    high: float | None = None

    def mapped(self, function: Callable[[float], float]) -> "Interval":
        """The interval of ``function(value)``, for an increasing function such as ``math.exp``."""
        limits = (None if limit is None else function(limit) for limit in (self.low, self.high))
        return Interval(function(self.value), *limits)


def bootstrap(statistic: Callable[[Floats], Floats], prompts: int, seed: int = 0) -> Interval:
    """The interval of a statistic over ``prompts`` prompts.

    ``statistic`` gets weights ``[R, P]``, how often each prompt was sampled, and returns its values ``[R]``. Paired
    comparisons take both sides from one call, and so have the same prompts in every resample.
    """
    value = float(statistic(np.ones((1, prompts)))[0])
    if prompts < 2:
        return Interval(value)
    weights = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES)
    values = statistic(weights.astype(np.float64))
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(values[np.isfinite(values)], [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def ratio_of_sums(numerator_P: Sequence[float], denominator_P: Sequence[float]) -> Callable[[Floats], Floats]:
    """The statistic ``sum(numerator) / sum(denominator)``, such as tokens over blocks; NaN without blocks."""
    above, below = (np.asarray(values, dtype=np.float64) for values in (numerator_P, denominator_P))

    def statistic(weights_RP: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return (weights_RP @ above) / (weights_RP @ below)

    return statistic


def median_of(values_P: Sequence[float] | Floats) -> Callable[[Floats], Floats]:
    """The statistic "median over prompts", which one stalled prompt does not move; values that are NaN are ignored."""
    values = np.asarray(values_P, dtype=np.float64)
    kept = np.flatnonzero(np.isfinite(values))
    order = kept[np.argsort(values[kept])]

    def statistic(weights_RP: Floats) -> Floats:
        if not len(order):
            return np.full(len(weights_RP), np.nan)
        below_RP = np.cumsum(weights_RP[:, order], axis=1)
        half_R = below_RP[:, -1:] / 2
        low, high = (side(below_RP, half_R).argmax(axis=1) for side in (np.greater_equal, np.greater))
        middle = (values[order][low] + values[order][high]) / 2
        return np.where(below_RP[:, -1] > 0, middle, np.nan)

    return statistic


def t_quantile(freedom: int) -> float:
    """Student's t at 97.5 %, by Cornish and Fisher's expansion; within 1 % from 3 degrees of freedom on."""
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    exact = {1: 12.706, 2: 4.303}  # where the expansion is poor
    return exact.get(freedom) or z + sum(term / freedom**i for i, term in enumerate(terms, 1))


def widened(interval: Interval, half_width: float) -> Interval:
    """``interval`` with a second, independent uncertainty of this half width."""
    if interval.low is None or interval.high is None:
        return interval
    low, high = interval.value - interval.low, interval.high - interval.value
    return Interval(
        interval.value, interval.value - math.hypot(low, half_width), interval.value + math.hypot(high, half_width)
    )


# --- runs --------------------------------------------------------------------------------------------------


def acceptance_length(runs: Iterable[Run]) -> float | None:
    """Tokens committed per block over all ``runs``; ``None`` if no block was decoded."""
    committed = [n for run in runs for n in run.committed]
    return sum(committed) / len(committed) if committed else None


def overall_tps(runs: Sequence[Run]) -> float | None:
    """Tokens after the first of each run over all the time since those."""
    timed = [run for run in runs if run.tps is not None]
    return sum(len(r.tokens) - 1 for r in timed) / sum(r.seconds for r in timed) if timed else None


def summarize(results: Sequence[PromptResult]) -> dict[str, Any]:
    """Speeds, ratios over prompts and runs, acceptance length and the number of identical answers."""
    plain = [run for r in results for run in r.plain]
    dflash = [run for r in results for run in r.dflash]
    plain_tps, dflash_tps = overall_tps(plain), overall_tps(dflash)
    return {
        "prompts": len(results),
        "blocks": sum(len(run.committed) for run in dflash),
        "plain_tps": plain_tps,
        "dflash_tps": dflash_tps,
        "overall_ratio": dflash_tps / plain_tps if plain_tps and dflash_tps else None,
        "ratio": spread([ratio for r in results for ratio in r.ratios]),
        "request_ratio": spread([ratio for r in results for ratio in r.request_ratios]),
        "acceptance_length": acceptance_length(dflash),
        "identical": sum(r.difference is None for r in results),
    }


def judge(results: Sequence[PromptResult], score: Score) -> list[tuple[bool, bool] | None]:
    """Whether each prompt's first answer is correct, plain and DFlash; ``None`` for prompts without a check."""
    pairs = [(run.text, r.prompt.check) for r in results if r.prompt.check for run in (r.plain[0], r.dflash[0])]
    verdicts = iter(score(pairs)) if pairs else iter(())
    return [(next(verdicts), next(verdicts)) if r.prompt.check else None for r in results]
