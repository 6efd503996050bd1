"""Whether what a model wrote answers the request: its code or final number, compared with the reference."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dflash.evaluation.checks import register_check

from .reference import reference, telling_inputs
from .sandbox import refuse, run_programs

INPUTS = 24

_FENCE = re.compile(r"```(?:python|py)[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_ANSWER = re.compile(r"^\s*Answer:\s*(-?\d+)\s*\.?\s*$", re.MULTILINE)


@dataclass(frozen=True)
class CheckResult:
    """`reason` is one line: what was wrong, or "correct"."""

    ok: bool
    reason: str


def check_answer(answer_text: str, check: dict[str, Any]) -> CheckResult:
    """Judge one answer; `check` is the `Sample.check` of its request. Code runs in a child process."""
    return check_answers([(answer_text, check)])[0]


def check_answers(pairs: Iterable[tuple[str, dict[str, Any]]]) -> list[CheckResult]:
    """Judge many answers with one child process, in order."""
    verdicts: list[CheckResult | None] = []
    programs: list[tuple[str, list[list[Any]]]] = []
    waiting: list[tuple[int, dict[str, Any]]] = []
    for text, check in pairs:
        if check["kind"] == "problem":
            verdicts.append(_check_number(text, check["answer"]))
            continue
        code = extract_code(text)
        problem = refuse(code) if code else "there is no Python function"
        if problem:
            verdicts.append(CheckResult(False, problem))
            continue
        waiting.append((len(verdicts), check))
        programs.append((code, telling_inputs(check, INPUTS)))
        verdicts.append(None)
    for (index, check), (_, inputs), (outputs, problem) in zip(waiting, programs, run_programs(programs), strict=True):
        verdicts[index] = CheckResult(False, problem) if problem else _compare(outputs, inputs, check)
    return [verdict for verdict in verdicts if verdict is not None]


@register_check("function", "known", "problem")
def passed(pairs: Iterable[tuple[str, dict[str, Any]]]) -> list[bool]:
    """Whether each answer is right, as ``dflash bench`` asks."""
    return [verdict.ok for verdict in check_answers(pairs)]


def extract_code(text: str) -> str:
    """The first Python fence, or the whole text when it starts with `def`, else ""."""
    fence = _FENCE.search(text)
    if fence:
        return fence.group(1)
    return text if text.lstrip().startswith("def ") else ""


def _check_number(text: str, expected: int) -> CheckResult:
    found = _ANSWER.findall(text)
    if not found:
        return CheckResult(False, "there is no line 'Answer: number'")
    if found[-1] != str(expected):
        return CheckResult(False, f"the answer is {expected}, not {found[-1][:20]}")
    return CheckResult(True, "correct")


def _compare(outputs: list[Any], inputs: list[list[Any]], check: dict[str, Any]) -> CheckResult:
    expected_for = reference(check)
    for output, arguments in zip(outputs, inputs, strict=True):
        expected = expected_for(*arguments)
        got = _from_plain(output)
        if not _same(got, expected):
            shown = ", ".join(json.dumps(argument) for argument in arguments)
            return CheckResult(False, f"for {shown} it returns {got!r} instead of {expected!r}"[:300])
    return CheckResult(True, "correct")


def _from_plain(value: Any) -> Any:
    """Undo the child's encoding of floats and dictionaries."""
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if isinstance(value, dict):
        if "float" in value:
            return float(value["float"])
        if "dict" in value:
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
