"""Well-known single functions (factorial, palindrome, ...), asked for by name: rows of ``tables/known.yaml``.

A row holds no combination of operations, so all of them belong to training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from .tables import table
from .wording import FRAMES, as_typed, fenced

NUMBERS = {"n": (0, 24), "big": (0, 3000), "any": (-20, 40)}
"""Smallest and largest argument, by its kind; the other kind is ``text``."""


@dataclass(frozen=True)
class Known:
    """One function; `inputs` names the kind of each argument, `asked` follows "a function that"."""

    name: str
    asked: list[str]
    inputs: list[str]
    code: str
    closing: str

    def answer(self) -> str:
        """The one canonical answer."""
        return fenced(self.code, self.closing)


KNOWN = [Known(**row) for row in table("known")]
KNOWN_BY_NAME = {row.name: row for row in KNOWN}


def request(row: Known, rng: random.Random) -> str:
    """One of the ways to ask for it."""
    return as_typed(rng.choice(FRAMES["known"]).format(t=rng.choice(row.asked)), rng)


def random_arguments(row: Known, rng: random.Random) -> list[Any]:
    """One set of arguments of the right kinds."""
    return [
        "".join(rng.choices("abcdeimnorst AEI", k=rng.choice((0, 1, 3, 8))))
        if kind == "text"
        else rng.randint(*NUMBERS[kind])
        for kind in row.inputs
    ]
