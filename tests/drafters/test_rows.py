"""Drafts for several texts in one pass are those of each text alone, and so is each text's context."""

import random

import mlx.core as mx
import pytest
from support.kinds import KINDS, VOCAB
from support.kinds import random_drafter as drafter_of_kind
from support.models import ScriptedDrafter, qwen3_model, random_drafter

from dflash import DFlashDraftModel, LoadedTargetModel
from dflash.drafters.context import LayerContext
from dflash.drafters.ngram import NgramDrafter
from dflash.drafters.rows import NO_DRAFT, TextByText, for_batches

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}


def limited():
    drafter = random_drafter(5, VOCAB)
    drafter.limit_context(9)
    return drafter


DRAFTERS = {
    **{kind: lambda kind=kind: drafter_of_kind(kind, 3) for kind in KINDS},
    "sliding": lambda: random_drafter(1, VOCAB, **SLIDING),
    "causal": lambda: random_drafter(2, VOCAB, **SLIDING, is_causal=True),
    "elastic": lambda: random_drafter(4, VOCAB, elastic_blocks=True),
    "limited": limited,
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_random_life_of_a_batch(name):
    drafter, chance = DRAFTERS[name](), random.Random(0)
    drafter.bind(LoadedTargetModel(qwen3_model(1, VOCAB)))
    features = len(drafter.target_layer_ids) * drafter.config.hidden_size
    texts = [drafter.make_cache() for _ in range(3)]
    rows = [layer[0].merge(list(layer)) for layer in zip(*(drafter.make_layers() for _ in texts), strict=True)]
    for round_ in range(12):
        length = chance.choice([1, 2, 7, 8, 40, 300] if round_ % 4 == 0 else [1, 3, 8])
        counts = [chance.randint(0, length) for _ in texts]
        new = mx.random.normal((len(texts), length, features), key=mx.random.key(round_))
        tokens = mx.zeros((len(texts), length), mx.int32)
        if round_ == 0:  # as mlx-lm reads prompts
            for layer in rows:
                layer.prepare(lengths=counts, right_padding=[length - count for count in counts])
            drafter.extend_rows(new[:, :5], rows, tokens[:, :5])
            drafter.extend_rows(new[:, 5:], rows, tokens[:, 5:])
            for layer in rows:
                layer.finalize()
        else:
            drafter.extend_rows(new, rows, tokens, counts)
        for i, (cache, count) in enumerate(zip(texts, counts, strict=True)):
            if count:
                drafter.extend_context(new[i : i + 1, :count], cache, tokens[i : i + 1, :count])
        anchors, drafts = mx.array([chance.randrange(VOCAB) for _ in texts]), chance.randint(2, drafter.block_size - 1)
        ours = drafter.propose_rows(anchors, drafts, rows)
        for i, cache in enumerate(texts):
            alone = drafter.propose(anchors[i].reshape(1, 1), drafts, cache)
            assert ours.tokens[i].tolist() == alone.tokens[0].tolist()
            assert mx.allclose(ours.logits[i], alone.logits[0], rtol=1e-3, atol=1e-3).item()
            for layer, single in zip(rows, cache.layers, strict=True):
                left = layer.extract(i)
                assert (left.offset, left.held) == (single.offset, single.held)
                pairs = zip(left.state, single.state, strict=True) if single.held else ()
                assert all(mx.allclose(a, b, rtol=1e-3, atol=1e-3).item() for a, b in pairs)
        if round_ % 4 == 3 and len(texts) > 1:
            staying = sorted(chance.sample(range(len(texts)), len(texts) - 1))
            texts = [texts[i] for i in staying]
            for layer in rows:
                layer.filter(staying)
        if round_ % 3 == 1 and len(texts) < 4:
            texts.append(drafter.make_cache())
            for layer, other in zip(rows, drafter.make_layers(), strict=True):
                layer.extend(other.merge([other]))


def test_other_drafters_draft_text_by_text():
    ngram = for_batches(NgramDrafter())
    assert isinstance(ngram, TextByText)
    rows = [layer[0].merge(list(layer)) for layer in zip(*(ngram.make_layers() for _ in range(3)), strict=True)]
    tokens = mx.array([[1, 2, 3, 4, 1, 2, 3], [5, 6, 7, 8, 5, 6, 7], [5, 6, 7, 8, 9, 3, 2]])
    ngram.extend_rows(mx.zeros((3, 7, 0)), rows, tokens)
    drafts = ngram.propose_rows(mx.array([4, 8, 1]), 3, rows).tokens.tolist()
    assert drafts == [[1, 2, 3], [5, 6, 7], [NO_DRAFT] * 3]  # the third text repeats nothing


@pytest.mark.parametrize("method", ["propose", "draft_hidden", "extend_context"])
def test_a_subclass_that_drafts_in_its_own_way_is_asked_for_each_text(method):
    own = type("Own", (DFlashDraftModel,), {method: getattr(DFlashDraftModel, method)})
    assert for_batches(random_drafter(0)).__class__ is DFlashDraftModel
    assert isinstance(for_batches(own(random_drafter(0).config)), TextByText)
    assert isinstance(for_batches(ScriptedDrafter([1], 4)), TextByText)


def test_a_long_text_that_leaves_takes_its_memory_with_it():
    rows = LayerContext.merge([LayerContext(), LayerContext()])
    for _ in range(20):
        rows.append(mx.ones((2, 1, 100, 2)), mx.ones((2, 1, 100, 2)), [5, 100])
    before = rows.nbytes
    rows.filter([0])
    assert rows.nbytes < before / 8
    assert mx.array_equal(rows.extract(0).state[0], mx.ones((1, 1, 100, 2)))
