"""Token sequences with a loss mask, and their batches.

A sequence is a whole conversation, prompt first. A batch holds sequences of similar length, padded on the right to the
longest, so no sequence sees another one.

Shapes: N sequences, L length of one, T tokens of all.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Ints = np.ndarray


@dataclass(frozen=True)
class Sequences:
    """Concatenated sequences: ``tokens [T]`` (int32), ``loss_mask [T]``, true on responses, and ``lengths [N]``."""

    tokens: Ints
    loss_mask: Ints
    lengths: Ints

    @classmethod
    def from_lists(cls, prompts: list[list[int]], answers: list[list[int]]) -> "Sequences":
        """Join each prompt with its answer; the mask is true on answers."""
        rows = [p + a for p, a in zip(prompts, answers, strict=True)]
        masks = [[False] * len(p) + [True] * len(a) for p, a in zip(prompts, answers, strict=True)]
        return cls(
            np.concatenate([np.asarray(r, dtype=np.int32) for r in rows]),
            np.concatenate([np.asarray(m, dtype=bool) for m in masks]),
            np.asarray([len(r) for r in rows], dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> Ints:
        """Index ``[N]`` of each sequence's first token."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    def select(self, kept: Ints) -> "Sequences":
        """The sequences for which the boolean ``kept [N]`` is true."""
        inside = np.repeat(kept, self.lengths)
        return Sequences(self.tokens[inside], self.loss_mask[inside], self.lengths[kept])

    def first(self, count: int | None) -> "Sequences":
        """The first ``count`` sequences, or all if it is ``None``."""
        return self if count is None or count >= len(self) else self.select(np.arange(len(self)) < count)

    @classmethod
    def from_arrays(cls, arrays: dict[str, Ints]) -> "Sequences":
        """The sequences of a file's arrays; older files call the mask ``response``."""
        mask = arrays["loss_mask"] if "loss_mask" in arrays else arrays["response"]
        return cls(arrays["tokens"], mask, arrays["lengths"])

    @classmethod
    def concatenate(cls, parts: Iterable["Sequences"]) -> "Sequences":
        """All sequences of ``parts``, in order."""
        columns = zip(*((part.tokens, part.loss_mask, part.lengths) for part in parts), strict=True)
        return cls(*(np.concatenate(arrays) for arrays in columns))


def plan_batches(lengths: Ints, batch_tokens: int, seed: int, pool: int = 1024) -> list[Ints]:
    """Sequence numbers of every batch of one epoch, in order; a batch holds at most ``batch_tokens``, padding included.

    Sequences are shuffled and sorted by length within pools of ``pool``; then the batches of a pool are shuffled.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lengths))
    plan: list[Ints] = []
    for start in range(0, len(order), pool):
        rows = order[start : start + pool]
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        batches: list[list[int]] = [[]]
        for row in rows:
            if batches[-1] and (len(batches[-1]) + 1) * lengths[row] > batch_tokens:
                batches.append([])
            batches[-1].append(int(row))
        plan += [np.asarray(batches[i]) for i in rng.permutation(len(batches))]
    return plan


def pad_batch(sequences: Sequences, rows: Ints, starts: Ints, pad: int = 0) -> tuple[Ints, Ints]:
    """Tokens and loss mask ``[len(rows), longest]`` of the sequences ``rows``, padded on the right."""
    lengths = sequences.lengths[rows]
    shape = len(rows), int(lengths.max())
    tokens, loss_mask = np.full(shape, pad, dtype=np.int32), np.zeros(shape, dtype=bool)
    for i, (start, length) in enumerate(zip(starts[rows], lengths, strict=True)):
        tokens[i, :length] = sequences.tokens[start : start + length]
        loss_mask[i, :length] = sequences.loss_mask[start : start + length]
    return tokens, loss_mask
