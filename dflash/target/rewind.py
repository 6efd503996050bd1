"""Bring a target's caches back to the committed context after a block, exactly.

There is one rule per cache class of mlx-lm. Most can drop their newest entries. A recurrent state cannot, so its layer
runs again on the accepted tokens, from the state before the block.

"Exactly" means: every array that the cache hands to its layer afterwards equals that of a cache which was never fed the
rejected tokens.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..core.errors import GenerationError, IncompatibleModelsError
from ..core.files import flat
from .caches import KeptWindowCache, Quantization, members
from .replay import Recorder
from .tree import TreePass

# --- caches that can drop their newest entries ---------------------------------------------------------


def _trim(cache: Any, rejected: int) -> None:
    """Entries past ``offset`` are never read and are overwritten by the next update."""
    cache.trim(rejected)


def _drop_concatenated(cache: ConcatenateKVCache, rejected: int) -> None:
    """``trim`` of this class moves only ``offset``; its next update would append after stale entries."""
    kept = cache.offset - rejected
    assert cache.keys is not None
    assert cache.values is not None
    cache.state = cache.keys[..., :kept, :], cache.values[..., :kept, :]


def _drop_newest(cache: RotatingKVCache, rejected: int) -> None:
    """After an update of several tokens the window is in time order, with the block at its end.

    The update kept ``max_size - 1`` entries before the block, so a full window remains. A block of one token is written
    in place, but rejects nothing.
    """
    assert cache.keys is not None
    assert cache.values is not None
    held = cache.keys.shape[2]
    if cache._idx != held and cache.is_trimmable():  # single tokens, and nothing was overwritten yet
        cache.trim(rejected)
        return
    if cache._idx != held or held - rejected < min(cache.offset - rejected, cache.max_size):
        raise RuntimeError("A RotatingKVCache can only be rewound within its last update of several tokens.")
    cache.keys, cache.values = cache.keys[..., :-rejected, :], cache.values[..., :-rejected, :]
    cache.offset -= rejected
    cache._idx -= rejected


def _trim_chunk(cache: ChunkedKVCache, rejected: int) -> None:
    """Its front moves by whole blocks and never past the block being verified; further back entries are missing."""
    kept = cache.offset - rejected
    if cache.start_position > kept // cache.chunk_size * cache.chunk_size:
        raise RuntimeError("A ChunkedKVCache can only be rewound to where its chunk is whole.")
    cache.trim(rejected)


def _each_member(cache: CacheList, rejected: int) -> None:
    """Every member by its own rule."""
    for member in cache.caches:
        RULES[type(member)](member, rejected)


RULES: dict[type, Callable[[Any, int], None]] = {
    KVCache: _trim,
    QuantizedKVCache: _trim,
    ChunkedKVCache: _trim_chunk,
    ConcatenateKVCache: _drop_concatenated,
    RotatingKVCache: _drop_newest,
    KeptWindowCache: _drop_newest,
    CacheList: _each_member,
}
"""Drop a cache's newest tokens, by its class. A subclass may update differently, so it needs a rule of its own."""

KNOWN = (ArraysCache, *RULES)
"""Classes that can be rewound: what :mod:`.replay` restores, and what has a rule."""

# --- caches that can keep any tokens of the last pass ----------------------------------------------


def _move(cache: Any, begun: int, rows: mx.array) -> None:
    """Move the entries of ``rows`` to the front of the pass that began at ``begun``.

    A cache may be quantised: each token is by itself, so its numbers and their scales move together.
    """
    end = begun + rows.size
    for array in flat([cache.keys, cache.values]).values():
        array[..., begun:end, :] = array[..., begun + rows, :]


MOVES: dict[type, Callable[[Any, int, mx.array], None]] = {KVCache: _move, QuantizedKVCache: _move}
"""Move chosen tokens of the last pass to its front, by the cache's class."""

# --- a target's caches ---------------------------------------------------------------------------------


class TargetCache(list[Any]):
    """A target's caches, one per layer as mlx-lm makes them, that can be rewound.

    ``quantization`` says when to quantise them; ``length`` is the number of tokens that they hold already. Raises
    ``IncompatibleModelsError`` if one of them cannot be rewound.
    """

    def __init__(self, caches: Iterable[Any], quantization: Quantization | None = None, length: int = 0):
        super().__init__(caches)
        check_rewindable(self)
        self.quantization = quantization
        self._replayed = {id(cache): cache for cache in self if _needs_replay(cache)}
        self._recorder: Recorder | None = None
        self._fed = length
        self._begun = length  # tokens before the last pass

    @property
    def offset(self) -> int:
        """Tokens held."""
        return next((offset for c in self if (offset := _offset(c)) is not None), self._fed)

    @property
    def longest_pass(self) -> int:
        """Most tokens that the next pass may have, if it must equal single steps of mlx-lm."""
        return sys.maxsize if self.quantization is None else self.quantization.longest_pass(self.offset)

    @property
    def ends_prompts_alone(self) -> bool:
        """Whether a prompt's last token needs its own pass, as in mlx-lm, because its caches or mask differ."""
        return self.quantization is not None or any(type(cache) is KeptWindowCache for cache in self)

    def set_in_prompt(self, in_prompt: bool) -> None:
        """Say whether the next passes are those of a prompt, for which mlx-lm masks bounded caches differently."""
        for cache in self:
            if type(cache) is KeptWindowCache:
                cache.in_prompt = in_prompt

    def expect(self, length: int, rewindable: bool = True) -> Recorder | None:
        """Announce a pass of ``length`` tokens; returns the recorder that must call its layers, if one is needed.

        A pass that will not be rewound (a prompt) records nothing, which saves memory.
        """
        if self.quantization is not None:  # nothing before this pass can be rewound any more
            self.quantization.apply(self, self.offset)
        self._begun = self.offset
        self._fed = self._begun + length
        record = rewindable and length > 1 and self._replayed
        self._recorder = Recorder(length, self._replayed) if record else None
        return self._recorder

    def expect_tree(self, parents: Sequence[int]) -> TreePass:
        """Announce a pass over the anchor and a tree of drafts; returns what must call its layers.

        Raises ``IncompatibleModelsError``, naming the layer, if a cache cannot hold a tree.
        """
        check_trees(self)
        self.expect(len(parents) + 1)
        return TreePass(parents, self._begun)

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens; only tokens of the last pass can be removed, in one step or several.

        Raises ``GenerationError`` if fewer tokens are held, or if the pass was not recorded or is too short.
        """
        rejected = self.offset - length
        if length < 0 or rejected < 0:
            raise GenerationError(f"Cannot rewind to {length} tokens: the cache holds {self.offset}.")
        if rejected == 0:
            return
        calls = {} if self._recorder is None else self._recorder.calls
        kept = 0 if self._recorder is None else length - self._begun
        missing = next((i for i, c in enumerate(self) if id(c) in self._replayed and id(c) not in calls), None)
        if missing is not None or kept < 0:
            raise GenerationError(
                f"Cannot forget {rejected} tokens: layer {missing or 0} keeps a {type(self[missing or 0]).__name__}, "
                "which can only be rewound within the last pass of forward_with_hidden_states."
            )
        self._fed = length
        for cache in self:
            if id(cache) in calls:
                calls[id(cache)].replay(kept)
            else:
                RULES[type(cache)](cache, rejected)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these ``rows`` of the last pass, in this order; a pass has one row per token.

        Raises ``GenerationError`` as :meth:`rewind` does.
        """
        if list(rows) != list(range(len(rows))):
            for cache in self:
                MOVES[type(cache)](cache, self._begun, mx.array(list(rows)))
        self.rewind(self._begun + len(rows))


def _needs_replay(cache: Any) -> bool:
    return any(type(member) is ArraysCache for member in members(cache))


def _offset(cache: Any) -> int | None:
    return next((c.offset for c in members(cache) if hasattr(c, "offset")), None)


def _rule(cache: Any) -> str | None:
    if not all(type(member) in KNOWN for member in members(cache)):
        return None
    return "replay" if _needs_replay(cache) else RULES[type(cache)].__name__.lstrip("_")


def cache_name(cache: Any) -> str:
    """Class name of a cache, with its members' names if it is a list of caches."""
    if isinstance(cache, CacheList):
        return f"CacheList({', '.join(type(c).__name__ for c in cache.caches)})"
    return type(cache).__name__


def describe(caches: Sequence[Any]) -> list[tuple[str, str | None]]:
    """Class name of each layer's cache, and the name of its rewind rule, ``None`` if there is none."""
    return [(cache_name(cache), _rule(cache)) for cache in caches]


def require(caches: Sequence[Any], fits: Callable[[Any], Any], otherwise: str) -> None:
    """Raise ``IncompatibleModelsError``, naming the layer and saying what is ``otherwise``, if a cache does not fit."""
    for layer, cache in enumerate(caches):
        if not fits(cache):
            raise IncompatibleModelsError(f"Layer {layer} keeps a {cache_name(cache)}, {otherwise}.")


def check_trees(caches: Sequence[Any]) -> None:
    """Raise ``IncompatibleModelsError``, naming the layer, if a cache cannot hold a tree."""
    known = " or ".join(kind.__name__ for kind in MOVES)
    otherwise = f"of which no path of a tree of drafts can be kept; trees need {known} in every layer; leave out tree"
    require(caches, lambda cache: type(cache) in MOVES, otherwise)


def check_rewindable(caches: Sequence[Any]) -> None:
    """Raise ``IncompatibleModelsError``, naming the layer, if a cache has no exact rewind."""
    known = ", ".join(sorted(kind.__name__ for kind in KNOWN))
    require(caches, _rule, f"for which no exact rewind is known; supported: {known}")
