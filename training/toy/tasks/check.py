"""Whether what a model wrote answers the request: its code or final number, compared with the reference."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from dflash.evaluation.checks import register_check

from .reference import reference, telling_inputs
from .sandbox import may_run, run_programs

INPUTS = 24

_FENCE = re.compile(r"```(?:python|py)[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_ANSWER = re.compile(r"^\s*Answer:\s*(-?\d+)\s*\.?\s*$", re.MULTILINE)


@register_check("function", "known", "problem")
def check_answers(answers: Sequence[tuple[str, dict[str, Any]]]) -> list[bool]:
    """Whether each answer is right, in order; each comes with the `Sample.check` of its request."""
    right = [False] * len(answers)
    programs: dict[int, tuple[str, list[list[Any]]]] = {}
    for place, (text, check) in enumerate(answers):
        if check["kind"] == "problem":
            right[place] = _ANSWER.findall(text)[-1:] == [str(check["answer"])]
        elif may_run(code := extract_code(text)):
            programs[place] = code, telling_inputs(check, INPUTS)
    for (place, (_, inputs)), outputs in zip(programs.items(), run_programs(list(programs.values())), strict=True):
        right[place] = outputs is not None and _are_expected(outputs, inputs, answers[place][1])
    return right


def extract_code(text: str) -> str:
    """The first Python fence, or the whole text when it starts with `def`, else ""."""
    fence = _FENCE.search(text)
    if fence:
        return fence.group(1)
    return text if text.lstrip().startswith("def ") else ""


def _are_expected(outputs: list[Any], inputs: list[list[Any]], check: dict[str, Any]) -> bool:
    expected = reference(check)
    pairs = zip(outputs, inputs, strict=True)
    return all(_same(_from_plain(output), expected(*arguments)) for output, arguments in pairs)


def _from_plain(value: Any) -> Any:
    """Undo the child's encoding of dictionaries, whose keys need not be text."""
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if isinstance(value, dict) and "dict" in value:
        return {_key(k): _from_plain(v) for k, v in value["dict"]}
    return value


def _key(value: Any) -> Any:
    """A decoded key; what cannot be one stands for itself as text."""
    key = _from_plain(value)
    return key if isinstance(key, str | int | float | None) else repr(key)


def _same(got: Any, expected: Any) -> bool:
    """Equal, with a float tolerance, and never a truth value for a number."""
    if isinstance(expected, bool) or isinstance(got, bool):
        return got is expected
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return got == expected or math.isclose(got, expected, rel_tol=1e-9)
    if isinstance(expected, list) and isinstance(got, list):
        return len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(expected, dict) and isinstance(got, dict):
        return got.keys() == expected.keys() and all(_same(got[key], expected[key]) for key in expected)
    return type(got) is type(expected) and bool(got == expected)
