"""The toy tasks: requests with one right answer each, functions to write and word problems to solve.

Everything is a function of the seed. The bundled pair was trained on these samples, so they must not change.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import functions, known, problems
from .check import check_answers
from .split import Split, is_heldout_pair, split_of

__all__ = [
    "Sample",
    "Split",
    "check_answers",
    "is_heldout_pair",
    "sample",
    "samples",
    "split_of",
]

FUNCTION_SHARE = 0.55
KNOWN_SHARE = 0.08  # of the functions, in training only: they hold no combination
STEP_COUNTS = (0, 1, 2, 3)
STEP_WEIGHTS = {"train": (4, 26, 42, 28), "heldout": (0, 26, 42, 32)}
EVENT_COUNTS = (1, 2, 3, 4)
EVENT_WEIGHTS = {"train": (4, 30, 38, 28), "heldout": (0, 32, 38, 30)}


@dataclass(frozen=True)
class Sample:
    """A request, its canonical answer, and the plain data from which `check_answers` judges other answers."""

    prompt: str
    answer: str
    kind: str
    operations: tuple[str, ...]
    check: dict[str, Any]


def sample(rng: random.Random, split: Split) -> Sample:
    """One random sample of the split.

    Its kind and length are chosen first and kept: otherwise long samples, which hold more pairs of operations and so
    are refused more often, would become rare.
    """
    if rng.random() < FUNCTION_SHARE:
        if split == "train" and rng.random() < KNOWN_SHARE:
            row = rng.choice(known.KNOWN)
            prompt = known.request(row, rng)
            return Sample(prompt, row.answer(), "function", (row.name,), {"kind": "known", "name": row.name})
        length = rng.choices(STEP_COUNTS, STEP_WEIGHTS[split])[0]
        while True:
            pipeline = functions.random_pipeline(rng, length)
            if split_of(pipeline.operations) == split:
                prompt, answer = functions.request(pipeline, rng), functions.answer(pipeline)
                return Sample(prompt, answer, "function", pipeline.operations, pipeline.check())
    length = rng.choices(EVENT_COUNTS, EVENT_WEIGHTS[split])[0]
    while True:
        problem = problems.random_problem(rng, length)
        if split_of(problem.operations) == split:
            check = {"kind": "problem", "answer": problem.value}
            return Sample(problem.prompt, problem.answer, "problem", problem.operations, check)


def samples(seed: int, count: int, split: Split) -> Iterator[Sample]:
    """`count` samples with distinct prompts, the same for the same seed on every machine and run."""
    rng = random.Random(f"{split} {seed}")
    prompts: set[str] = set()
    while len(prompts) < count:
        one = sample(rng, split)
        if one.prompt not in prompts:
            prompts.add(one.prompt)
            yield one
