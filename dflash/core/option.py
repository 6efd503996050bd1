"""A dataclass field that says what an option is: its help, its limits, and its name on the command line."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from .errors import GenerationError
from .values import require_count, require_number, short


def option(
    default: Any,
    meaning: str,
    part: str = "",
    *,
    kind: Any = None,
    metavar: str | None = None,
    flag: str | None = None,
    also: tuple[str, ...] = (),
    called: str | None = None,
    at_least: float = -math.inf,
    at_most: float = math.inf,
) -> Any:
    """A dataclass field that says all that is known of an option.

    Args:
        default: Its value where it is not given, or given as ``None``.
        meaning: One line of help.
        part: The options that it belongs to, by which commands and studies choose.
        kind: What it is on the command line; by default the type of ``default``.
        metavar: What the help calls its value.
        flag: Its name on the command line; by default that of the field.
        also: Other names, in Python and on the command line, where people know it by them.
        called: What errors call it; by default the name of the field.
        at_least: The least number that it may be.
        at_most: The greatest number that it may be.
    """
    metadata = {
        "meaning": meaning,
        "part": part,
        "kind": type(default) if kind is None else kind,
        "metavar": metavar,
        "flag": flag,
        "also": also,
        "called": called,
        "limits": (at_least, at_most),
    }
    return dataclasses.field(default=default, metadata=metadata)


def all_names(record: type) -> dict[str, str]:
    """Every name of an option of ``record``, and its field."""
    return {name: f.name for f in dataclasses.fields(record) for name in (f.name, *f.metadata["also"])}


def named(record: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is ``given``, each option by the name of its field in ``record``; ``None`` is not given.

    Raises ``GenerationError`` for an option that is given by two of its names.
    """
    names, found = all_names(record), dict[str, Any]()
    for name, value in given.items():
        own = names.get(name, name)
        if value is not None and own in found:
            before = next(other for other in given if names.get(other, other) == own and given[other] is not None)
            raise GenerationError(f"{before} and {name} are the same option; give it once.")
        if value is not None:
            found[own] = value
    return found


def check_limits(options: Any) -> None:
    """Give each option of ``None`` its default, and raise ``GenerationError`` for a value out of its limits."""
    for field in dataclasses.fields(options):
        value, (least, most) = getattr(options, field.name), field.metadata["limits"]
        if value is None:
            object.__setattr__(options, field.name, field.default)
        elif field.metadata["kind"] is float:
            require_number(field.metadata["called"] or field.name, value, least, most)
        elif field.metadata["kind"] is int and least > -math.inf:
            require_count(field.name, value, int(least), None if most == math.inf else int(most))
        elif field.metadata["kind"] is bool and not isinstance(value, int):
            raise GenerationError(f"{field.name} must be True or False, got {short(value)}.")
