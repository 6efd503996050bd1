"""The results of a study: a row for each cell and set of prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..evaluation.statistics import Interval, Median, Ratio
from .cache import Answer
from .plan import Plan, PlannedCell


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
        return float(getattr(self, metric).value)

    @cached_property
    def acceptance(self) -> Ratio:
        """Tokens committed per target pass."""
        return Ratio.of([sum(a.committed) for a in self.answers], [len(a.committed) for a in self.answers])

    @cached_property
    def speed(self) -> Median:
        """Tokens after the first per second since the first; the median over prompts."""
        return Median(np.array([answer.speed for answer in self.answers]))

    @cached_property
    def speedup(self) -> Median:
        """Speed over that of plain mlx_lm, as :meth:`speed_over` says."""
        return self.speed_over(self.plain)

    def speed_over(self, others: Sequence[Answer]) -> Median:
        """Speed over that of ``others``, prompt by prompt; the median over prompts that one process timed for both."""
        pairs = zip(self.answers, others, strict=True)
        return Median(np.array([a.speed / o.speed if a.at == o.at else math.nan for a, o in pairs]))

    @cached_property
    def plain_passes(self) -> int:
        """Passes in which the policy fell back to plain decoding: acceptance is then no property of the drafter.

        The last pass of an answer is left out: where a single token is missing, nothing is drafted for it.
        """
        if self.planned.cell.options.get("policy") == "full":
            return 0
        return sum(count == 0 for answer in self.answers for count in answer.drafted[:-1])

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
        cell = self.planned.cell
        passes = sum(len(a.committed) for a in self.answers)
        row: dict[str, Any] = {"cell": self.planned.name, **cell.levels, "seed": cell.seed, "prompts": self.prompts}
        row |= {
            "answers": len(self.answers),
            "complete": self.complete,
            "tokens": sum(len(a.tokens) for a in self.answers),
        }
        row |= columns("acceptance_length", self.acceptance.interval().bounded(1) if passes else None)
        row["drafted_per_pass"] = rounded(sum(sum(a.drafted) for a in self.answers) / passes) if passes else None
        row["plain_passes"] = self.plain_passes
        row |= columns("tokens_per_s", self.speed.interval())
        if self.plain:
            row |= columns("speedup", self.speedup.interval()) | {"identical": self.identical}
        return row | {name: self.training[name] for name in ("parameters", "heldout_loss") if name in self.training}


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
    """The processes that timed these answers."""
    return {a.at for cell in cells for a in [*cell.answers, *cell.plain] if a.seconds is not None}


def columns(name: str, interval: Interval | None) -> dict[str, float | None]:
    """A value and its limits for a table."""
    values = (None, None, None) if interval is None else (interval.value, interval.low, interval.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), map(rounded, values), strict=True))


def rounded(value: float | None) -> float | None:
    """Four digits; ``None`` for what is no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
