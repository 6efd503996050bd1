"""What a request's answer must compute, from the plain data of its check.

Knows: the reference callables of every operation. Must not know: texts, the answer under test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .functions import STEP_BY_NAME
from .known import KNOWN_BY_NAME, random_arguments
from .results import RESULT_BY_NAME
from .sources import SOURCE_BY_NAME, random_input

_DRAWN_PER_INPUT = 8


def reference(check: dict[str, Any]) -> Callable[..., Any]:
    """The function that the request describes."""
    if check["kind"] == "known":
        return KNOWN_BY_NAME[check["name"]].apply
    source = SOURCE_BY_NAME[check["source"]]
    steps = [(STEP_BY_NAME[name].apply, arguments) for name, *arguments in check["steps"]]
    result, *result_arguments = check["result"]

    def apply(value: Any) -> Any:
        if source.name == "range":
            value = list(range(1, value + 1))
        elif source.name == "text":
            value = value.split()
        elif source.name == "characters":
            value = list(value)
        for step, arguments in steps:
            value = step(value, *arguments)
        return RESULT_BY_NAME[result].apply(value, *result_arguments)

    return apply


def telling_inputs(check: dict[str, Any], number: int) -> list[list[Any]]:
    """Argument lists to try, always the same for the same check; the first one is empty or smallest.

    Many filters leave nothing of a random input, and then any code looks right. So more inputs are drawn than
    asked for, and those come first for which the reference gives a new answer.
    """
    expected = reference(check)
    told: dict[str, list[Any]] = {}
    rest = []
    for arguments in _random_inputs(check, _DRAWN_PER_INPUT * number):
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
    empty: dict[str, Any] = {"range": 0, "text": "", "characters": ""}
    first: Any = empty.get(source.name, {} if source.gives == "pairs" else [])
    return [[first]] + [[random_input(source, rng)] for _ in range(number - 1)]
