"""A model's caches: its own, or bounded or quantised on request, as in mlx-lm."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from ..core.errors import GenerationError, one_line
from ..core.values import check_caches

logger = logging.getLogger(__name__)

KEPT = 4  # first tokens that a bounded cache never drops, as in mlx-lm


class KeptWindowCache(RotatingKVCache):
    """A sliding window that never drops the first ``keep`` tokens, and whose mask shows them to every query.

    mlx-lm's own mask for several queries counts entries from the newest back, which hides kept tokens from all but the
    first query; a single query sees them. Here every query of a pass sees what it would see if tokens came one by one,
    so that a verified block equals single steps. Prompts are the exception: mlx-lm feeds them with its own mask.
    """

    in_prompt = False

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """Mask ``[N, held + N]`` for ``N`` new tokens, or what the parent gives where nothing is dropped."""
        held = min(self.max_size - 1, self.offset)
        if self.in_prompt or N == 1 or held + N <= self.max_size or (window_size or self.max_size) < self.max_size:
            return super().make_mask(N, window_size, return_array)
        query, entry = held + mx.arange(N)[:, None], mx.arange(held + N)[None]
        oldest = query - (self.max_size - self.keep) + 1
        return (entry <= query) & ((entry < self.keep) | (entry >= oldest))


def members(cache: Any) -> Sequence[Any]:
    """The caches in a list of caches; any other cache alone."""
    return cache.caches if isinstance(cache, CacheList) else [cache]


@dataclass(frozen=True)
class Quantization:
    """Caches are quantised once they hold ``start`` tokens: ``kv_bits``, ``kv_group_size``, ``quantized_kv_start``."""

    bits: int
    group_size: int
    start: int

    def apply(self, caches: list[Any], offset: int) -> None:
        """Quantise ``caches`` of ``offset`` tokens in place, if due. mlx-lm does so after each of its passes."""
        if offset > 0:
            maybe_quantize_kv_cache(caches, self.start, self.group_size, self.bits)

    def longest_pass(self, offset: int) -> int:
        """Most tokens that mlx-lm would feed, one by one, to caches of the same kind after ``offset`` tokens."""
        return self.start - offset if offset < self.start else sys.maxsize


def make_caches(
    model: nn.Module,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int | None = None,
) -> tuple[list[Any], Quantization | None]:
    """New, empty caches of ``model``, and when to quantise them.

    Args:
        model: A model loaded by mlx-lm.
        max_kv_size: Bound each layer's cache to this many tokens, including the first four. As in mlx-lm, this has no
            effect, but for a warning, on models that choose their caches themselves.
        kv_bits: Quantise the keys and values of full attention to this many bits; recurrent states stay as they are.
        kv_group_size: Numbers that share one scale: 32, 64 or 128, a divisor of the size of a head.
        quantized_kv_start: Quantise after the pass with which the caches reach this many tokens, as mlx-lm does.
            ``None``: before the first token, which mlx-lm never does.

    Raises ``GenerationError`` for options that do not fit together or the model.
    """
    check_caches(max_kv_size, kv_bits, kv_group_size)
    caches = make_prompt_cache(model)
    if max_kv_size is not None and hasattr(model, "make_cache"):
        name = getattr(model, "model_type", type(model).__name__)
        logger.warning("max_kv_size has no effect: %s chooses its caches itself, as in mlx-lm.", name)
    elif max_kv_size is not None:
        if kv_bits is not None:
            raise GenerationError("A cache is either bounded or quantised: give max_kv_size or kv_bits, not both.")
        return [KeptWindowCache(max_size=max_kv_size, keep=KEPT) for _ in caches], None
    if kv_bits is None:
        return caches, None
    _check_quantisable(model, kv_bits, kv_group_size)
    if quantized_kv_start is not None:
        return caches, Quantization(kv_bits, kv_group_size, quantized_kv_start)
    return [
        cache.to_quantized(group_size=kv_group_size, bits=kv_bits) if isinstance(cache, KVCache) else cache
        for cache in caches
    ], None


def _check_quantisable(model: nn.Module, bits: int, group_size: int) -> None:
    """Raise if the model cannot use quantised caches.

    A pass before quantising and one after are built but never evaluated, which takes milliseconds and no memory.
    """
    caches, token = make_prompt_cache(model), mx.zeros((1, 1), mx.int32)
    try:
        model(token, cache=caches)
        maybe_quantize_kv_cache(caches, 0, group_size, bits)
        model(token, cache=caches)
    except Exception as error:  # models and caches of mlx-lm's, each with its own
        if "[quantize]" in str(error):
            raise GenerationError(
                f"kv_group_size {group_size} does not divide the size of this target's attention heads, so that its "
                "keys and values cannot be quantised by it; use a smaller kv_group_size (32, 64, 128), or leave out "
                "kv_bits."
            ) from error
        raise GenerationError(
            f"mlx-lm cannot quantise the caches of this target, so leave out kv_bits: {one_line(error)}"
        ) from error
