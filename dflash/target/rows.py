"""Several texts in one pass: each row keeps as many of its tokens as it likes, on mlx-lm's batch caches.

mlx-lm reads prompts of different lengths as rows with padding on the right, which its caches roll out of the way
afterwards. Rejected drafts are such padding, so there is one rule a class again, made of the caches' own methods. A
recurrent state cannot be rolled: its layer runs again, and each row's state ends after the tokens that it keeps.

"Exactly" means the same as in :mod:`.rewind`: a row that leaves the batch has the arrays that it would have alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
)

from ..core.errors import IncompatibleModelsError
from .replay import Recorder
from .rewind import cache_name, members

BATCHED = (KVCache, RotatingKVCache, ArraysCache)
"""Classes that mlx-lm merges into rows, and that have a rule here."""


class RowsPass:
    """One pass of ``length`` tokens in each of ``rows`` rows over batch ``caches``; :meth:`keep` ends it.

    ``recorder`` must call the target's layers, if there is one.
    """

    def __init__(self, caches: Sequence[Any], rows: int, length: int):
        self._caches, self._rows, self._length = caches, rows, length
        replayed = {id(cache): cache for cache in caches if length > 1 and _recurrent(cache)}
        for state in (member for cache in replayed.values() for member in _recurrent(cache)):
            state.prepare(lengths=[length] * rows)  # gives the layers a mask, which the replay exchanges
        self.recorder = Recorder(length, replayed) if replayed else None
        for window in (member for cache in caches if length > 1 for member in members(cache)):
            if type(window) is BatchRotatingKVCache:
                window._temporal_order()  # its mask for several tokens takes it not to be rotated by single ones

    def keep(self, kept: Sequence[int]) -> None:
        """Keep the first ``kept[i]`` tokens of each row ``i``, at least one."""
        if self._length == 1:
            return
        if self.recorder is not None and min(kept) < self._length:
            for call in self.recorder.calls.values():
                call.replay_rows(kept)
        for member in (member for cache in self._caches for member in members(cache)):
            RULES[type(member)](member, self._length, kept)


def _roll(cache: Any, length: int, kept: Sequence[int]) -> None:
    """Drop what every row rejected, and roll the rest of what each rejected out of its way."""
    most = max(kept)
    padding = [most - count for count in kept]
    cache.trim(length - most)
    cache.prepare(lengths=[-rejected for rejected in padding], right_padding=padding)
    cache.finalize()


def _roll_all(cache: Any, length: int, kept: Sequence[int]) -> None:
    """Every row is padded on the left to the same number of entries, so a buffer that gets full is compacted first."""
    _roll(cache, length, kept)
    if cache._idx + length > cache.keys.shape[2]:
        cache.filter(list(range(len(kept))))


def _roll_window(cache: Any, length: int, kept: Sequence[int]) -> None:
    """A pass of several tokens leaves ``max_size - 1`` entries before it, so each row has a full window again."""
    rejected = length - max(kept)
    if rejected:
        cache.keys, cache.values = cache.keys[..., :-rejected, :], cache.values[..., :-rejected, :]
    _roll(cache, length, kept)


def _forget_lengths(cache: ArraysCache, length: int, kept: Sequence[int]) -> None:
    """The replay, or a pass that every row keeps, has left the right state."""
    cache.finalize()


RULES: dict[type, Callable[[Any, int, Sequence[int]], None]] = {
    BatchKVCache: _roll_all,
    BatchRotatingKVCache: _roll_window,
    ArraysCache: _forget_lengths,
}
"""Keep the first ``kept[i]`` of the ``length`` tokens of the last pass in each row ``i``, by the cache's class."""


def _recurrent(cache: Any) -> list[ArraysCache]:
    return [member for member in members(cache) if type(member) is ArraysCache]


def check_batchable(caches: Sequence[Any]) -> None:
    """Raise ``IncompatibleModelsError``, naming the layer, if one text's ``caches`` cannot become rows of a batch."""
    for layer, cache in enumerate(caches):
        if not all(type(member) in BATCHED and not getattr(member, "keep", 0) for member in members(cache)):
            raise IncompatibleModelsError(
                f"Layer {layer} keeps a {cache_name(cache)}, of which several texts cannot be decoded at once; "
                f"supported: {', '.join(kind.__name__ for kind in BATCHED)}. Decode one text after another."
            )
