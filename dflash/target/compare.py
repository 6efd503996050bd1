"""Compare two arrays, or everything that layers can still read from two lists of caches; name the first difference."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, QuantizedKVCache, RotatingKVCache

from .caches import members


class Mismatch(AssertionError):
    """Two things differ; the message says which, where and by how much."""


def tolerance(dtype: mx.Dtype) -> float:
    """Largest difference, relative to the largest number, that sums in another order may make.

    MLX's CUDA backend rounds float32 products to 10 bits unless told otherwise.
    """
    return {mx.float32: 1e-2 if mx.cuda.is_available() else 2e-4, mx.float16: 2e-2, mx.bfloat16: 1e-1}.get(dtype, 0.0)


def assert_close(name: str, ours: mx.array, theirs: mx.array, limit: float | None = None) -> None:
    """Raise :class:`Mismatch` if the arrays differ in shape, or by more than rounding."""
    if ours.shape != theirs.shape:
        raise Mismatch(f"{name} has shape {ours.shape}, expected {theirs.shape}")
    if ours.size == 0:
        return
    limit = tolerance(theirs.dtype) if limit is None else limit
    a, b = ours.astype(mx.float32), theirs.astype(mx.float32)
    difference = mx.where(a == b, 0, mx.abs(a - b))  # equal infinities too
    size = mx.max(mx.where(mx.isinf(b), 0, mx.abs(b)))
    worst = cast(float, (mx.max(difference) / mx.maximum(size, 1e-6)).item())
    if not worst <= limit:  # also true of NaN
        raise Mismatch(f"{name} differs by {worst:.1e} of its size (rounding allows {limit:.0e})")


def assert_same_caches(ours: Sequence[Any], theirs: Sequence[Any], where: str = "") -> None:
    """Compare every array that the layers can still read."""
    for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for (name, x, limit), (_, y, _) in zip(_entries(a), _entries(b), strict=True):
            assert_close(f"layer {layer} {name} {where}".rstrip(), x, y, limit)


def rounding_limit(caches: Sequence[Any], dtype: mx.Dtype) -> float:
    """Largest relative difference that rounding may make in what is computed in ``dtype`` over ``caches``.

    Float rounding can move a cached number across the boundary between two quantisation levels, and the logits follow.
    """
    levels = [_level(m) for cache in caches for m in members(cache) if isinstance(m, QuantizedKVCache)]
    return max([tolerance(dtype), *levels])


def windows(caches: Sequence[Any]) -> list[int]:
    """Sizes of the windows among ``caches``, in tokens."""
    return [
        getattr(m, "max_size", None) or m.chunk_size
        for cache in caches
        for m in members(cache)
        if hasattr(m, "max_size") or hasattr(m, "chunk_size")
    ]


def _entries(cache: Any) -> list[tuple[str, mx.array, float | None]]:
    """Name, array and allowed difference of everything that the cache can still hand out."""
    kind = type(cache).__name__
    if isinstance(cache, CacheList):
        return [entry for member in cache.caches for entry in _entries(member)]
    if isinstance(cache, ArraysCache):
        states = cast(list[mx.array | None], cache.cache)
        return [(f"{kind}[{i}]", x, None) for i, x in enumerate(states) if x is not None]
    if cache.keys is None:
        return []
    both = (("keys", cache.keys), ("values", cache.values))
    if isinstance(cache, QuantizedKVCache):
        whole = [(n, _dequantized(cache, x)) for n, x in both]
        return [(f"{kind} {n}", x[..., : cache.offset, :], _level(cache)) for n, x in whole]
    return [(f"{kind} {n}", _readable(cache, x), None) for n, x in both]


def _level(cache: QuantizedKVCache) -> float:
    """One quantisation level, relative to the largest number: a group's range is at most twice that number."""
    return 2.0 / (2**cache.bits - 1)


def _dequantized(cache: QuantizedKVCache, parts: tuple[mx.array, mx.array, mx.array]) -> mx.array:
    words, scales, biases = parts
    return mx.dequantize(words, scales, biases, group_size=cache.group_size, bits=cache.bits)


def _readable(cache: Any, x: mx.array) -> mx.array:
    """Entries that a later query can see: all, or those of a window, kept ones first."""
    if isinstance(cache, RotatingKVCache):
        newest = min(cache.offset, cache.max_size - 1) - cache.keep
        x = cache._temporal_order(x)
        return x if newest <= 0 else mx.concatenate([x[..., : cache.keep, :], x[..., x.shape[2] - newest :, :]], axis=2)
    if isinstance(cache, ChunkedKVCache):
        x = x[..., : cache.offset - cache.start_position, :]
        return x[..., -min(cache.offset, cache.chunk_size) :, :]
    return x[..., : cache.offset, :]
