"""A model's caches, as it makes them or bounded or quantised on request.

Knows mlx-lm's cache classes and options. Must not know models, decoding or how caches are rewound.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from ..errors import GenerationError

KEPT = 4  # first tokens that a bounded cache never drops; mlx-lm's own choice for max_kv_size

GROUP_SIZES = (32, 64, 128)  # that MLX quantises by


class KeptWindowCache(RotatingKVCache):
    """A sliding window that never drops the first ``keep`` tokens, and says so in its mask.

    mlx-lm's own mask for several queries counts entries from the newest back, which hides kept tokens
    from all but the first query; a single query sees them. Here every query of a pass sees what it would
    see if tokens came one by one, so that a verified block equals single steps.
    """

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """Mask ``[N, held + N]`` for ``N`` new tokens, or what the parent gives where nothing is dropped."""
        held = min(self.max_size - 1, self.offset)
        if N == 1 or held + N <= self.max_size or (window_size or self.max_size) < self.max_size:
            return super().make_mask(N, window_size, return_array)
        query, entry = held + mx.arange(N)[:, None], mx.arange(held + N)[None]
        oldest = query - (self.max_size - self.keep) + 1
        return (entry <= query) & ((entry < self.keep) | (entry >= oldest))


def make_caches(
    model: nn.Module, max_kv_size: int | None = None, kv_bits: int | None = None, kv_group_size: int = 64
) -> list[Any]:
    """New, empty caches of ``model``.

    Args:
        model: A model loaded by mlx-lm.
        max_kv_size: Bound each layer's cache to this many tokens, the first four among them; as in mlx-lm, only
            for models that do not choose their caches themselves.
        kv_bits: Quantise the keys and values of full attention to this many bits, from the first token on;
            sliding windows and recurrent states stay as they are.
        kv_group_size: Numbers that share one scale: 32, 64 or 128, a divisor of the size of a head.

    Raises :class:`~dflash.errors.GenerationError` for options that do not fit together or the model.
    """
    if max_kv_size is not None and max_kv_size <= KEPT:
        raise GenerationError(f"max_kv_size must be more than {KEPT}, got {max_kv_size}.")
    if max_kv_size is not None and kv_bits is not None:
        raise GenerationError("A cache is either bounded or quantised: give max_kv_size or kv_bits, not both.")
    if kv_bits not in (None, 2, 3, 4, 6, 8):
        raise GenerationError(f"kv_bits must be 2, 3, 4, 6 or 8, got {kv_bits}.")
    if kv_bits is not None and kv_group_size not in GROUP_SIZES:
        raise GenerationError(f"kv_group_size must be 32, 64 or 128, got {kv_group_size}.")
    caches = make_prompt_cache(model)
    if max_kv_size is not None:
        if hasattr(model, "make_cache") and not all(type(cache) is KVCache for cache in caches):
            raise GenerationError(f"max_kv_size does not fit {type(model).__name__}: it chooses its caches itself.")
        return [KeptWindowCache(max_size=max_kv_size, keep=KEPT) for _ in caches]
    if kv_bits is not None:
        quantised = [type(cache) is KVCache for cache in caches]
        return [
            c.to_quantized(group_size=kv_group_size, bits=kv_bits) if q else c
            for c, q in zip(caches, quantised, strict=True)
        ]
    return caches


def quantisation_error(caches: list[Any], error: ValueError) -> GenerationError | None:
    """What ``error``, raised by a pass, says of quantised ``caches``; ``None`` if it is about something else."""
    sizes = {cache.group_size for cache in caches if isinstance(cache, QuantizedKVCache)}
    if not sizes or "[quantize]" not in str(error):
        return None
    return GenerationError(
        f"kv_group_size {sizes.pop()} does not divide the size of this target's attention heads, so that its keys and "
        "values cannot be quantised by it; use a smaller kv_group_size (32, 64, 128), or leave out kv_bits."
    )
