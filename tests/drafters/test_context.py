"""A drafter that keeps only what its windows can see drafts what one that keeps everything drafts."""

import random

import mlx.core as mx
import numpy as np
import pytest
from support.models import random_drafter, target

from dflash.core.errors import GenerationError
from dflash.drafters import context
from dflash.drafters.context import ContextCache, LayerContext

SLIDING, FULL = "sliding_attention", "full_attention"
SPARE = 16  # in place of hundreds, so that buffers move often
VARIANTS = {
    "all slide": {"layer_types": (SLIDING, SLIDING), "sliding_window": 20},
    "one slides": {"layer_types": (SLIDING, FULL), "sliding_window": 20},
    "bidirectional": {"layer_types": (SLIDING, SLIDING), "sliding_window": 20, "is_causal": False},
    "shorter than a block": {"layer_types": (SLIDING, FULL), "sliding_window": 3},
    "no context at all": {"layer_types": (SLIDING, SLIDING), "sliding_window": 1},
}
ROUNDS = {  # tokens committed in each round, before each draft
    "one at a time": [1] * 3 * SPARE,
    "uneven blocks": [random.Random(0).randint(1, 8) for _ in range(30)],
    "prompt in chunks": [64, 64, 64, 7, 1, 1, 8, 3],
    "a prompt longer than the buffer": [5 * SPARE, 1, 8, 1],
}


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(context, "SPARE", SPARE)


def bound(**changes):
    drafter = random_drafter(3, 32, max_position_embeddings=16_384, **changes)
    drafter.bind(target("llama"))
    return drafter


def features_of(drafter, length: int) -> mx.array:
    return mx.random.normal((1, length, drafter.fc.weight.shape[1]), key=mx.random.key(length))


def extend(drafter, cache, features: mx.array) -> None:
    drafter.extend_context(features, cache, mx.zeros(features.shape[:2], mx.int32))


@pytest.mark.parametrize(
    ("variant", "rounds"),
    [
        *((variant, "uneven blocks") for variant in VARIANTS),
        *(("one slides", rounds) for rounds in ROUNDS if rounds != "uneven blocks"),
    ],
)
def test_drafts_equal_those_over_everything_under_a_mask(variant, rounds):
    """The same mask over a cache that keeps all rows, most of which it hides."""
    drafter = bound(**VARIANTS[variant])
    features = features_of(drafter, sum(ROUNDS[rounds]))
    windowed, whole = drafter.make_cache(), ContextCache([None, None])
    committed = 0
    for length in ROUNDS[rounds]:
        piece = features[:, committed : committed + length]
        committed += length
        for cache in (windowed, whole):
            extend(drafter, cache, piece)
        assert windowed.offset == whole.offset == committed
        ours, theirs = (drafter.propose(mx.array([[5]]), 7, cache) for cache in (windowed, whole))
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
        assert ours.tokens.tolist() == theirs.tokens.tolist()
    held = [layer.held for layer in windowed.layers]
    window = VARIANTS[variant]["sliding_window"]
    kinds = VARIANTS[variant]["layer_types"]
    assert held == [committed if kind == FULL else min(committed, window - 1) for kind in kinds]


def test_bytes_and_visible_rows_of_a_window_are_flat_from_1k_to_8k_and_those_of_a_full_layer_grow():
    sizes = {}
    for kind in (SLIDING, FULL):
        drafter = bound(layer_types=(kind, kind), sliding_window=100)
        cache, chunk = drafter.make_cache(), features_of(drafter, 512)
        sizes[kind] = []
        for _ in range(16):
            extend(drafter, cache, chunk)
            drafter.propose(mx.array([[5]]), 7, cache)
            mx.eval(cache.state)
            sizes[kind].append((cache.nbytes, cache.layers[0].held))
    assert len(set(sizes[SLIDING])) == 1
    row = 2 * 2 * 2 * 12 * 4  # layers, keys and values, heads, numbers, bytes
    assert sizes[SLIDING][0][0] <= (99 + 99 + SPARE) * row
    assert sizes[FULL][15][0] > 6 * sizes[FULL][1][0] > 6 * 1024 * row


def test_the_context_of_a_chunk_that_no_window_will_see_is_not_computed():
    drafter = bound(layer_types=(SLIDING, SLIDING), sliding_window=20)
    lengths = []
    project = drafter.context
    drafter.context = lambda features: lengths.append(features.shape[1]) or project(features)
    cache = drafter.make_cache()
    for length in (512, 8, 30):
        extend(drafter, cache, features_of(drafter, length))
    assert lengths == [19, 8, 19]


def test_after_skipped_tokens_the_next_ones_keep_their_positions():
    drafter = bound()
    features = features_of(drafter, 50)
    whole, partial = drafter.make_cache(), drafter.make_cache()
    extend(drafter, whole, features)
    extend(drafter, partial, features[:, :5])
    partial.skip(25)
    extend(drafter, partial, features[:, 30:])
    assert partial.offset == 50
    assert [layer.held for layer in partial.layers] == [20, 20]
    # Rows are computed from their own token's features only, so a whole cache holds the same ones.
    for ours, theirs in zip(partial.state, whole.state, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b[..., 30:, :], atol=1e-5)


def test_a_limited_drafter_drafts_as_if_the_context_began_later():
    features, window = features_of(bound(), 50), 11
    limited, later, whole = bound(), bound(), bound()
    limited.limit_context(window)
    caches = [drafter.make_cache() for drafter in (limited, later, whole)]
    caches[1].skip(50 - window)
    extend(limited, caches[0], features)
    extend(later, caches[1], features[:, 50 - window :])
    extend(whole, caches[2], features)
    ours, begun_later, unlimited = (
        drafter.propose(mx.array([[5]]), 7, cache).logits
        for drafter, cache in zip((limited, later, whole), caches, strict=True)
    )
    np.testing.assert_allclose(ours, begun_later, atol=1e-5)
    assert mx.abs(ours - unlimited).max().item() > 0.05
    for wrong in (0, 2.5, True):
        with pytest.raises(GenerationError, match="at least 1"):
            whole.limit_context(wrong)


def test_a_block_leaves_no_trace():
    layer, rows = LayerContext(4), mx.arange(24.0).reshape(1, 1, 12, 2)
    layer.append(rows[..., :4, :], rows[..., :4, :])
    for _ in range(SPARE):
        keys, _ = layer.with_block(-rows[..., :3, :], -rows[..., :3, :])
        assert keys.tolist() == mx.concatenate([rows[..., :4, :], -rows[..., :3, :]], axis=2).tolist()
    layer.append(rows[..., 4:5, :], rows[..., 4:5, :])
    assert (layer.offset, layer.held) == (5, 4)
    assert layer.state[0].tolist() == rows[..., 1:5, :].tolist()
