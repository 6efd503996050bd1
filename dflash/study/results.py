"""The results of a study: a row for each cell and set of prompts, and the effect of each factor.

An effect compares cells that are alike in everything else, seed and prompts included. It is a ratio of acceptance
lengths, or the median over prompts of the ratio of speeds, which one stall does not move. Its interval covers other
prompts (bootstrap) and, where there are several seeds, other seeds: the spread of the cells that differ in the seed
alone.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..evaluation.statistics import Floats, Interval, bootstrap, median_of, ratio_of_sums, t_quantile, widened
from .cache import Answer
from .plan import Plan, PlannedCell

FEWEST_PROMPTS = 5
"""With fewer, the bootstrap's intervals are far too narrow."""

Statistic = Callable[[Floats], Floats]


@dataclass(frozen=True)
class CellAnswers:
    """A cell's answers to one set of prompts, and plain decoding's answers to the same prompts if there are any."""

    planned: PlannedCell
    prompts: str
    answers: list[Answer]
    plain: list[Answer]
    expected: int
    training: dict[str, Any]

    def value(self, metric: str) -> float:
        """``acceptance``, ``speed`` or ``speedup`` on these prompts; it need not be a number."""
        statistic: Statistic = getattr(self, metric)
        return float(statistic(np.ones((1, len(self.answers))))[0])

    @cached_property
    def acceptance(self) -> Statistic:
        """Tokens committed per target pass."""
        return ratio_of_sums([sum(a.committed) for a in self.answers], [len(a.committed) for a in self.answers])

    @cached_property
    def speed(self) -> Statistic:
        """Tokens after the first per second since the first; the median over prompts."""
        return median_of(_speeds(self.answers))

    @cached_property
    def speedup(self) -> Statistic:
        """Speed over that of plain mlx_lm, prompt by prompt; the median."""
        return median_of(_speeds(self.answers) / _speeds(self.plain))

    @property
    def complete(self) -> bool:
        """Whether every prompt is answered."""
        return len(self.answers) == self.expected

    @property
    def identical(self) -> bool | None:
        """Whether all texts equal those of plain decoding; ``None`` where they need not."""
        if not self.plain or not self.planned.cell.greedy:
            return None
        return all(a.tokens == p.tokens for a, p in zip(self.answers, self.plain, strict=True))

    def row(self) -> dict[str, Any]:
        """Plain data for a table."""
        count, cell = len(self.answers), self.planned.cell
        passes = sum(len(a.committed) for a in self.answers)
        row: dict[str, Any] = {"cell": self.planned.name, **cell.levels, "seed": cell.seed, "prompts": self.prompts}
        row |= {"answers": count, "complete": self.complete, "tokens": sum(len(a.tokens) for a in self.answers)}
        row |= _columns("acceptance_length", bootstrap(self.acceptance, count) if passes else None)
        row["drafted_per_pass"] = _rounded(sum(sum(a.drafted) for a in self.answers) / passes) if passes else None
        row |= _columns("tokens_per_s", bootstrap(self.speed, count))
        if self.plain:
            row |= _columns("speedup", bootstrap(self.speedup, count)) | {"identical": self.identical}
        return row | {name: self.training[name] for name in ("parameters", "heldout_loss") if name in self.training}


@dataclass(frozen=True)
class Effect:
    """What going from one level of a factor to another does to a metric, as a ratio.

    ``pairs`` of cells were compared on ``answers`` prompts: ``agreeing`` of them changed in the direction of the ratio,
    ``tied`` of them not at all.
    """

    factor: str
    before: str
    after: str
    prompts: str
    metric: str
    ratio: Interval
    pairs: int
    agreeing: int
    tied: int
    answers: int

    @property
    def verdict(self) -> str:
        """``higher``, ``lower``, ``not told apart`` if the interval includes 1, or ``too few prompts``."""
        low, high = self.ratio.low, self.ratio.high
        if low is None or high is None or self.answers < FEWEST_PROMPTS:
            return "too few prompts"
        return "higher" if low > 1 else "lower" if high < 1 else "not told apart"

    def row(self) -> dict[str, Any]:
        """Plain data for a table."""
        values = dataclasses.asdict(self) | {"verdict": self.verdict}
        del values["ratio"]
        return values | _columns("ratio", self.ratio)


def collect(plan: Plan) -> list[CellAnswers]:
    """The answers of each cell to each set of prompts so far."""
    found, kept = [], {key: plan.answers(key) for key in plan.sides}
    for planned in plan.cells:
        training = {} if planned.training is None else plan.finished(planned.training) or {}
        own, plain = kept[planned.answers], kept.get(planned.plain)
        for name in plan.study.prompt_sets:
            wanted = [p.key for p in plan.prompts if p.set == name]
            there = [key for key in wanted if key in own and (plain is None or key in plain)]
            if there:
                reference = [] if plain is None else [plain[key] for key in there]
                answers = [own[key] for key in there]
                found.append(CellAnswers(planned, name, answers, reference, len(wanted), training))
    return found


def sessions_of(cells: Sequence[CellAnswers]) -> set[str]:
    """The processes that measured these answers."""
    return {answer.at for cell in cells for answer in [*cell.answers, *cell.plain]}


def effects(plan: Plan, cells: Sequence[CellAnswers]) -> list[Effect]:
    """Each level of every factor against its first, for each set of prompts and metric, between complete cells."""
    complete = [cell for cell in cells if cell.complete]
    found = []
    for factor, levels in plan.study.factors.items():
        first, *others = levels
        for name in plan.study.prompt_sets:
            mine = [cell for cell in complete if cell.prompts == name]
            for label in others:
                pairs = list(_pairs(mine, factor, first, label))
                for metric, (attribute, _) in _METRICS.items():
                    usable = [pair for pair in pairs if all(math.isfinite(cell.value(attribute)) for cell in pair)]
                    if usable:
                        found.append(_effect((factor, first, label, name, metric), usable, mine))
    return found


def matched(cells: Sequence[CellAnswers], factor: str) -> list[list[CellAnswers]]:
    """Groups of cells that differ in ``factor`` alone, two levels of it at least."""
    groups: dict[Any, list[CellAnswers]] = {}
    for cell in cells:
        levels = cell.planned.cell.levels
        same = tuple((name, label) for name, label in levels.items() if name != factor)
        groups.setdefault((cell.prompts, cell.planned.cell.seed, same), []).append(cell)
    return [group for group in groups.values() if len(group) > 1]


def _pairs(
    cells: Sequence[CellAnswers], factor: str, before: str, after: str
) -> Iterator[tuple[CellAnswers, CellAnswers]]:
    for group in matched(cells, factor):
        by_level = {cell.planned.cell.levels[factor]: cell for cell in group}
        if before in by_level and after in by_level:
            yield by_level[before], by_level[after]


def _effect(
    name: tuple[str, str, str, str, str],
    pairs: Sequence[tuple[CellAnswers, CellAnswers]],
    cells: Sequence[CellAnswers],
) -> Effect:
    attribute, change_of = _METRICS[name[-1]]
    changes = [change_of(before, after) for before, after in pairs]
    count = len(pairs[0][0].answers)
    interval = bootstrap(lambda weights_RP: np.mean([change(weights_RP) for change in changes], axis=0), count)
    spread, freedom = _between_seeds(cells, attribute)
    if freedom:
        interval = widened(interval, t_quantile(freedom) * spread * math.sqrt(2 / len(pairs)))
    each = [float(change(np.ones((1, count)))[0]) for change in changes]
    agreeing, tied = sum(value * interval.value > 0 for value in each), each.count(0.0)
    return Effect(*name, interval.mapped(math.exp), len(pairs), agreeing, tied, count)


def _between_seeds(cells: Sequence[CellAnswers], attribute: str) -> tuple[float, int]:
    """Standard deviation of the metric's logarithm between cells that differ in the seed alone, and its freedom."""
    groups: dict[Any, dict[str, float]] = {}
    for cell in cells:
        if math.isfinite(value := cell.value(attribute)):
            groups.setdefault(tuple(cell.planned.cell.levels.items()), {})[cell.planned.answers] = math.log(value)
    freedom = sum(len(values) - 1 for values in groups.values())
    squares = sum(float(np.var(list(values.values())) * len(values)) for values in groups.values())
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def _speeds(answers: Sequence[Answer]) -> Floats:
    return np.array([answer.speed for answer in answers])


def _acceptance_change(before: CellAnswers, after: CellAnswers) -> Statistic:
    return lambda weights_RP: np.log(after.acceptance(weights_RP) / before.acceptance(weights_RP))


def _speed_change(before: CellAnswers, after: CellAnswers) -> Statistic:
    return median_of(np.log(_speeds(after.answers) / _speeds(before.answers)))


_METRICS: dict[str, tuple[str, Callable[[CellAnswers, CellAnswers], Statistic]]] = {
    "acceptance_length": ("acceptance", _acceptance_change),
    "tokens_per_s": ("speed", _speed_change),
}
"""The attribute of :class:`CellAnswers` for each metric, and the logarithm of its change between two cells."""


def _columns(name: str, interval: Interval | None) -> dict[str, float | None]:
    values = (None, None, None) if interval is None else (interval.value, interval.low, interval.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), map(_rounded, values), strict=True))


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
