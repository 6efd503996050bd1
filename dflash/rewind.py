"""Bring a target's caches back to the committed context after a block, exactly.

Knows mlx-lm's cache classes, one rule each. Must not know models, drafters or why tokens were rejected.

"Exactly" means: every array that the cache hands to attention afterwards equals that of a cache which
never saw the rejected tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from .errors import IncompatibleModelsError


def _trim(cache: Any, rejected: int) -> None:
    """Entries past ``offset`` are never read and are overwritten by the next update."""
    cache.trim(rejected)


def _drop_concatenated(cache: ConcatenateKVCache, rejected: int) -> None:
    """``trim`` of this class moves only ``offset``; its next update would append behind stale entries."""
    kept = cache.offset - rejected
    assert cache.keys is not None
    assert cache.values is not None
    cache.state = cache.keys[..., :kept, :], cache.values[..., :kept, :]


def _drop_newest(cache: RotatingKVCache, rejected: int) -> None:
    """After an update of several tokens the window lies in time order with the block at its end.

    The update kept ``max_size - 1`` entries before the block, so a full window remains. A block of one
    token is written in place, but rejects nothing.
    """
    assert cache.keys is not None
    assert cache.values is not None
    held = cache.keys.shape[2]
    if cache._idx != held or held - rejected < min(cache.offset - rejected, cache.max_size):
        raise RuntimeError("A RotatingKVCache can only be rewound within its last update of several tokens.")
    cache.keys, cache.values = cache.keys[..., :-rejected, :], cache.values[..., :-rejected, :]
    cache.offset -= rejected
    cache._idx -= rejected


_RULES: dict[type, Callable[[Any, int], None]] = {
    KVCache: _trim,
    QuantizedKVCache: _trim,
    ConcatenateKVCache: _drop_concatenated,
    RotatingKVCache: _drop_newest,
}


def describe(caches: Sequence[Any]) -> list[tuple[str, str | None]]:
    """Class name of each layer's cache with the name of its rewind rule, ``None`` where there is none."""
    rules = [_RULES.get(type(cache)) for cache in caches]
    return [(type(c).__name__, r and r.__name__.lstrip("_")) for c, r in zip(caches, rules, strict=True)]


def check_rewindable(caches: Sequence[Any]) -> None:
    """Raise :class:`~dflash.errors.IncompatibleModelsError`, naming the layer, if a cache has no exact rewind."""
    for layer, cache in enumerate(caches):
        if type(cache) not in _RULES:
            raise IncompatibleModelsError(
                f"Layer {layer} keeps a {type(cache).__name__}, for which no exact rewind is known; "
                f"supported: {', '.join(sorted(c.__name__ for c in _RULES))}."
            )


def rewind(caches: Sequence[Any], rejected: int) -> None:
    """Forget the last ``rejected`` tokens of the last update, in every layer's cache."""
    if rejected == 0:
        return
    for cache in caches:
        _RULES[type(cache)](cache, rejected)
