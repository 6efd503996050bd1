"""Summary statistics: spreads, quantities over prompts with their 95 % intervals, and the figures of benchmark runs.

Intervals say what other prompts of the same kind would give. Quantities that are compared on the same prompts are
divided first, so that what is hard about a prompt does not blur the difference. Shapes: P prompts, R resamples, K sums.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import mul
from typing import Any, TypeVar

import numpy as np

from .runs import PromptResult, Run

Floats = np.ndarray
RESAMPLES, LEVEL = 2000, 0.95
_UPPER = (1 + LEVEL) / 2

LEAST_ERROR = 0.2
"""Of a resample, as a share of the prompts' own: where nearly equal prompts were drawn, theirs says nothing."""

FEWEST_PROMPTS = 5
"""With fewer, a 95 % interval rests on the assumptions more than on the prompts."""

Score = Callable[[list[tuple[str, dict[str, Any]]]], list[bool]]
"""Judges answers, given as text and ``check`` of the request, all in one call."""


# --- numbers -----------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, least and greatest of ``values``; ``None`` if there are none."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


def student(freedom: int) -> float:
    """Student's t, which a 95 % interval takes in each direction."""
    from scipy import special  # not at start-up

    return float(special.stdtrit(freedom, _UPPER))


@dataclass(frozen=True)
class Interval:
    """An estimate with the limits of its 95 % interval; ``None`` if so few prompts say nothing about others."""

    value: float
    low: float | None = None
    high: float | None = None

    def __format__(self, spec: str) -> str:
        """The value and, in brackets, the limits if there are some; ``spec`` is that of each number."""
        limits = "" if self.low is None or self.high is None else f" ({self.low:{spec}}-{self.high:{spec}})"
        return f"{self.value:{spec}}{limits}"

    def mapped(self, function: Callable[[float], float]) -> "Interval":
        """The interval of ``function(value)``, for an increasing function such as ``math.exp``."""
        limits = (None if limit is None else function(limit) for limit in (self.low, self.high))
        return Interval(function(self.value), *limits)

    def widened(self, half_width: float) -> "Interval":
        """The interval with a second, independent uncertainty of this half width."""
        if self.low is None or self.high is None:
            return self
        low, high = (math.hypot(limit - self.value, half_width) for limit in (self.low, self.high))
        return Interval(self.value, self.value - low, self.value + high)

    def bounded(self, least: float, most: float = math.inf) -> "Interval":
        """The interval with its limits in the range that the value cannot leave."""
        limits = (None if limit is None else min(max(limit, least), most) for limit in (self.low, self.high))
        return Interval(self.value, *limits)

    def contains(self, value: float) -> bool:
        """Whether ``value`` is within the limits; always where there are none."""
        return self.low is None or self.high is None or self.low <= value <= self.high


# --- quantities over prompts -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ratio:
    """Sums over prompts, divided: tokens over blocks, or one such ratio over another.

    It is ``prod_k (sum_p terms_KP) ** powers_K`` with powers that add up to zero.

    The interval joins two, of the ratio's logarithm, by their outer limits: Student's and the bootstrap's of the
    studentised ratio (Efron and Tibshirani 1993, chapter 12). Either alone is too short on some kinds of prompts.
    """

    terms_KP: Floats
    powers_K: Floats

    @classmethod
    def of(cls, numerator_P: Iterable[float], denominator_P: Iterable[float]) -> "Ratio":
        """``sum(numerator) / sum(denominator)``; NaN if both are zero."""
        return cls(np.array([[*numerator_P], [*denominator_P]], dtype=np.float64), np.array([1.0, -1.0]))

    def __mul__(self, other: "Ratio") -> "Ratio":
        terms_KP = np.concatenate([self.terms_KP, other.terms_KP])
        return Ratio(terms_KP, np.concatenate([self.powers_K, other.powers_K]))

    def __pow__(self, power: float) -> "Ratio":
        return Ratio(self.terms_KP, self.powers_K * power)

    def __truediv__(self, other: "Ratio") -> "Ratio":
        return self * other**-1

    @property
    def value(self) -> float:
        """The ratio; it need not be finite."""
        sums_K, above_K = self.terms_KP.sum(axis=1), self.powers_K > 0
        above, below = (np.prod(sums_K[side] ** abs(self.powers_K[side])) for side in (above_K, ~above_K))
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(above / below)

    def interval(self) -> Interval:
        """The ratio with its 95 % interval."""
        value, prompts = self.value, self.terms_KP.shape[1]
        if prompts < 2 or not 0 < value < math.inf:
            return Interval(value)
        logs_R, errors_R = self._logs_and_errors(_resampled(prompts))
        log, error, known = logs_R[0], errors_R[0], np.isfinite(logs_R)
        if error < 1e-9:  # all prompts are alike, but for rounding
            return Interval(value, value, value)
        pivots = (logs_R - log)[known] / np.maximum(errors_R[known], LEAST_ERROR * error)
        low, high = np.quantile(pivots, [1 - _UPPER, _UPPER])
        widest = student(prompts - 1)
        below, above = error * max(widest, high), error * max(widest, -low)
        return Interval(value, value * math.exp(-below), value * math.exp(above))

    def _logs_and_errors(self, weights_RP: Floats) -> tuple[Floats, Floats]:
        """The ratio's logarithm in each resample, and its standard error by the linear terms of its sums."""
        prompts = weights_RP.shape[1]
        sums_RK = weights_RP @ self.terms_KP.T
        with np.errstate(divide="ignore", invalid="ignore"):
            changes_RP = (self.powers_K / sums_RK) @ self.terms_KP  # by which one more of a prompt moves the logarithm
            logs_R = np.log(sums_RK) @ self.powers_K
            squares_R = (weights_RP * changes_RP**2).sum(axis=1)
        return logs_R, np.sqrt(squares_R * prompts / (prompts - 1))


@lru_cache(4)
def _resampled(prompts: int) -> Floats:
    """How often each prompt was drawn, ``[R, P]``: once each in the first row, then in resamples."""
    drawn_RP = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES)
    return np.concatenate([np.ones((1, prompts)), drawn_RP])


@dataclass(frozen=True, eq=False)
class Median:
    """The median over prompts of each prompt's number, which one stalled prompt does not move; NaN are left out.

    Limits are numbers of the prompts, interpolated (Hettmansperger and Sheather 1986): nothing is assumed of their
    distribution. Below six prompts there are none, since even the least and the greatest enclose the median less often.
    """

    values_P: Floats

    def __mul__(self, other: "Median") -> "Median":
        return Median(self.values_P * other.values_P)

    def __pow__(self, power: float) -> "Median":
        return Median(self.values_P**power)

    def __truediv__(self, other: "Median") -> "Median":
        return self * other**-1

    @property
    def value(self) -> float:
        """The median; NaN without a number."""
        known = self.values_P[np.isfinite(self.values_P)]
        return float(np.median(known)) if len(known) else math.nan

    def interval(self) -> Interval:
        """The median with its 95 % interval."""
        from scipy import special  # not at start-up

        values = np.sort(self.values_P[np.isfinite(self.values_P)])
        count = len(values)
        holds = 1 - 2 * special.bdtr(np.arange(count), count, 0.5)  # how often those at depth 1, 2, .. enclose it
        depth = int(np.count_nonzero(holds >= LEVEL))
        if not depth:
            return Interval(self.value)
        share = (holds[depth - 1] - LEVEL) / (holds[depth - 1] - holds[depth])
        inwards = (count - depth) * share / (depth + (count - 2 * depth) * share)
        low, high = ((1 - inwards) * side[depth - 1] + inwards * side[depth] for side in (values, values[::-1]))
        return Interval(self.value, float(low), float(high))


Quantity = TypeVar("Quantity", Ratio, Median)


def geometric_mean(quantities: Sequence[Quantity]) -> Quantity:
    """The geometric mean of quantities over the same prompts; of medians it is taken prompt by prompt."""
    return reduce(mul, quantities) ** (1 / len(quantities))


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
