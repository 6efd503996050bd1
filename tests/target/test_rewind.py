"""After any blocks and rewinds a cache hands to attention what one fed the committed tokens only does."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from support.models import target

from dflash.core.errors import DFlashError, GenerationError, IncompatibleModelsError
from dflash.target import rewind
from dflash.target.caches import KeptWindowCache

SIZE = 32  # one group of quantized entries
LONGEST = 400  # tokens in a test; past the 256 by which caches grow

KINDS = {
    "KVCache": KVCache,
    "ConcatenateKVCache": ConcatenateKVCache,
    "QuantizedKVCache": partial(QuantizedKVCache, group_size=SIZE, bits=8),
    "RotatingKVCache(4)": partial(RotatingKVCache, max_size=4),
    "RotatingKVCache(7)": partial(RotatingKVCache, max_size=7),
    "RotatingKVCache(64)": partial(RotatingKVCache, max_size=64),
    "RotatingKVCache(300)": partial(RotatingKVCache, max_size=300),
    "RotatingKVCache(8, keep=2)": partial(RotatingKVCache, max_size=8, keep=2),
    "KeptWindowCache(8, keep=2)": partial(KeptWindowCache, max_size=8, keep=2),
}


def entries(positions: range, salt: int) -> tuple[mx.array, mx.array]:
    """Keys and values ``[1, 1, L, SIZE]`` of tokens; ``salt`` tells a rejected token from the true one.

    The first number of a key is its position, so that what a rotated cache holds can be put in order.
    """
    index = np.array(positions, np.float32)[:, None]
    noise = np.sin(index * 12.9898 + np.arange(SIZE)[None] * 78.233 + salt)
    keys = np.concatenate([index, noise[:, 1:]], axis=1)
    return mx.array(keys)[None, None], mx.array(noise + 0.5)[None, None]


def append(cache, positions: range, salt: int = 0):
    return cache.update_and_fetch(*entries(positions, salt))


def handed_to_attention(cache, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values that are visible to each of the next ``count`` queries, in the order of their positions."""
    start = cache.offset
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    mask = cache.make_mask(count, window_size=window, return_array=count > 1)
    keys, values = append(cache, range(start, start + count))
    if isinstance(cache, QuantizedKVCache):
        keys, values = (mx.dequantize(*x, group_size=SIZE, bits=8) for x in (keys, values))
    keys, values = np.array(keys[0, 0]), np.array(values[0, 0])
    visible = np.ones((count, len(keys)), bool) if mask is None else np.array(mask)
    assert visible.shape == (count, len(keys)), "the mask does not fit the keys"
    order = [np.flatnonzero(row)[np.argsort(keys[row, 0], kind="stable")] for row in visible]
    return [(keys[rows], values[rows]) for rows in order]


def play(make, prompt: int, blocks: list[tuple[int, int]]):
    """A cache that was fed a prompt and then blocks of ``m`` tokens, of which it lost the last ``r``."""
    cache = make()
    append(cache, range(prompt))
    for salt, (block, rejected) in enumerate(blocks, start=1):
        kept = cache.offset + block - rejected
        true, wrong = entries(range(cache.offset, kept), 0), entries(range(kept, kept + rejected), salt)
        cache.update_and_fetch(*(mx.concatenate([t, w], axis=2) for t, w in zip(true, wrong, strict=True)))
        caches = rewind.TargetCache([cache])
        caches.rewind(caches.offset - rejected)
        assert cache.offset == kept
    return cache


def committed_only(make, length: int, piece: int):
    """A cache that was fed ``length`` tokens, ``piece`` at a time."""
    cache = make()
    for start in range(0, length, piece):
        append(cache, range(start, min(start + piece, length)))
    return cache


def assert_same_attention(ours, theirs, count: int) -> None:
    for mine, fresh in zip(handed_to_attention(ours, count), handed_to_attention(theirs, count), strict=True):
        for part, expected in zip(mine, fresh, strict=True):
            np.testing.assert_array_equal(part, expected)


BLOCKS = st.lists(
    st.integers(1, 9).flatmap(lambda m: st.tuples(st.just(m), st.integers(0, m - 1))), min_size=1, max_size=12
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(prompt=st.integers(1, 20), blocks=BLOCKS, count=st.integers(1, 5), piece=st.sampled_from([1, 3, LONGEST]))
@example(prompt=1, blocks=[(6, 5)], count=1, piece=1)  # before a window of 7 or 8 is full
@example(prompt=2, blocks=[(6, 1)], count=1, piece=1)  # fills a window of 7 exactly
@example(prompt=7, blocks=[(2, 1)], count=1, piece=1)  # the block wraps, the rewind unwraps
@example(prompt=12, blocks=[(9, 8), (9, 8)], count=3, piece=1)  # long after the wrap
@example(prompt=4, blocks=[(1, 0)] * 6 + [(5, 4)], count=1, piece=1)  # rotated in place, then a block
@example(prompt=253, blocks=[(9, 8), (9, 2), (4, 3), (9, 0), (9, 8)], count=4, piece=LONGEST)  # as caches grow
@example(prompt=253, blocks=[(9, 8), (9, 2), (4, 3), (9, 0), (9, 8)], count=1, piece=LONGEST)
def test_after_rewinds_attention_is_handed_the_committed_tokens_only(kind, prompt, blocks, count, piece):
    rewound = play(KINDS[kind], prompt, blocks)
    fresh = committed_only(KINDS[kind], rewound.offset, piece)
    assert rewound.offset == fresh.offset == prompt + sum(m - r for m, r in blocks)
    assert_same_attention(rewound, fresh, count)


def test_a_sliding_window_never_hands_out_less_than_the_window():
    """What the comparison above compares with: the window's worth of tokens, the newest ones."""
    cache = play(KINDS["RotatingKVCache(7)"], 12, [(5, 4), (5, 1)])
    (keys, _), *_ = handed_to_attention(cache, 1)
    assert keys[:, 0].tolist() == list(range(11, 18))


def test_every_kind_that_is_rewound_is_tested_and_described_with_its_rule():
    here = {name.partition("(")[0] for name in KINDS}
    in_models = {"CacheList", "ChunkedKVCache"}  # test_conformance.py: deepseek_v32, llama4
    assert here | in_models == {kind.__name__ for kind in rewind.RULES}
    described = rewind.describe([KVCache(), RotatingKVCache(4), ArraysCache(2)])
    assert described == [("KVCache", "trim"), ("RotatingKVCache", "drop_newest"), ("ArraysCache", "replay")]


class Odd(KVCache):
    """A subclass may update differently, so its parent's rule is not its own."""


@pytest.mark.parametrize("other", [Odd(), CacheList(KVCache(), Odd()), CacheList(ArraysCache(1), Odd()), object()])
def test_a_cache_without_exact_rewind_is_refused_by_layer_and_class(other):
    with pytest.raises(IncompatibleModelsError, match=rf"Layer 2 keeps a {type(other).__name__}\b") as error:
        rewind.check_rewindable([KVCache(), KVCache(), other])
    assert "\n" not in str(error.value)
    rewind.check_rewindable([KVCache(), RotatingKVCache(4)])


@pytest.mark.parametrize("length", [-1, 6, 100])
def test_rewinding_beyond_what_the_cache_holds_is_an_error(length):
    cache = [KVCache(), KVCache()]
    for layer in cache:
        append(layer, range(5))
    with pytest.raises(GenerationError, match=rf"{length} tokens: the cache holds 5"):
        target("qwen3").rewind_kv_caches(cache, length)
    assert [layer.offset for layer in cache] == [5, 5], "a refused rewind changes nothing"
    target("qwen3").rewind_kv_caches(cache, 5)
    target("qwen3").rewind_kv_caches(cache, 2)
    assert [layer.offset for layer in cache] == [2, 2]


@pytest.mark.parametrize(
    ("kind", "updates", "rejected"),
    [
        *((kind, [20, 3], n) for kind in ("RotatingKVCache(7)", "RotatingKVCache(8, keep=2)") for n in (3, 4, 5)),
        ("RotatingKVCache(7)", [1] * 9, 1),  # written in place
    ],
)
def test_a_window_is_not_rewound_to_before_its_last_update(kind, updates, rejected):
    """What was there is overwritten: the window would silently be too short."""
    cache = KINDS[kind]()
    for count in updates:
        append(cache, range(cache.offset, cache.offset + count))
    caches = rewind.TargetCache([cache])
    with pytest.raises((DFlashError, RuntimeError), match="last update"):
        caches.rewind(caches.offset - rejected)


@pytest.mark.parametrize("count", [1, 4])
def test_a_window_that_has_dropped_nothing_goes_back_any_way(count):
    """Over many updates, also of single tokens, which are written in place."""
    cache = RotatingKVCache(64)
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 20), (20, 21)):
        append(cache, range(start, stop), salt=int(start > 8))
    rewind.TargetCache([cache]).rewind(9)
    append(cache, range(9, 10))
    rewind.TargetCache([cache]).rewind(7)
    fresh = committed_only(partial(RotatingKVCache, 64), 7, 7)
    assert_same_attention(cache, fresh, count)


def test_a_chunked_cache_goes_back_to_where_its_chunk_is_whole():
    cache = ChunkedKVCache(8)
    append(cache, range(21))
    cache.maybe_trim_front()  # the first 13 tokens are gone; those of the chunk 8 to 15 are not whole any more
    append(cache, range(21, 24))
    caches = rewind.TargetCache([cache])
    caches.rewind(16)
    assert cache.offset == 16
    with pytest.raises(RuntimeError, match="where its chunk is whole"):
        caches.rewind(15)
