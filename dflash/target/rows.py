"""Several texts in one pass: each row keeps as many of its tokens as it likes.

mlx-lm reads prompts of different lengths as rows with padding on the right. Rejected drafts are such padding. Keys and
values lie at a place of each row's own (:mod:`.ring`), so both are only counted back. A recurrent state cannot be: its
layer runs again, and each row's state ends after the tokens that it keeps.

"Exactly" means the same as in :mod:`.rewind`: a row that leaves the batch has the arrays that it would have alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from .replay import Recorder
from .rewind import members, require
from .ring import RowsCache

BATCHED = (KVCache, RotatingKVCache, ArraysCache)
"""Classes that can become rows."""


def as_rows(caches: Iterable[Any]) -> list[Any]:
    """One text's ``caches`` as those of a batch of one row, which mlx-lm merges with others."""
    return [
        CacheList(*as_rows(cache.caches)) if isinstance(cache, CacheList)
        else RowsCache.of(cache) if type(cache) in (KVCache, RotatingKVCache)
        else cache
        for cache in caches
    ]  # fmt: skip


class RowsPass:
    """One pass of ``length`` tokens in each of ``rows`` rows over batch ``caches``; :meth:`keep` ends it.

    ``recorder`` must call the target's layers, if there is one.
    """

    def __init__(self, caches: Sequence[Any], rows: int, length: int):
        self._caches, self._length = caches, length
        replayed = {id(cache): cache for cache in caches if length > 1 and _recurrent(cache)}
        for state in (member for cache in replayed.values() for member in _recurrent(cache)):
            state.prepare(lengths=[length] * rows)  # gives the layers a mask, which the replay exchanges
        self.recorder = Recorder(length, replayed) if replayed else None

    def keep(self, kept: Sequence[int]) -> None:
        """Keep the first ``kept[i]`` tokens of each row ``i``, at least one."""
        if self.recorder is not None and min(kept) < self._length:
            for call in self.recorder.calls.values():
                call.replay_rows(kept)
        for member in (member for cache in self._caches for member in members(cache)):
            if isinstance(member, RowsCache):
                member.advance([count - self._length for count in kept])
            else:
                member.finalize()  # the replay, or a pass that every row keeps, has left the right state


def _recurrent(cache: Any) -> list[ArraysCache]:
    return [member for member in members(cache) if type(member) is ArraysCache]


def check_batchable(caches: Sequence[Any]) -> None:
    """Raise ``IncompatibleModelsError``, naming the layer, if one text's ``caches`` cannot become rows of a batch."""
    known = ", ".join(kind.__name__ for kind in BATCHED)
    require(
        caches,
        lambda cache: all(type(m) in BATCHED and not getattr(m, "keep", 0) for m in members(cache)),
        f"of which several texts cannot be decoded at once; supported: {known}. Decode one text after another",
    )
