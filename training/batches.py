"""The batches of a run: a batch's sequences and anchors are a function of its number."""

import logging

import mlx.core as mx
import numpy as np

from dflash.core.errors import TrainingError

from .data.sequences import Ints, Sequences, pad_batch, plan_batches
from .drafters.targets import select_anchors
from .recipe import DataSettings

logger = logging.getLogger(__name__)


def anchor_counts(sequences: Sequences) -> Ints:
    """How many anchors ``[N]`` each sequence offers: response tokens whose next token is in the response too."""
    pairs = sequences.loss_mask.copy()
    pairs[:-1] &= sequences.loss_mask[1:]
    pairs[np.cumsum(sequences.lengths) - 1] = False  # the next token belongs to another sequence
    return np.add.reduceat(pairs, sequences.starts, dtype=np.int64)


def trainable(sequences: Sequences, max_length: int) -> tuple[Sequences, Ints]:
    """The sequences that can be trained on, and their positions in ``sequences``.

    Sequences of more than ``max_length`` tokens or without an anchor are left out, and their number is logged.
    Raises ``TrainingError`` if none is left.
    """
    if not len(sequences):
        raise TrainingError("The dataset holds no sequences. Prepare one with more prompts.")
    too_long = sequences.lengths > max_length
    no_anchor = anchor_counts(sequences) == 0
    kept = ~(too_long | no_anchor)
    reasons = []
    if too_long.any():
        reasons.append(f"{too_long.sum()} of more than max_length {max_length} tokens")
    if no_anchor.any():
        reasons.append(f"{no_anchor.sum()} without two response tokens in a row")
    if not kept.any():
        raise TrainingError(
            f"None of the {len(sequences)} sequences can be trained on: {', '.join(reasons)}. Raise data.max_length "
            "and data.batch_tokens, or prepare a dataset with longer responses."
        )
    if reasons:
        logger.warning("Left out of %d sequences: %s.", len(sequences), ", ".join(reasons))
    return sequences.select(kept), np.flatnonzero(kept)


Blocks = tuple[mx.array, mx.array, mx.array]
"""Tokens and loss mask ``[N, S]`` and anchors ``[N, A]``: a batch without the target's features."""


class Batches:
    """``batches(number)`` gives tokens, loss mask and anchors, epoch after epoch.

    ``A`` is the smallest of ``settings.anchors``, the most anchors that any sequence of the batch offers, and an even
    part of ``settings.max_blocks_per_batch``. ``len`` is the number of batches in ``epochs``, or in the whole epochs
    that hold ``at_least``.
    """

    def __init__(self, sequences: Sequences, settings: DataSettings, epochs: int, at_least: int | None = None):
        self.sequences, self.numbers = trainable(sequences, settings.max_length)
        self.settings = settings
        self._starts, self._offers = self.sequences.starts, anchor_counts(self.sequences)
        self._plan: list[Ints] = []
        epoch = 0
        while epoch < epochs if at_least is None else len(self._plan) < at_least:
            self._plan += plan_batches(self.sequences.lengths, settings.batch_tokens, settings.seed + epoch)
            epoch += 1

    def __len__(self) -> int:
        return len(self._plan)

    def __call__(self, number: int) -> Blocks:
        rows = self._plan[number]
        tokens, loss_mask = pad_batch(self.sequences, rows, self._starts)
        per_row = max(1, self.settings.max_blocks_per_batch // len(rows))
        count = min(self.settings.anchors, int(self._offers[rows].max()), per_row)
        anchors = select_anchors(loss_mask, count, np.random.default_rng([self.settings.seed, number]))
        return mx.array(tokens), mx.array(loss_mask), mx.array(anchors)

    def members(self, number: int) -> Ints:
        """The positions of this batch's sequences in the dataset."""
        return self.numbers[self._plan[number]]

    def name(self, number: int) -> str:
        """The batch in messages: its number and its sequences' positions."""
        return f"batch {number} (sequences {', '.join(map(str, self.members(number)))})"
