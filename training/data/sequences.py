"""Token sequences with a mask of what the target wrote, and how they are put into batches.

Knows token ids, masks and lengths. Must not know words, models or losses.

A sequence is a whole conversation, its request first; batches hold sequences of similar length, padded on
the right to the longest, so that no sequence ever sees another one. Of the shipped pair's batches 0.4 % is padding.
"""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from dflash.files import read_arrays, write_arrays

Ints = np.ndarray


@dataclass(frozen=True)
class Sequences:
    """Sequences end to end: their ``tokens`` and, of the same shape, ``loss_mask``: which the target wrote."""

    tokens: Ints
    loss_mask: Ints
    lengths: Ints

    @classmethod
    def from_lists(cls, prompts: list[list[int]], answers: list[list[int]]) -> "Sequences":
        """Join each prompt with its answer."""
        rows = [p + a for p, a in zip(prompts, answers, strict=True)]
        wrote = [[False] * len(p) + [True] * len(a) for p, a in zip(prompts, answers, strict=True)]
        return cls(
            np.concatenate([np.asarray(r, dtype=np.int32) for r in rows]),
            np.concatenate([np.asarray(w, dtype=bool) for w in wrote]),
            np.asarray([len(r) for r in rows], dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> Ints:
        """Where each sequence begins in ``tokens``."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    def select(self, chosen: Ints) -> "Sequences":
        """The sequences for which the boolean ``chosen`` is true."""
        kept = np.repeat(chosen, self.lengths)
        return Sequences(self.tokens[kept], self.loss_mask[kept], self.lengths[chosen])

    def save(self, path: Path) -> None:
        """Write all three arrays to one safetensors file, whole or not at all."""
        arrays = {"tokens": self.tokens, "loss_mask": self.loss_mask, "lengths": self.lengths}
        write_arrays(path, {k: mx.array(v) for k, v in arrays.items()})

    @classmethod
    def load(cls, *paths: Path) -> "Sequences":
        """Read the files of :meth:`save` as one set."""
        parts = [read_arrays(path)[0] for path in paths]
        return cls(**{name: np.concatenate([np.array(part[name]) for part in parts]) for name in parts[0]})


def plan_batches(lengths: Ints, batch_tokens: int, seed: int, pool: int = 1024) -> list[Ints]:
    """Sequence numbers of every batch of one pass, in order; a batch holds at most ``batch_tokens`` with padding.

    Sequences are shuffled, sorted by length within pools of ``pool``, and the batches of a pool shuffled
    again.
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
    """Tokens and response mask ``[len(rows), longest]`` of some sequences, padded on the right."""
    lengths = sequences.lengths[rows]
    shape = len(rows), int(lengths.max())
    tokens, loss_mask = np.full(shape, pad, dtype=np.int32), np.zeros(shape, dtype=bool)
    for i, (start, length) in enumerate(zip(starts[rows], lengths, strict=True)):
        tokens[i, :length] = sequences.tokens[start : start + length]
        loss_mask[i, :length] = sequences.loss_mask[start : start + length]
    return tokens, loss_mask
