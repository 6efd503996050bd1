"""What can happen in a word problem: the arithmetic of events, and the stories of ``tables/stories.yaml``.

Totals and products stay between 0 and 100, operands mostly between 2 and 20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .tables import table

LIMIT = 100

Numbers = list[tuple[int, int]]


@dataclass(frozen=True)
class Change:
    """What an event does to the total ``t`` with the numbers ``a`` and ``b``.

    ``numbers(t)`` lists the pairs ``(a, b)`` that keep results whole and small. ``sums`` are the steps of the
    calculation, with ``=`` for the result of the step before.
    """

    numbers: Callable[[int], Numbers]
    sums: tuple[str, ...]


def _up_to(most: int) -> Numbers:
    return [(a, 0) for a in range(2, most + 1)]


def _groups(most: int) -> Numbers:
    return [(a, b) for a in range(2, 11) for b in range(2, 13) if a * b <= most]


def _if(possible: bool) -> Numbers:
    return [(0, 0)] if possible else []


CHANGES = {
    "gain": Change(lambda t: _up_to(min(20, LIMIT - t)), ("t + a",)),
    "lose": Change(lambda t: _up_to(min(20, t - 2)), ("t - a",)),
    "gain_packs": Change(lambda t: _groups(LIMIT - t), ("a * b", "t + =")),
    "lose_packs": Change(lambda t: _groups(t - 2), ("a * b", "t - =")),
    "double": Change(lambda t: _if(2 * t <= LIMIT), ("t * 2",)),
    "triple": Change(lambda t: _if(3 * t <= LIMIT), ("t * 3",)),
    "halve": Change(lambda t: _if(t % 2 == 0 and t >= 4), ("t / 2",)),
    "lose_half": Change(lambda t: _if(t % 2 == 0 and t >= 4), ("t / 2", "t - =")),
    "lose_third": Change(lambda t: _if(t % 3 == 0 and t >= 6), ("t / 3", "t - =")),
    "divide": Change(lambda t: [(a, b) for a, b in _up_to(10) if t % a == 0 and t // a >= 2], ("t / a",)),
    "multiply": Change(lambda t: [(a, b) for a, b in _up_to(10) if t * a <= LIMIT], ("t * a",)),
}


@dataclass(frozen=True)
class Event:
    """One kind of event.

    `told` are sentences of a request; the first says all that the others say, and the solution repeats it. `now`
    states the new total. An event that ends a story asks its own `questions` about its own `unit`.
    """

    name: str
    change: str
    told: list[str]
    now: str
    unit: str
    questions: list[str] = field(default_factory=list)

    def numbers(self, total: int) -> Numbers:
        """The pairs ``(a, b)`` that the event allows at this total."""
        return CHANGES[self.change].numbers(total)

    def calculation(self, total: int, a: int, b: int) -> tuple[str, int]:
        """ "3 * 6 = 18 and 14 + 18 = 32", with the result."""
        texts, result = [], 0
        for sum_ in CHANGES[self.change].sums:
            left, symbol, right = sum_.split()
            values = {"t": total, "a": a, "b": b, "=": result, "2": 2, "3": 3}
            x, y = values[left], values[right]
            result = {"+": x + y, "-": x - y, "*": x * y, "/": x // y if y else 0}[symbol]
            texts.append(f"{x} {symbol} {y} = {result}")
        return " and ".join(texts), result


@dataclass(frozen=True)
class Domain:
    """A kind of story: its total's `unit`, the range of its `first` total, what opens it and what may happen."""

    name: str
    weight: int
    unit: str
    first: tuple[int, int]
    start: str
    openings: list[str]
    questions: list[str]
    events: list[Event]
    endings: list[Event]


def _domain(row: dict) -> Domain:
    usual = {"now": row.pop("now"), "unit": row["unit"]}
    events = {key: [Event(**usual | event) for event in row[key]] for key in ("events", "endings")}
    return Domain(**row | events)


DOMAINS = [_domain(dict(row)) for row in table("stories")]
