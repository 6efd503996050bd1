"""Attention of many drafter blocks to the contexts of their sequences, without a dense mask over everything.

Knows arrays. Must not know models.

All blocks of a batch run in one pass. Each block sees the features of its own sequence before its anchor,
and itself; no block sees another one. As one masked attention over `[context, all blocks]` that would
compute `A * B * (S + A * B)` scores a sequence and head, of which most are masked; here it is
`A * B * (S + B)`: scores against the context, which all blocks of a sequence share, and scores inside each
block, joined on the key axis before one softmax.

Shapes: N sequences, S context length, A anchors a sequence, B block size, H query heads, K key-value
heads, G query heads a key-value head, D head size.
"""

import mlx.core as mx
from einops import rearrange

from .fastmath import softmax

_HIDDEN = -1e9


def context_mask(anchors_NA: mx.array, context: int, size: int, window: int | None) -> mx.array:
    """Added to scores: 0 where a block position sees a context position, else a large negative number.

    Shape ``[N, A, 1, S]``, or ``[N, A, B, S]`` with a sliding window: the query at position ``t`` sees
    context positions ``> t - window`` before its anchor.
    """
    keys = mx.arange(context)
    anchors = anchors_NA[..., None, None]
    seen = keys < anchors
    if window is not None:
        seen = seen & (keys > anchors + mx.arange(size)[:, None] - window)
    return mx.where(seen, 0.0, _HIDDEN)


def block_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    context_keys: mx.array,
    context_values: mx.array,
    anchors_NA: mx.array,
    window: int | None = None,
    causal: bool = False,
) -> mx.array:
    """Attention output ``[N * A, H, B, D]``.

    ``queries`` is ``[N * A, H, B, D]``, ``keys`` and ``values`` of the blocks ``[N * A, K, B, D]``, of the
    context ``[N, K, S, D]``. Inside a block attention is bidirectional unless ``causal``.
    """
    (n, a), (heads, size, head_size) = anchors_NA.shape, queries.shape[1:]
    groups, context = heads // keys.shape[1], context_keys.shape[2]
    queries = queries * head_size**-0.5

    by_sequence = rearrange(queries, "(N A) (K G) B D -> N K (G A B) D", N=n, G=groups)
    scores_context = by_sequence @ context_keys.swapaxes(-1, -2)
    mask = mx.broadcast_to(context_mask(anchors_NA, context, size, window), (n, a, size, context))
    scores_context = rearrange(scores_context, "N K (G A B) S -> N K G (A B) S", G=groups, A=a) + rearrange(
        mask, "N A B S -> N 1 1 (A B) S"
    )

    by_block = rearrange(queries, "X (K G) B D -> X K (G B) D", G=groups)
    scores_block = rearrange(by_block @ keys.swapaxes(-1, -2), "X K (G B) C -> X K G B C", G=groups)
    if causal:
        scores_block = scores_block + mx.where(mx.tri(size, dtype=mx.bool_), 0.0, _HIDDEN)
    scores_block = rearrange(scores_block, "(N A) K G B C -> N K G (A B) C", N=n)

    weights = softmax(mx.concatenate([scores_context, scores_block], axis=-1))
    of_context = rearrange(weights[..., :context], "N K G X S -> N K (G X) S") @ context_values
    of_block = rearrange(weights[..., context:], "N K G (A B) C -> (N A) K (G B) C", A=a) @ values
    return rearrange(of_context, "N K (G A B) D -> (N A) (K G) B D", G=groups, A=a) + rearrange(
        of_block, "X K (G B) D -> X (K G) B D", G=groups
    )
