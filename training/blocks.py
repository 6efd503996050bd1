"""Which blocks of a sequence the drafter is trained on, and what each position of a block should predict.

Knows lengths and token ids. Must not know models.

An anchor at `a` stands for a decoding step in which the tokens before `a` are committed with their
features and token `a` is the last one committed. Its block is `[token a, mask, mask, ...]`; position `i`
predicts token `a + i`.

Shapes: N sequences, S sequence length, A anchors a sequence, B block size.
"""

import mlx.core as mx
import numpy as np

from .data import Ints


def draw_anchors(prompt_lengths: Ints, lengths: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Random anchors ``[N, count]`` among response positions ``a`` with ``a + 1`` still in the response.

    They differ from each other where the response is long enough for that. Raises ``ValueError`` for a
    response of fewer than two tokens, which has nothing to predict.
    """
    rows = []
    for prompt, length in zip(prompt_lengths, lengths, strict=True):
        valid = int(length) - 1 - int(prompt)
        if valid < 1:
            raise ValueError(f"A response of {int(length) - int(prompt)} token(s) has no anchor; leave it out.")
        rows.append(np.sort(rng.choice(valid, count, replace=valid < count)) + int(prompt))
    return np.stack(rows).astype(np.int32)


def block_targets(
    tokens_NS: mx.array, lengths_N: mx.array, anchors_NA: mx.array, size: int
) -> tuple[mx.array, mx.array]:
    """Tokens ``[N, A, B-1]`` that positions ``1 .. B-1`` predict, and which of them are in the response."""
    places = anchors_NA[..., None] + mx.arange(1, size)
    inside = places < lengths_N[:, None, None]
    places = mx.minimum(places, tokens_NS.shape[1] - 1)
    flat = mx.take_along_axis(tokens_NS, places.reshape(len(tokens_NS), -1), axis=1)
    return flat.reshape(places.shape), inside


def position_weights(size: int, gamma: float) -> mx.array:
    """``exp(-(i - 1) / gamma)`` for positions ``i = 1 .. size - 1``: an early miss ends the whole block."""
    return mx.exp(-(mx.arange(1, size) - 1) / gamma)
