"""Rows that keep different numbers of a pass's tokens are what their texts are alone; what cannot be is refused."""

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache
from support.rows import ROW_TARGETS, row_target

from dflash import LoadedTargetModel
from dflash.adapters.conformance import small_models as small
from dflash.core.errors import IncompatibleModelsError
from dflash.target.ring import RowsCache
from dflash.target.rows import RowsPass, as_rows, check_batchable
from dflash.target.trial import BLOCK, Trial, rows_equal_texts

TEXTS = (3, 11, 7)
OTHERS = ("gemma3n", "plamo3")  # layers that read the entries of earlier ones; a mask wider than its window


def rounds(count: int) -> list[tuple[int, list[int]]]:
    """Tokens of random passes, and how many of them each text keeps."""
    chance = random.Random(0)
    blocks = [chance.randint(2, BLOCK) for _ in range(count)]
    return [(block, [chance.randint(1, block) for _ in TEXTS]) for block in blocks]


@pytest.mark.parametrize("name", [*ROW_TARGETS, *OTHERS])
def test_rows_equal_their_texts_and_leave_as_these(name):
    target = row_target(name) if name in ROW_TARGETS else LoadedTargetModel(small.build(name))
    rows_equal_texts(Trial(target), TEXTS, [*rounds(4), (1, [1, 1, 1]), *rounds(1)])


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_what_rows_reject_moves_no_keys_and_no_values(name):
    target = row_target(name)
    rows = [layer[0].merge(list(layer)) for layer in zip(*(as_rows(target.make_cache()) for _ in "ab"), strict=True)]
    for kept in ([3, 1], [8, 2], [1, 1]) * 4:  # past the window
        _, _, rows_pass = target.forward_rows(mx.ones((2, 8), mx.int32), rows, ())
        before = [cache.state for cache in rows]
        rows_pass.keep(kept)
        assert all(
            a is b for cache, old in zip(rows, before, strict=True) for a, b in zip(cache.state, old, strict=True)
        )
    assert rows[0].offset.tolist() == [48, 16]


@pytest.mark.parametrize("name", ["full", "sliding", "gated delta net"])
def test_a_row_that_keeps_too_much_is_noticed(name, monkeypatch):
    keep = RowsPass.keep
    monkeypatch.setattr(RowsPass, "keep", lambda rows_pass, kept: keep(rows_pass, [max(kept)] * len(kept)))
    with pytest.raises(AssertionError, match="row"):
        rows_equal_texts(Trial(row_target(name)))


def test_a_single_token_that_sees_what_was_rejected_is_noticed(monkeypatch):
    make_mask = RowsCache.make_mask
    monkeypatch.setattr(RowsCache, "make_mask", lambda cache, N, *of, **how: make_mask(cache, N, *of, **how) | (N == 1))
    with pytest.raises(AssertionError, match=r"row 0 \(round 1"):
        rows_equal_texts(Trial(row_target("full")))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("llama4", "Layer 0 keeps a ChunkedKVCache, of which several texts cannot be decoded at once"),
        ("recurrent_gemma", "something else for several texts at once than for each alone.*layer 0 ArraysCache"),
    ],
)
def test_what_has_no_rule_or_heeds_no_padding_is_refused(model_type, message):
    target = LoadedTargetModel(small.build(model_type))
    for _ in range(2):  # the second time without the passes
        with pytest.raises(IncompatibleModelsError, match=message):
            target.check_batchable()


def test_a_window_that_keeps_its_first_tokens_is_refused():
    with pytest.raises(IncompatibleModelsError, match="Layer 1 keeps a RotatingKVCache, of which several texts"):
        check_batchable([RotatingKVCache(8), RotatingKVCache(8, keep=4)])
