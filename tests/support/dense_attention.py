"""One masked attention of all blocks over everything, in place of :func:`~dflash.drafters.block_attention`'s tiles.

Shapes: N sequences, S context length, A anchors a sequence, B block size, X = A * B, H query heads, K key-value heads,
G query heads a key-value head, D head size.
"""

import mlx.core as mx
from einops import rearrange


def dense_mask(anchors_NA: mx.array, context: int, size: int, window: int | None, causal: bool) -> mx.array:
    """Added to scores ``[N, X, S + X]`` of all blocks against the context and all blocks."""
    anchors_NX = mx.repeat(anchors_NA, size, axis=1)[..., None]
    within_X = mx.arange(anchors_NA.shape[1] * size) % size
    positions, keys = anchors_NX + within_X[:, None], mx.arange(context)
    visible_context = keys < anchors_NX
    if window is not None:
        visible_context = visible_context & (keys > positions - window)
    block_X = mx.arange(within_X.size) // size
    visible_blocks = block_X[:, None] == block_X
    if causal:
        visible_blocks = visible_blocks & (within_X[:, None] >= within_X)
    visible_blocks = mx.broadcast_to(visible_blocks, (len(anchors_NA), *visible_blocks.shape))
    return mx.where(mx.concatenate([visible_context, visible_blocks], axis=-1), 0.0, -1e9)


def dense_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    context_keys: mx.array,
    context_values: mx.array,
    anchors_NA: mx.array,
    window: int | None = None,
    causal: bool = False,
) -> mx.array:
    """As :func:`~dflash.drafters.block_attention.block_attention`."""
    (n, _), (heads, size, head_size) = anchors_NA.shape, queries.shape[1:]
    groups, mask = heads // keys.shape[1], dense_mask(anchors_NA, context_keys.shape[2], size, window, causal)
    keys, values = (
        mx.concatenate([of_context, rearrange(of_blocks, "(N A) K B D -> N K (A B) D", N=n)], axis=2)[:, :, None]
        for of_context, of_blocks in ((context_keys, keys), (context_values, values))
    )
    queries = rearrange(queries * head_size**-0.5, "(N A) (K G) B D -> N K G (A B) D", N=n, G=groups)
    weights = mx.softmax(queries @ keys.swapaxes(-1, -2) + mask[:, None, None], axis=-1)
    return rearrange(weights @ values, "N K G (A B) D -> (N A) (K G) B D", B=size)
