"""The blocks of a sequence that a drafter is trained on, and the target token of each position.

An anchor at `a` stands for a decoding step in which the tokens before `a` are committed with their features, and token
`a` is the last committed token. Its block is `[token a, mask, mask, ...]`; position `i`
predicts token `a + i`.

Shapes: N sequences, S sequence length, A anchors a sequence, B block size.
"""

import mlx.core as mx
import numpy as np

from ..data.sequences import Ints


def select_anchors(loss_mask_NS: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Random anchors ``[N, count]``, sorted, among positions ``a`` of a response with ``a + 1`` in it too.

    A row that has fewer gets all of them, padded with its last; :func:`block_targets` counts each once. Raises
    ``ValueError`` for a response of fewer than two tokens, which has nothing to predict.
    """
    rows = []
    for loss_mask_S in loss_mask_NS:
        valid = np.flatnonzero(loss_mask_S[:-1] & loss_mask_S[1:])
        if not len(valid):
            raise ValueError(f"A response of {int(loss_mask_S.sum())} token(s) has no anchor; leave it out.")
        drawn = np.sort(rng.choice(valid, min(count, len(valid)), replace=False))
        rows.append(np.pad(drawn, (0, count - len(drawn)), mode="edge"))
    return np.stack(rows).astype(np.int32)


def flat_positions(anchors_NA: mx.array, length: int, size: int) -> mx.array:
    """Indices into ``[N * S]`` tokens of those that positions ``1 .. size - 1`` predict, shape ``[N, A, B-1]``.

    Meaningless where a block extends beyond the end of its sequence of ``length``.
    """
    rows = mx.arange(anchors_NA.shape[0])[:, None, None] * length
    return rows + anchors_NA[..., None] + mx.arange(1, size)


def block_targets(
    tokens_NS: mx.array, loss_mask_NS: mx.array, anchors_NA: mx.array, size: int
) -> tuple[mx.array, mx.array]:
    """Tokens ``[N, A, B-1]`` that positions ``1 .. B-1`` predict, and which of them count.

    A position counts up to the end of the response that its anchor is in, if the anchor is not the one before it.
    """
    positions = anchors_NA[..., None] + mx.arange(1, size)
    inside = positions < tokens_NS.shape[1]
    positions = mx.minimum(positions, tokens_NS.shape[1] - 1)  # a block may extend beyond its sequence

    def at_positions(values_NS: mx.array) -> mx.array:
        return mx.take_along_axis(values_NS, positions.reshape(len(positions), -1), axis=1).reshape(positions.shape)

    # The product of 0 and 1 along the block is 1 up to the first position outside the response, and 0 from there on:
    # a later turn of the conversation is not predicted from before it.
    counts = mx.cumprod((at_positions(loss_mask_NS) & inside).astype(mx.int32), axis=-1) > 0
    # Anchors are sorted, so padding equals the anchor before it.
    new = mx.concatenate([mx.ones_like(anchors_NA[:, :1]), anchors_NA[:, 1:] - anchors_NA[:, :-1]], axis=1) != 0
    return at_positions(tokens_NS), counts & new[..., None]


def position_weights(size: int, gamma: float) -> mx.array:
    """``exp(-(i - 1) / gamma)`` for positions ``i = 1 .. size - 1``: an early miss ends the whole block."""
    return mx.exp(-(mx.arange(1, size) - 1) / gamma)
