"""Where a pipeline starts: the function's parameter, the arguments that suit it, and random inputs for tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from .tables import table

NAMES = "Ada Ben Clara David Emma Finn Grace Hugo Ivy Jack Kate Leo Mia Noah Olga Paul".split()
WORDS = (
    "apple Banana cat level noon river Stone tea yellow dog civic moon green sky an elephant sun garden Queen ox "
    "kite jam vivid umbrella zoo window rotor hat deed paper"
).split()
LETTERS = "abcdefghiklmnoprstw"
NOUNS = {
    "numbers": ("number", "numbers"),
    "words": ("word", "words"),
    "characters": ("character", "characters"),
    "pairs": ("entry", "entries"),
}
RANGES = {
    "threshold": (2, 20),
    "divisor": (3, 9),
    "digit": (0, 9),
    "factor": (4, 10),
    "amount": (1, 10),
    "few": (2, 5),
    "size": (2, 7),
}
"""Smallest and largest number, by the kind of an operation's argument."""


@dataclass(frozen=True)
class Source:
    """One kind of input. `opening` is the code that turns it into `gives`, "" where it already is that.

    `within` completes the compact form ("the sum of the even numbers in a list"). `label` (the first field),
    `number_fields` with their ranges and `text_fields` with their values belong to records.
    """

    name: str
    gives: str
    parameter: str
    described: list[str]
    within: list[str] = field(default_factory=list)
    opening: str = ""
    opening_text: str = ""
    opening_requests: list[str] = field(default_factory=list)
    item: str = ""
    items: str = ""
    label: str = ""
    number_fields: list[tuple[str, int, int]] = field(default_factory=list)
    text_fields: list[tuple[str, list[str]]] = field(default_factory=list)


SOURCES = [Source(**row) for row in table("sources")]
SOURCE_BY_NAME = {source.name: source for source in SOURCES}


def argument_choices(kind: str, source: Source) -> list[tuple[Any, ...]]:
    """Every argument tuple that an operation with this kind of arguments can take on this source."""
    if kind in RANGES:
        low, high = RANGES[kind]
        return [(value,) for value in range(low, high + 1)]
    if kind == "letter":
        return [(letter,) for letter in LETTERS]
    if kind == "capital":
        return [(letter.upper(),) for letter in LETTERS]
    if kind == "mark":
        return [(mark,) for mark in "!?.-*#xs"]
    if kind == "field":
        return [(name,) for name, _, _ in source.number_fields]
    if kind == "field number":
        every = {name: 10 if high - low >= 100 else 1 for name, low, high in source.number_fields}
        return [
            (name, value)
            for name, low, high in source.number_fields
            for value in range(low, high + 1)
            if value % every[name] == 0
        ]
    if kind == "field text":
        return [(name, value) for name, values in source.text_fields for value in values]
    return [()]


def random_input(source: Source, rng: random.Random) -> Any:
    """One input for the function, empty about one time in eight, short or long enough to survive filters."""
    size = 0 if rng.random() < 0.12 else rng.randint(1, rng.choice((9, 30)))
    if source.name == "numbers":
        return [rng.choice((rng.randint(-30, 40), rng.randint(0, 12))) for _ in range(size)]
    if source.name == "range":
        return size if rng.random() < 0.3 else size * 4
    if source.gives == "words":
        letters = ["".join(rng.choices(LETTERS, k=rng.randint(1, 8))) for _ in range(size)]
        words = [rng.choice((rng.choice(WORDS), word)) for word in letters]
        return words if source.name == "words" else " ".join(words)
    if source.gives == "characters":
        return "".join(rng.choices("abcdeimnorst AEIRT 0123456789 !", k=size * 3))
    names = rng.sample(NAMES, k=min(size, len(NAMES)))
    if source.gives == "pairs":
        return {name: rng.randint(0, 30) for name in names}
    return [
        {source.label: name}
        | {field: rng.randint(low, high) for field, low, high in source.number_fields}
        | {field: rng.choice(values) for field, values in source.text_fields}
        for name in names
    ]


def smallest_input(source: Source) -> Any:
    """The input that holds nothing."""
    if source.name == "range":
        return 0
    if source.parameter == "text":
        return ""
    return {} if source.gives == "pairs" else []
