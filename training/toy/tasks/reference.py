"""What an answer must compute: the canonical function of a check, and inputs that tell it from others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .functions import code, from_check
from .known import KNOWN_BY_NAME, random_arguments
from .sources import SOURCE_BY_NAME, random_input, smallest_input

TRIED_PER_INPUT = 8


def reference(check: dict[str, Any]) -> Callable[..., Any]:
    """The function that the request describes. Raises ``KeyError`` for a check of no known request."""
    source = KNOWN_BY_NAME[check["name"]].code if check["kind"] == "known" else code(from_check(check))
    names: dict[str, Any] = {}
    exec(source, names)  # our own code: a check only chooses among known operations and arguments
    return names[source[len("def ") : source.index("(")]]


def telling_inputs(check: dict[str, Any], number: int) -> list[list[Any]]:
    """Argument lists to try, always the same for the same check; the first one is empty or smallest.

    Many filters leave nothing of a random input, and then any code looks right. So more inputs are made than asked
    for, and those come first for which the reference gives a new answer.
    """
    expected = reference(check)
    told: dict[str, list[Any]] = {}
    rest = []
    for arguments in _random_inputs(check, TRIED_PER_INPUT * number):
        answer = repr(expected(*arguments))
        if answer in told:
            rest.append(arguments)
        told.setdefault(answer, arguments)
        if len(told) == number:
            break
    return [*told.values(), *rest][:number]


def _random_inputs(check: dict[str, Any], number: int) -> list[list[Any]]:
    rng = random.Random(repr(sorted(check.items())))
    if check["kind"] == "known":
        row = KNOWN_BY_NAME[check["name"]]
        smallest: list[Any] = ["" if kind == "text" else 0 for kind in row.inputs]
        return [smallest] + [random_arguments(row, rng) for _ in range(number - 1)]
    source = SOURCE_BY_NAME[check["source"]]
    return [[smallest_input(source)]] + [[random_input(source, rng)] for _ in range(number - 1)]
