"""The toy tasks: requests with one right answer each, functions to write and word problems to solve.

Knows: how to draw samples of a split, and how to judge an answer (`check_answer`).
Must not know: tokens, models, files. Everything is a function of the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import functions, known, problems
from .bounds import distinct_meanings
from .check import CheckResult, check_answer, check_answers
from .split import Split, is_heldout_pair, split_of

__all__ = [
    "CheckResult",
    "Sample",
    "Split",
    "check_answer",
    "check_answers",
    "distinct_meanings",
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
    """A request, its canonical answer, and plain data from which `check_answer` rebuilds the reference."""

    prompt: str
    answer: str
    kind: str
    operations: tuple[str, ...]
    check: dict[str, Any]


def sample(rng: random.Random, split: Split) -> Sample:
    """One random sample of the split.

    The kind and the length are drawn first and kept, so that refusing pairs of the other split
    does not thin out the long samples.
    """
    if rng.random() < FUNCTION_SHARE:
        if split == "train" and rng.random() < KNOWN_SHARE:
            row = rng.choice(known.KNOWN)
            return Sample(
                known.request(row, rng), row.answer(), "function", (row.name,), {"kind": "known", "name": row.name}
            )
        length = rng.choices(STEP_COUNTS, STEP_WEIGHTS[split])[0]
        while True:
            pipeline = functions.draw_pipeline(rng, length)
            if split_of(pipeline.operations) == split:
                prompt = functions.request(pipeline, rng)
                return Sample(prompt, functions.answer(pipeline), "function", pipeline.operations, pipeline.check())
    length = rng.choices(EVENT_COUNTS, EVENT_WEIGHTS[split])[0]
    while True:
        problem = problems.draw_problem(rng, length)
        if split_of(problem.operations) == split:
            return Sample(
                problem.prompt,
                problem.answer,
                "problem",
                problem.operations,
                {"kind": "problem", "answer": problem.value},
            )


def samples(seed: int, count: int, split: Split) -> Iterator[Sample]:
    """`count` samples with distinct prompts, the same for the same seed on every machine and run."""
    rng = random.Random(f"{split} {seed}")
    prompts: set[str] = set()
    while len(prompts) < count:
        drawn = sample(rng, split)
        if drawn.prompt not in prompts:
            prompts.add(drawn.prompt)
            yield drawn
