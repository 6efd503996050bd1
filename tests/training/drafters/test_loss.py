"""The loss of a batch: equal to a dense float64 implementation, in bounded memory, and one that training lowers."""

import json
import math
from dataclasses import replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from support.dense_loss import (
    FULL,
    GAMMA,
    OBJECTIVES,
    SLIDING,
    VARIANTS,
    VOCAB,
    RandomTarget,
    assert_equal,
    dense_loss_and_gradients,
    document,
    drafter,
    log_softmax,
    loss_and_gradients,
    pack_of_three,
    pad_documents,
)  # fmt: skip
from support.models import HIDDEN, draft_config, randomize, target

from dflash import DFlashDraftModel
from dflash.drafters import block_attention as attention
from dflash.training.batches import Batches
from dflash.training.data.sequences import Sequences
from dflash.training.drafters.loss import Batch, drafter_loss
from dflash.training.drafters.objectives import ObjectiveSettings
from dflash.training.features import with_target_pass
from dflash.training.loop.fit import FitSettings, fit
from dflash.training.loop.optimizer import MuonSettings
from dflash.training.recipe import DataSettings

CROSS_ENTROPY, KL, MIX = OBJECTIVES

# --- equality ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "objective"),
    [*((variant, KL) for variant in VARIANTS), ("grouped heads", CROSS_ENTROPY), ("sliding and full", MIX)],
)
def test_loss_and_gradients_equal_a_dense_float64_implementation(variant, objective, monkeypatch):
    monkeypatch.setattr(attention, "_ANCHORS_AT_ONCE", 3)  # tiles of 3, 3 and 1 anchors
    model = drafter(1, **VARIANTS[variant])
    documents = pack_of_three()
    assert_equal(loss_and_gradients(model, documents, objective), dense_loss_and_gradients(model, documents, objective))


def test_variants_and_objectives_differ_so_that_the_comparison_can_tell_them_apart():
    objective = CROSS_ENTROPY
    documents, names = pack_of_three(), ("grouped heads", "sliding", "bidirectional sliding", "causal in the block")
    values = [loss_and_gradients(drafter(1, **VARIANTS[name]), documents, objective)[0] for name in names]
    values += [loss_and_gradients(drafter(1), documents, other)[0] for other in OBJECTIVES[1:]]
    assert np.diff(np.sort(values)).min() > 1e-3 * max(values)


def test_a_full_tile_of_anchors_and_a_rest_equal_the_dense_implementation():
    """The tile size as it is, with unsorted anchors that several sequences share tiles for."""
    rng = np.random.default_rng(3)
    documents = [
        document(n, length, [(2, length)], rng.integers(2, length - 1, attention._ANCHORS_AT_ONCE + 3).tolist())
        for n, length in enumerate((30, 21))
    ]
    model = drafter(2, layer_types=(FULL, SLIDING), sliding_window=8)
    assert_equal(loss_and_gradients(model, documents, MIX), dense_loss_and_gradients(model, documents, MIX))


def test_the_chunk_size_changes_nothing():
    model, documents = drafter(4), pack_of_three()
    whole = loss_and_gradients(model, documents, replace(MIX, chunk=10_000))
    for chunk in (1, 7, 64):
        assert_equal(loss_and_gradients(model, documents, replace(MIX, chunk=chunk)), whole, 3e-6)


def test_gradient_checkpointing_changes_nothing_but_memory():
    documents = [document(0, 200, [(1, 200)], list(range(10, 160)))]
    model, batch, results = drafter(4, num_hidden_layers=8), pad_documents(documents), []
    for grad_checkpoint in (False, True):
        loss = partial(drafter_loss, objective=CROSS_ENTROPY, grad_checkpoint=grad_checkpoint)
        step = nn.value_and_grad(model, loss)
        mx.clear_cache()
        mx.reset_peak_memory()
        held = mx.get_active_memory()  # by other tests too
        value, gradients = step(model, batch)
        mx.eval(value, gradients)
        results.append((value.item(), dict(tree_flatten(gradients)), mx.get_peak_memory() - held))
    (*plain, most), (*again, less) = results
    assert_equal(again, plain, 3e-6)
    assert less < 0.7 * most


@given(st.integers(0, 99), st.sampled_from(["grouped heads", "sliding and full"]), st.sampled_from(OBJECTIVES))
@settings(max_examples=6)
def test_no_document_of_a_pack_changes_the_loss_or_gradients_of_another(seed, variant, objective):
    """The second document counts for nothing itself, since the target wrote nothing of it."""
    model, first = drafter(1, **VARIANTS[variant]), pack_of_three()[0]
    others = [document(100 + seed + i, 33, [], [2, 5, 9, 13, 22, 30, 31]) for i in range(2)]
    (value, gradients), (other_value, other_gradients) = (
        loss_and_gradients(model, [first, other], objective) for other in others
    )
    assert value == other_value
    assert all(mx.array_equal(gradients[name], other_gradients[name]) for name in gradients)
    assert_equal((value, gradients), loss_and_gradients(model, [first], objective), 3e-6)


@given(st.integers(0, 99))
@settings(max_examples=6)
def test_a_block_sees_nothing_at_its_anchor_or_after_it(seed):
    model, d = drafter(1), pack_of_three(seed)[0]
    d.anchors = d.anchors[:4]  # the last at 22
    other = document(seed + 50, len(d.tokens), d.spans, d.anchors)
    changed = replace(d, features=np.concatenate([d.features[:22], other.features[22:]]))
    value, gradients = loss_and_gradients(model, [d], CROSS_ENTROPY)
    other_value, other_gradients = loss_and_gradients(model, [changed], CROSS_ENTROPY)
    assert value == other_value
    assert all(mx.array_equal(gradients[name], other_gradients[name]) for name in gradients)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_kl_compares_each_position_with_what_the_target_says_after_the_token_before_it(from_anchor):
    """With a real target: its own logits, one document at a time, against one reading of the padded pack."""
    real = target("qwen3", 2, VOCAB)
    size = 5 if from_anchor else 6  # of five drafts either way
    model = randomize(DFlashDraftModel(draft_config(VOCAB, block_size=size, sample_from_anchor=from_anchor)), 1)
    model.bind(real)
    documents, wanted = pack_of_three(), []
    blocks = pad_documents(documents)[:3]
    batch = with_target_pass(lambda _: blocks, real, model.target_layer_ids, True)(0)
    loss = drafter_loss(model, batch, ObjectiveSettings("kl", gamma=GAMMA), real.head)
    total, counted = 0.0, 0.0
    for d in documents:
        wanted, features = real.forward_with_hidden_states(mx.array([d.tokens]), None, model.target_layer_ids)
        for _, anchor in d.blocks():
            cache = model.make_cache()
            model.extend_context(features[:, :anchor], cache, mx.array([d.tokens[:anchor]]))
            drafted = model.propose(mx.array([[d.tokens[anchor]]]), 5, cache).logits
            for i in range(1, 6):
                if not d.wrote(anchor + i):
                    break
                weight = math.exp(-(i - 1) / GAMMA)
                p, q = (log_softmax(x) for x in (wanted[0, anchor + i - 1], drafted[0, i - 1]))
                total, counted = total + weight * (mx.exp(p) * (p - q)).sum().item(), counted + weight
    assert loss.item() == pytest.approx(total / counted, rel=1e-4)


def test_a_drafter_learns_a_text_that_repeats_itself(tmp_path):
    """Through the training loop, with two batches of a step side by side on threads."""
    text = [t % 7 for t in range(50)]
    sequences = Sequences.from_lists([text[i : i + 3] for i in range(4)], [text[i + 3 : i + 40] for i in range(4)])
    real, model = target("qwen3", 2, VOCAB), randomize(DFlashDraftModel(draft_config(VOCAB, block_size=6)), 1)
    model.bind(real)
    fitting = FitSettings(steps=20, batches_per_step=2, log_every=5, optimizer=MuonSettings(decay_steps=5))
    batches = Batches(sequences, DataSettings(tmp_path, 80, 80, anchors=8), epochs=20)
    loss = partial(drafter_loss, objective=KL, head=real.head)
    fit(model, with_target_pass(batches, real, model.target_layer_ids, True), loss, fitting, tmp_path)
    logged = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert logged[-1] < 0.5 * logged[0]


def test_memory_does_not_grow_with_anchors_times_vocabulary():
    vocab, size, objective = 8192, 16, ObjectiveSettings("kl", chunk=32)
    config = draft_config(vocab, block_size=size, num_hidden_layers=1, layer_types=())
    model, real = DFlashDraftModel(config), RandomTarget(0, vocab)
    model.bind(real)  # type: ignore[arg-type]
    tokens, loss_mask = mx.zeros((1, 200), mx.int32), mx.ones((1, 200), mx.bool_)
    read = mx.random.normal((1, 200, 3 * HIDDEN)), mx.random.normal((1, 200, HIDDEN))
    step = nn.value_and_grad(model, partial(drafter_loss, objective=objective, head=real.head))

    def peak(count: int) -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        mx.eval(step(model, Batch(tokens, loss_mask, mx.arange(1, count + 1)[None], *read)))
        return mx.get_peak_memory()

    peak(8)
    few, many = peak(16), peak(128)
    one_set_of_logits = 4 * (size - 1) * vocab * (128 - 16)
    assert many - few < one_set_of_logits / 3
