"""The effect of each factor of a study: cells in pairs that are alike in everything else, seed and prompts included.

An effect is the geometric mean over pairs of the ratio of two cells. Acceptance lengths are those of all prompts
together; speeds are compared prompt by prompt, and the median over prompts is taken, which one stall does not move.
Prompts that different processes timed for the two cells are left out of it: the machine may have been busier for one.

Its interval covers other prompts and, where drafters were trained with several seeds, other seeds. The unit of the
noise between seeds is the trained drafter: cells that differ only in decoding share one, say nothing more about other
seeds, and are averaged first. A factor of training is widened by the spread of drafters that differ in the seed alone.
The pairs of a factor of decoding share their drafter, whose luck cancels: it is widened by the spread of its own effect
between such drafters.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..evaluation.statistics import FEWEST_PROMPTS, Interval, geometric_mean, student
from .plan import Plan, PlannedCell
from .results import CellAnswers, columns
from .settings import short_name

METRICS = {"acceptance_length": "acceptance", "tokens_per_s": "speed"}
"""The attribute of :class:`~dflash.study.results.CellAnswers` for each metric."""

Pair = tuple[CellAnswers, CellAnswers]
Quantity = Any  # a Ratio or a Median


@dataclass(frozen=True)
class Effect:
    """What going from one level of a factor to another does to a metric, as a ratio.

    Args:
        within: The level of another factor that all pairs have; empty for all pairs.
        ratio: After over before.
        pairs: Pairs of drafters, each over ``cells`` / ``pairs`` ways of decoding.
        agreeing: Pairs that changed in the direction of the ratio; ``tied`` ones did not change at all.
        answers: Prompts of each cell.
        depends_on: Factors within whose levels the ratio is another.
        one_seed: Drafters were trained, and nothing is known of other seeds.
        plain_passes: Passes in which a policy fell back to plain decoding.
    """

    factor: str
    before: str
    after: str
    prompts: str
    metric: str
    within: str
    ratio: Interval
    pairs: int
    agreeing: int
    tied: int
    cells: int
    answers: int
    depends_on: tuple[str, ...] = ()
    one_seed: bool = False
    plain_passes: int = 0

    @property
    def verdict(self) -> str:
        """``higher``, ``lower`` or ``not told apart`` if the interval includes 1, and what limits that.

        ``timed by different processes``: so was every prompt, and there is no ratio, and no pair.
        ``too few prompts``: less than :data:`~dflash.evaluation.statistics.FEWEST_PROMPTS`, or too few for limits.
        """
        if math.isnan(self.ratio.value):
            return "timed by different processes"
        low, high = self.ratio.low, self.ratio.high
        if low is None or high is None or self.answers < FEWEST_PROMPTS:
            return "too few prompts"
        found = "higher" if low > 1 else "lower" if high < 1 else "not told apart"
        limits = [f"depends on {short_name(factor)}" for factor in self.depends_on]
        return ", ".join([found, *limits, *["one seed"] * (self.one_seed and found != "not told apart")])

    def row(self) -> dict[str, Any]:
        """Plain data for a table."""
        values = dataclasses.asdict(self) | {"depends_on": ", ".join(self.depends_on), "verdict": self.verdict}
        del values["ratio"]
        return values | columns("ratio", self.ratio)


def effects(plan: Plan, cells: Sequence[CellAnswers]) -> list[Effect]:
    """Each level of every factor against its first, for each set of prompts and metric, between complete cells.

    An effect that depends on another factor by more than its own interval is followed by those within its levels.
    """
    found = []
    for factor, (first, *others) in plan.study.factors.items():
        for name in plan.study.prompt_sets:
            mine = [cell for cell in cells if cell.complete and cell.prompts == name]
            for label in others:
                pairs = list(_pairs(mine, factor, first, label))
                for metric, attribute in METRICS.items():
                    usable = [pair for pair in pairs if all(math.isfinite(cell.value(attribute)) for cell in pair)]
                    if attribute == "speed":  # pairs that two processes timed count only where there are no others
                        usable = [p for p in usable if math.isfinite(p[1].speed_over(p[0].answers).value)] or usable
                    if usable:
                        effect = _effect((factor, first, label, name, metric, ""), usable, mine)
                        found += _with_dependence(effect, usable, mine)
    return found


def matched(cells: Sequence[CellAnswers], factor: str) -> list[list[CellAnswers]]:
    """Groups of cells that differ in ``factor`` alone, two levels of it at least."""
    groups: dict[Any, list[CellAnswers]] = {}
    for cell in cells:
        levels = cell.planned.cell.levels
        same = tuple((name, label) for name, label in levels.items() if name != factor)
        groups.setdefault((cell.prompts, cell.planned.cell.seed, same), []).append(cell)
    return [group for group in groups.values() if len(group) > 1]


def _pairs(cells: Sequence[CellAnswers], factor: str, before: str, after: str) -> Iterator[Pair]:
    for group in matched(cells, factor):
        by_level = {cell.planned.cell.levels[factor]: cell for cell in group}
        if before in by_level and after in by_level:
            yield by_level[before], by_level[after]


def _effect(name: tuple[str, str, str, str, str, str], pairs: Sequence[Pair], cells: Sequence[CellAnswers]) -> Effect:
    """The effect called ``name`` of these pairs; ``cells`` are all that say how much drafters differ."""
    attribute = METRICS[name[4]]
    units = list(_grouped((tuple(_drafter(cell.planned) for cell in pair), pair) for pair in pairs).values())
    changes = [_change(own, attribute) for own in units]
    ratio = geometric_mean(changes).interval()
    trained = [{cell.planned.training for cell in side} - {None} for side in zip(*pairs, strict=True)]
    if trained[0] == trained[1]:  # each pair shares its drafter
        alike = (frozenset(_levels(before) for before, _ in own) for own in units)
        spread, freedom = _spread(zip(alike, changes, strict=True))
        error = spread / math.sqrt(len(changes))
    else:
        spread, freedom = _spread(_of_drafters(cells, attribute))
        error = spread * math.sqrt(sum(1 / len(keys) for keys in trained if keys))
    if any(trained) and freedom:
        ratio = ratio.mapped(math.log).widened(student(freedom) * error).mapped(math.exp)
    ratio = ratio.mapped(lambda number: round(number, 9))  # equal cells differ by nothing but rounding
    each = [round(math.log(change.value), 9) for change in changes if math.isfinite(change.value)]
    agreeing, tied = sum(value * math.log(ratio.value) > 0 for value in each), each.count(0.0)
    plain = sum(cell.plain_passes for pair in pairs for cell in pair)
    counts = (len(each), agreeing, tied, len(pairs), len(pairs[0][0].answers))
    return Effect(*name, ratio, *counts, one_seed=any(trained) and not freedom, plain_passes=plain)


def _with_dependence(effect: Effect, pairs: Sequence[Pair], cells: Sequence[CellAnswers]) -> list[Effect]:
    """The effect, and those within the levels of each factor that it depends on.

    It does where a level's ratio is outside the interval over all levels, and that ratio outside the level's. Within a
    level, noise between seeds is that of the cells there: a drafter can have luck with one way of decoding.
    """
    name = (effect.factor, effect.before, effect.after, effect.prompts, effect.metric)
    depends_on, inside = [], []
    for factor in pairs[0][0].planned.cell.levels:
        levels = _grouped((before.planned.cell.levels[factor], (before, after)) for before, after in pairs)
        if factor == effect.factor or len(levels) < 2:
            continue
        alike = _grouped((cell.planned.cell.levels[factor], cell) for cell in cells)
        own = [_effect((*name, f"{short_name(factor)} {label}"), some, alike[label]) for label, some in levels.items()]
        if any(
            not one.ratio.contains(effect.ratio.value) and not effect.ratio.contains(one.ratio.value) for one in own
        ):
            depends_on.append(factor)
            inside += own
    return [dataclasses.replace(effect, depends_on=tuple(depends_on)), *inside]


def _change(pairs: Sequence[Pair], attribute: str) -> Quantity:
    if attribute == "speed":
        return geometric_mean([after.speed_over(before.answers) for before, after in pairs])
    return geometric_mean([after.acceptance / before.acceptance for before, after in pairs])


# --- noise between seeds --------------------------------------------------------------------------------------


def _of_drafters(cells: Sequence[CellAnswers], attribute: str) -> Iterator[tuple[Any, Quantity]]:
    """The metric of each trained drafter over its ways of decoding, after what those alike but for the seed share."""
    usable = [c for c in cells if c.planned.training is not None and math.isfinite(c.value(attribute))]
    for own in _grouped((cell.planned.training, cell) for cell in usable).values():
        by_levels = {_levels(cell): getattr(cell, attribute) for cell in own}
        yield frozenset(by_levels), geometric_mean(list(by_levels.values()))


def _spread(drafters: Iterable[tuple[Any, Quantity]]) -> tuple[float, int]:
    """Standard deviation of the quantities' logarithm between drafters that are alike, and its degrees of freedom."""
    groups = _grouped((alike, math.log(quantity.value)) for alike, quantity in drafters)
    freedom = sum(len(values) - 1 for values in groups.values())
    squares = sum(float(np.var(values) * len(values)) for values in groups.values())
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def _drafter(planned: PlannedCell) -> str:
    return planned.training or str(planned.cell.drafter.get("drafter"))


def _levels(cell: CellAnswers) -> tuple[tuple[str, str], ...]:
    return tuple(cell.planned.cell.levels.items())


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
