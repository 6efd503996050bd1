"""How sure a mean over prompts is: the bootstrap, over prompts and in pairs.

Knows counts by prompt. Must not know what was counted. (Efron 1979; the interval is that of percentiles.)

Shapes: P prompts, R resamples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Floats = np.ndarray
RESAMPLES, LEVEL = 2000, 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with the limits of its 95 % interval; ``None`` where one prompt says nothing of others."""

    value: float
    low: float | None = None
    high: float | None = None

    def mapped(self, function: Callable[[float], float]) -> "Interval":
        """The same through a rising function, such as ``math.exp``."""
        limits = (None if limit is None else function(limit) for limit in (self.low, self.high))
        return Interval(function(self.value), *limits)


def bootstrap(statistic: Callable[[Floats], Floats], prompts: int, seed: int = 0) -> Interval:
    """The interval of a statistic over ``prompts`` prompts.

    ``statistic`` gets weights ``[R, P]``, how often each prompt was drawn, and returns its value ``[R]``. What is
    compared in pairs takes both sides from one call: they then have the same prompts in every resample.
    """
    value = float(statistic(np.ones((1, prompts)))[0])
    if prompts < 2:
        return Interval(value)
    draws = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES)
    values = statistic(draws.astype(np.float64))
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(values[np.isfinite(values)], [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def ratio_of_sums(numerator_P: Sequence[float], denominator_P: Sequence[float]) -> Callable[[Floats], Floats]:
    """The statistic ``sum(numerator) / sum(denominator)``, such as tokens over blocks; not a number of no blocks."""
    above, below = (np.asarray(values, dtype=np.float64) for values in (numerator_P, denominator_P))

    def statistic(weights_RP: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return (weights_RP @ above) / (weights_RP @ below)

    return statistic


def median_of(values_P: Sequence[float] | Floats) -> Callable[[Floats], Floats]:
    """The statistic "median over prompts", which one stalled prompt does not move; values that are none count not."""
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
    """Student's t at 97.5 %, by Cornish and Fisher's expansion; from 3 degrees of freedom on good to 1 %."""
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    exact = {1: 12.706, 2: 4.303}  # where the expansion is poor
    return exact.get(freedom) or z + sum(term / freedom**i for i, term in enumerate(terms, 1))


def widened(interval: Interval, half_width: float) -> Interval:
    """``interval`` with a second, independent uncertainty of the half width given."""
    if interval.low is None or interval.high is None:
        return interval
    low, high = interval.value - interval.low, interval.high - interval.value
    return Interval(
        interval.value, interval.value - math.hypot(low, half_width), interval.value + math.hypot(high, half_width)
    )
