"""Attention of many drafter blocks to the contexts of their sequences, without one dense mask.

Each block sees the features of its own sequence before its anchor, and itself; no block sees another one. One masked
attention over `[context, all blocks]` would compute `A * B * (S + A * B)` scores per sequence and head, most of them
masked. Here there are at most `A * B * (S + B)`: scores against the context, which the blocks of a sequence share, and
scores inside each block, under one softmax. Blocks are processed in tiles of `M` anchors, against the part of the
context that a block of the tile sees. For sorted anchors spread evenly over a sequence that leaves
`A * B * (S / 2 + M * S / (2 * A) + B)` scores; a sliding layer computes only its window.

Only `M * B * (S + B)` scores exist at any time, forward or backward: the backward pass recomputes the weights of each
tile from the logarithm of its softmax's sum (FlashAttention, arXiv:2205.14135), and each tile waits for the one before.

Shapes: N sequences, S context length, A anchors a sequence, M anchors of a tile, B block size, H query heads,
K key-value heads, G query heads a key-value head, X = G * B, D head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np
from einops import rearrange

from ..core.cpu_math import shifted_exp

_HIDDEN = -1e9
_ANCHORS_AT_ONCE = 16  # larger tiles compute more masked scores and take more memory

Arrays = tuple[mx.array, ...]


@dataclass(frozen=True)
class _Tile:
    """Neighbouring anchors ``[first:last]`` and the context ``[start:stop]`` visible to at least one of them."""

    first: int
    last: int
    start: int
    stop: int

    def of_blocks(self, x_NKAXD: mx.array) -> mx.array:
        return x_NKAXD[:, :, self.first : self.last]

    def of_context(self, x_NKSD: mx.array) -> mx.array:
        return x_NKSD[:, :, self.start : self.stop]

    def into_context(self, x_NKSD: mx.array, context: int) -> mx.array:
        """Zeros around ``[start:stop]``: the rest of the context gets no gradient from this tile."""
        return mx.pad(x_NKSD, [(0, 0), (0, 0), (self.start, context - self.stop), (0, 0)])


def _tiles(anchors_NA: np.ndarray, window: int | None) -> Iterator[_Tile]:
    """All anchors, a tile at a time.

    A tile includes context that some of its blocks do not see, which :func:`context_mask` hides, and repeated anchors
    that pad a row, which count nowhere. ``stop`` is the last anchor, which is not visible itself, but at least
    ``start + 1``: a block at position 0 has no context, and a softmax over no columns has no maximum.
    """
    for first in range(0, anchors_NA.shape[1], _ANCHORS_AT_ONCE):
        some = anchors_NA[:, first : first + _ANCHORS_AT_ONCE]
        start = 0 if window is None else max(0, int(some.min()) - window + 1)
        yield _Tile(first, first + some.shape[1], start, max(start + 1, int(some.max())))


def context_mask(anchors_NA: mx.array, start: int, stop: int, size: int, window: int | None) -> mx.array:
    """Added to scores: 0 where a block position sees a context position, else a large negative number.

    Shape ``[N, A, 1, stop - start]``, or ``[N, A, B, stop - start]`` with a sliding window: the query at
    position ``t`` sees context positions ``> t - window`` before its anchor.
    """
    keys = mx.arange(start, stop)
    anchors = anchors_NA[..., None, None]
    visible = keys < anchors
    if window is not None:
        visible = visible & (keys > anchors + mx.arange(size)[:, None] - window)
    return mx.where(visible, 0.0, _HIDDEN)


@dataclass(frozen=True)
class _Attention:
    """One attention, tile by tile. Queries ``[N, K, A, X, D]`` are scaled already."""

    size: int
    window: int | None
    causal: bool

    def scores(
        self, tile: _Tile, anchors_NM: mx.array, q_NKMXD: mx.array, k_NKMBD: mx.array, ck_NKSD: mx.array
    ) -> Arrays:
        """Against the context ``[N, K, M, X, S]`` and inside each block ``[N, K, M, X, B]``, in float32."""
        n, heads, m, x, _ = q_NKMXD.shape
        of_context = merge_queries(q_NKMXD) @ ck_NKSD.swapaxes(-1, -2)
        of_block = q_NKMXD @ k_NKMBD.swapaxes(-1, -2)
        by_position = n, heads, m, x // self.size, self.size, -1
        mask = context_mask(anchors_NM, tile.start, tile.stop, self.size, self.window)[:, None, :, None]
        of_context = of_context.astype(mx.float32).reshape(by_position) + mask
        of_block = of_block.astype(mx.float32).reshape(by_position)
        if self.causal:
            of_block = of_block + mx.where(mx.tri(self.size, dtype=mx.bool_), 0.0, _HIDDEN)
        return of_context.reshape(n, heads, m, x, -1), of_block.reshape(n, heads, m, x, -1)

    def forward(self, tile: _Tile, inputs: Arrays) -> Arrays:
        """Outputs ``[N, K, M, X, D]`` and the logarithm ``[N, K, M, X, 1]`` of each softmax's sum."""
        anchors_NM, q_NKMXD, k, v, ck, cv = inputs
        of_context, of_block = self.scores(tile, anchors_NM, q_NKMXD, k, ck)
        # The softmax over [context, block] without joining the two: both parts are shifted by the larger of their
        # maxima (so no exp is above 1) and share one sum; weights are divided once, after the products with values.
        top = mx.maximum(of_context.max(-1, keepdims=True), of_block.max(-1, keepdims=True))
        of_context, of_block = shifted_exp(of_context, top), shifted_exp(of_block, top)
        total = of_context.sum(-1, keepdims=True) + of_block.sum(-1, keepdims=True)
        out = (merge_queries(of_context).astype(q_NKMXD.dtype) @ cv).reshape(q_NKMXD.shape)
        out = (out + of_block.astype(q_NKMXD.dtype) @ v) / total
        return out.astype(q_NKMXD.dtype), top + mx.log(total)

    def backward(self, tile: _Tile, inputs: Arrays, outputs: Arrays, d_out_NKMXD: mx.array) -> Arrays:
        """Gradients of all ``inputs`` of :meth:`forward` but the anchors, from its ``outputs``."""
        (anchors_NM, q_NKMXD, k, v, ck, cv), (out_NKMXD, log_total) = inputs, outputs
        dtype, scores = q_NKMXD.dtype, self.scores(tile, anchors_NM, q_NKMXD, k, ck)
        weights_context, weights_block = (shifted_exp(s, log_total) for s in scores)
        # With out = sum_j w_j v_j and w = softmax(s), the Jacobian dw_j/ds_i = w_j (1[i = j] - w_i) gives
        # dL/ds_j = w_j (d_out . v_j - sum_i w_i d_out . v_i). The sum is d_out . out: one number a query, known from
        # the forward pass, the same for context and block.
        mean = (out_NKMXD * d_out_NKMXD).astype(mx.float32).sum(-1, keepdims=True)
        q, d_out = merge_queries(q_NKMXD), merge_queries(d_out_NKMXD)
        d_context = (d_out @ cv.swapaxes(-1, -2)).reshape(weights_context.shape)
        d_context = merge_queries((weights_context * (d_context - mean)).astype(dtype))
        d_block = (weights_block * (d_out_NKMXD @ v.swapaxes(-1, -2) - mean)).astype(dtype)
        return (
            (d_context @ ck).reshape(q_NKMXD.shape) + d_block @ k,
            d_block.swapaxes(-1, -2) @ q_NKMXD,
            weights_block.astype(dtype).swapaxes(-1, -2) @ d_out_NKMXD,
            d_context.swapaxes(-1, -2) @ q,
            merge_queries(weights_context).astype(dtype).swapaxes(-1, -2) @ d_out,
        )


def merge_queries(x_NKMXD: mx.array) -> mx.array:
    """``[N, K, M * X, D]``: all queries of a tile side by side, for the context that they share."""
    return x_NKMXD.flatten(2, 3)


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

    ``queries`` is ``[N * A, H, B, D]``, ``keys`` and ``values`` of the blocks ``[N * A, K, B, D]``, of the context
    ``[N, K, S, D]``. Inside a block attention is bidirectional unless ``causal``. Anchors may be in any order; sorted
    ones are faster. They are read here, so ``mx.compile`` cannot trace them.
    """
    (n, _), (heads, size, head_size) = anchors_NA.shape, queries.shape[1:]
    groups, context = heads // keys.shape[1], context_keys.shape[2]
    tiles = list(_tiles(np.array(anchors_NA), window))
    attention = _Attention(size, window, causal)

    def waiting(done: list[Arrays], tile: _Tile, arrays: Arrays, *of_blocks: mx.array) -> Arrays:
        """A tile's inputs, delayed until the last of ``done`` is computed."""
        inputs = [anchors_NA[:, tile.first : tile.last], *(tile.of_blocks(x) for x in arrays[:3])]
        inputs += [*(tile.of_context(x) for x in arrays[3:]), *(tile.of_blocks(x) for x in of_blocks)]
        return tuple(mx.depends(inputs, list(done[-1])) if done else inputs)

    @mx.custom_function
    def attend(*arrays: mx.array) -> Arrays:
        done: list[Arrays] = []
        for tile in tiles:
            done.append(attention.forward(tile, waiting(done, tile, arrays)))
        return tuple(mx.concatenate(list(results), axis=2) for results in zip(*done, strict=True))

    @attend.vjp
    def gradients(arrays: Arrays, cotangents: Arrays, outputs: Arrays) -> Arrays:
        done: list[Arrays] = []
        for tile in tiles:
            *inputs, out, log_total, d_out = waiting(done, tile, arrays, *outputs, cotangents[0])
            done.append(attention.backward(tile, tuple(inputs), (out, log_total), d_out))
        of_blocks = [mx.concatenate([d[i] for d in done], axis=2) for i in range(3)]
        of_context = [[t.into_context(d[i], context) for t, d in zip(tiles, done, strict=True)] for i in (3, 4)]
        return *of_blocks, *(sum(parts[1:], parts[0]) for parts in of_context)

    out, _ = cast(
        Arrays,
        attend(
            rearrange(queries * head_size**-0.5, "(N A) (K G) B D -> N K A (G B) D", N=n, G=groups),
            rearrange(keys, "(N A) K B D -> N K A B D", N=n),
            rearrange(values, "(N A) K B D -> N K A B D", N=n),
            context_keys,
            context_values,
        ),
    )
    return rearrange(out, "N K A (G B) D -> (N A) (K G) B D", G=groups)
