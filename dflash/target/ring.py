"""Keys and values of several texts, in a ring of slots each, so that what a text rejects moves nothing.

Token ``p`` of a text lies in slot ``p % R``. The rings of full attention grow before one of them is full. Those of a
window have room for it and for a pass, so that a pass overwrites nothing that its own tokens see, nor what they see
again once some of them are rejected. Rejecting tokens is counting back.

Shapes: B texts, K key-value heads, S tokens, R slots, L tokens of a pass, D head size.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

STEP, WINDOW_STEP = 256, 64  # slots by which rings grow: copied seldom, or read in every pass


class Ragged:
    """How many of the next tokens belong to each text: all, or while prompts are read what is left of its own."""

    _left: list[int] | None = None

    def prepare(self, lengths: Sequence[int] | None = None, **_: Any) -> None:
        """Prompts of these ``lengths`` come next, padded on the right; called by mlx-lm."""
        self._left = None if lengths is None else list(lengths)

    def finalize(self) -> None:
        """The prompts have been read."""
        self._left = None

    def counts(self, texts: int, length: int) -> list[int]:
        """How many of the next ``length`` tokens are each text's."""
        if self._left is None:
            return [length] * texts
        counts = [min(left, length) for left in self._left]
        self._left = [left - count for left, count in zip(self._left, counts, strict=True)]
        return counts


class Ring(Ragged):
    """The tokens' keys and values, with the methods of mlx-lm's batch caches; made of one text, and merged.

    Args:
        limit: How many of the newest tokens are kept, ``None`` for all.
        offset: Tokens of the text.
        keys: Of its newest tokens, oldest first, ``[1, K, S, D]``; ``None`` if it has none.
        values: Likewise.
    """

    def __init__(self, limit: int | None, offset: int, keys: mx.array | None, values: mx.array | None):
        oldest = offset if keys is None else offset - keys.shape[2]
        self.limit = limit
        self.offsets: tuple[int, ...] = (offset,)
        self._oldest: tuple[int, ...] = (oldest,)
        self.keys, self.values = keys, values
        if keys is not None and values is not None and oldest:
            self.keys, self.values = mx.roll(keys, oldest, 2), mx.roll(values, oldest, 2)
        self._written = 0  # slots, from the first

    @property
    def offset(self) -> mx.array:
        """Tokens of each text, kept or not, ``[B]``."""
        return mx.array(self.offsets)

    @property
    def state(self) -> list[mx.array]:
        """The rings, for ``mx.eval``."""
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        """Bytes of the rings."""
        return sum(ring.nbytes for ring in self.state)

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the first ``counts[i]`` of the tokens written for each text ``i``; negative numbers take back."""
        self.offsets = tuple(offset + count for offset, count in zip(self.offsets, counts, strict=True))

    def oldest(self) -> tuple[int, ...]:
        """The oldest token kept of each text."""
        if (limit := self.limit) is None:
            return self._oldest
        return tuple(max(oldest, offset - limit) for oldest, offset in zip(self._oldest, self.offsets, strict=True))

    def write(self, keys_BKLD: mx.array, values_BKLD: mx.array) -> tuple[mx.array, mx.array]:
        """Write the next tokens, without committing them, and return the slots that :meth:`positions` tells of."""
        length = keys_BKLD.shape[2]
        slots = self._slots(length)
        keys, values = self._resized(slots, keys_BKLD, values_BKLD)
        next_B1L1 = _next_slots(self.offsets, length, slots)
        self.keys = mx.put_along_axis(keys, next_B1L1, keys_BKLD, axis=2)
        self.values = mx.put_along_axis(values, next_B1L1, values_BKLD, axis=2)
        self._written = self._used(length, slots)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last :meth:`write` returned: layers that share their entries ask for them again."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, : self._written], self.values[:, :, : self._written]

    def positions(self, length: int) -> tuple[mx.array, mx.array]:
        """Positions of what :meth:`write` of ``length`` tokens returns, and of these tokens, for masks.

        ``[B, 1, 1, R]``, where what is older than :meth:`oldest` is not there, and ``[B, 1, L, 1]``.
        """
        slots = self._slots(length)
        held_BR = self._held(slots, length)[:, : self._used(length, slots)]
        return mx.array(held_BR)[:, None, None], self.offset[:, None, None, None] + mx.arange(length)[:, None]

    def entries(self, row: int) -> tuple[mx.array, mx.array] | None:
        """Keys and values kept of a text, oldest first, each ``[1, K, S, D]``; ``None`` if there are none."""
        kept = np.arange(self.oldest()[row], self.offsets[row], dtype=np.int32)
        if self.keys is None or self.values is None or not kept.size:
            return None
        slots = mx.array(kept % self.keys.shape[2])
        return mx.take(self.keys[row : row + 1], slots, axis=2), mx.take(self.values[row : row + 1], slots, axis=2)

    @staticmethod
    def merge(rings: "Sequence[Ring]") -> "Ring":
        """The texts of several batches; called by mlx-lm."""
        merged, *others = rings
        for other in others:
            merged.extend(other)
        return merged

    def extend(self, other: "Ring") -> None:
        """Take in the texts of another batch."""
        if like := self.state or other.state:
            slots = max(ring.shape[2] for ring in (*self.state, *other.state))
            both = zip(self._resized(slots, *like), other._resized(slots, *like), strict=True)
            self.keys, self.values = (mx.concatenate(list(rings)) for rings in both)
        self.offsets, self._oldest = self.offsets + other.offsets, self._oldest + other._oldest

    def filter(self, rows: Sequence[int]) -> None:
        """Keep these texts, and of the rings what they need."""
        self.offsets, self._oldest = (tuple(of[row] for row in rows) for of in (self.offsets, self._oldest))
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (ring[mx.array(list(rows))] for ring in self.state)
            self.keys, self.values = self._resized(self._slots(0), self.keys, self.values)

    def _slots(self, length: int) -> int:
        """How many slots a ring has in the next pass of ``length`` tokens: as now, unless these are too few or many.

        It depends on lengths only, so that a mask made for one layer fits others.
        """
        most = max(self.offsets, default=0)
        now = 0 if self.keys is None else self.keys.shape[2]
        needed, step = most + length, STEP
        if self.limit is not None:
            needed, step = min(needed, self.limit + length), WINDOW_STEP
        return now if needed <= now < needed + 2 * step else -(-max(needed, 1) // step) * step

    def _used(self, length: int, slots: int) -> int:
        """The first slots, after which none has been written."""
        return min(max(self.offsets, default=0) + length, slots)

    def _held(self, slots: int, length: int = 0) -> np.ndarray:
        """The position of what each slot of rings of ``slots`` holds after the next ``length`` tokens, ``[B, R]``."""
        newest = np.array(self.offsets, np.int32)[:, None] + (length - 1)
        return newest - (newest - np.arange(slots, dtype=np.int32)) % slots

    def _resized(self, slots: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The rings with ``slots``; where there are none, ``keys`` and ``values`` show heads, sizes and types."""
        return self._moved(self.keys, slots, keys), self._moved(self.values, slots, values)

    def _moved(self, ring: mx.array | None, slots: int, like: mx.array) -> mx.array:
        if ring is None:
            return mx.zeros((len(self.offsets), like.shape[1], slots, like.shape[3]), like.dtype)
        now = ring.shape[2]
        if now == slots:
            return ring
        if max(self.offsets, default=0) <= min(now, slots):  # no text has come around
            return mx.pad(ring[:, :, :slots], [(0, 0), (0, 0), (0, max(slots - now, 0)), (0, 0)])
        return mx.take_along_axis(ring, mx.array(self._held(slots) % now)[:, None, :, None], axis=2)


@lru_cache(maxsize=16)
def _next_slots(offsets: tuple[int, ...], length: int, slots: int) -> mx.array:
    """Where the next ``length`` tokens go, ``[B, 1, L, 1]``; made once for all layers of a pass."""
    return mx.array((np.array(offsets, np.int32)[:, None, None, None] + np.arange(length)[:, None]) % slots, mx.int32)


class RowsCache(Ring):
    """The keys and values of an attention layer for several texts, in the place of mlx-lm's batch caches."""

    @staticmethod
    def of(cache: KVCache | RotatingKVCache) -> "RowsCache":
        """One text's, of which a window keeps no first tokens."""
        limit = cache.max_size if isinstance(cache, RotatingKVCache) else None
        if cache.keys is None or not cache.offset:
            return RowsCache(limit, 0, None, None)
        if isinstance(cache, RotatingKVCache):
            return RowsCache(limit, cache.offset, *map(cache._temporal_order, (cache.keys, cache.values)))
        return RowsCache(limit, cache.offset, *cache.keys_and_values())

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in the next tokens; those of each row that :meth:`counts` says are committed."""
        read = self.write(keys, values)
        self.advance(self.counts(*keys.shape[::2]))
        return read

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """The mask ``[B, 1, N, R]`` of the next ``N`` tokens over what :meth:`update_and_fetch` will return."""
        held, queries = self.positions(N)
        window = window_size or self.limit
        visible = (held >= mx.array(self._oldest)[:, None, None, None]) & (held <= queries)
        if self.limit is not None:  # some models ask for more than mlx-lm's window holds before a pass
            visible = visible & (held > queries[:, :, :1] - self.limit)
        return visible if window is None else visible & (held > queries - window)

    def extract(self, row: int) -> KVCache | RotatingKVCache:
        """The cache of one text, as it is alone."""
        cache = KVCache() if self.limit is None else RotatingKVCache(self.limit)
        if entries := self.entries(row):
            held = () if self.limit is None else (0, self.limit, entries[0].shape[2])
            cache.state = (*entries, self.offsets[row], *held)
        return cache
