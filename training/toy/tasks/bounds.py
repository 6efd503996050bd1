"""A lower bound of how many distinct requests exist.

A request fixes its meaning, so distinct meanings (operations with their arguments) have distinct requests.
Counts the three-step pipelines on a list of numbers only; wordings multiply it.

Knows sources, operations and results. Must not know how a request is worded.
"""

from __future__ import annotations

from functools import cache

from .functions import following, next_steps, sensible
from .operations import Operation
from .results import RESULTS
from .sources import SOURCE_BY_NAME, argument_choices


def distinct_meanings(source_name: str = "numbers", length: int = 3) -> int:
    """The number of pipelines of this length on this source, arguments included."""
    source = SOURCE_BY_NAME[source_name]

    @cache
    def choices(kind: str) -> int:
        return len(argument_choices(kind, source))

    def extend(steps: tuple[Operation, ...], kind: str, ways: int) -> int:
        if len({step.group for step in steps}) < len(steps):
            return 0
        if len(steps) == length:
            return ways * sum(choices(row.arguments) for row in RESULTS if kind in row.takes and sensible(steps, row))
        return sum(
            extend((*steps, step), following(kind, step), ways * choices(step.arguments))
            for step in next_steps(kind, source)
        )

    return extend((), source.gives, 1)
