"""The package against the NumPy reference: the same drafts, acceptance and tokens.

Random drafters are rarely right. So vocabularies are tiny here: drafts are right by accident often enough for blocks of
many lengths, and each test checks that they occurred.
"""

import logging
from dataclasses import replace
from itertools import combinations

import mlx.core as mx
import numpy as np
import pytest
from support.agreement import assert_same_blocks, context_of, pair_of, prompt_of
from support.models import HIDDEN, qwen3_model, random_drafter
from support.packagings import FULL, SLIDING
from support.reference import DenseDrafter

from dflash import LoadedTargetModel
from dflash.adapters.conformance import small_models
from dflash.target.identity import target_fingerprint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def pair(seed: int, vocab: int, target_changes=None, **draft_changes):
    drafter = random_drafter(seed, vocab, **draft_changes)
    return pair_of(drafter, DenseDrafter, seed, vocab, **(target_changes or {}))


VARIANTS = {
    "full": {},
    "sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 6},
    "mixed": {"layer_types": (SLIDING, FULL), "sliding_window": 9},
    "window shorter than the block": {"layer_types": (FULL, SLIDING), "sliding_window": 3},
    "window longer than the text": {"layer_types": (SLIDING, SLIDING), "sliding_window": 400},
    "causal full": {"is_causal": True},
    "bidirectional sliding": {"is_causal": False, "layer_types": (SLIDING, SLIDING), "sliding_window": 6},
    "one head of keys": {"num_key_value_heads": 1, "head_dim": 16},
    "ungrouped": {"num_key_value_heads": 4, "head_dim": 8},
    "logit options": {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 4.0},
    "biases": {"attention_bias": True},
    "rope linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "rope llama3": {"rope_scaling": LLAMA3},
    "one layer, features out of order": {"num_hidden_layers": 1, "target_layer_ids": (3, 0), "layer_types": ()},
}


@pytest.mark.parametrize("context", [1, 2, 7, 16, 45])
@pytest.mark.parametrize("variant", VARIANTS)
def test_draft_logits_follow_the_formulas_at_any_context_length(variant, context):
    both = pair(1, 24, **VARIANTS[variant])
    drafter, (features, cache) = both.drafter, context_of(both, context)
    assert cache.offset == context
    length = drafter.block_size - 1
    proposal = drafter.propose(mx.array([[5]]), length, cache)
    expected = both.dense.logits(features, 5)
    np.testing.assert_allclose(np.array(proposal.logits[0]), expected, atol=1e-4, rtol=1e-4)
    assert proposal.tokens.shape == (1, length)
    short = drafter.propose(mx.array([[5]]), 2, cache)
    np.testing.assert_allclose(np.array(short.logits[0]), expected[:2], atol=1e-4, rtol=1e-4)


def test_variants_differ_so_that_the_comparison_can_tell_them_apart():
    drafts = {}
    for name in ("full", "sliding", "causal full", "bidirectional sliding", "biases", "rope linear", "rope llama3"):
        both = pair(1, 24, **VARIANTS[name])
        drafts[name] = both.dense.logits(context_of(both, 45)[0], 5)
    for a, b in combinations(drafts, 2):
        assert np.abs(drafts[a] - drafts[b]).max() > 0.05, (a, b)


@pytest.mark.parametrize("kind", ["plain", "llama3"])
def test_target_features_and_logits_follow_the_formulas(kind):
    both = pair(2, 24, target_changes={} if kind == "plain" else {"rope_scaling": LLAMA3})
    tokens = prompt_of(40, 24)
    logits, features = both.target.forward_with_hidden_states(mx.array([tokens]), None, (2, 0, 3))
    expected_logits, outputs = both.dense_target(tokens)
    np.testing.assert_allclose(np.array(logits[0]), expected_logits, atol=2e-4, rtol=1e-4)
    expected = np.concatenate([outputs[i] for i in (2, 0, 3)], axis=-1)
    np.testing.assert_allclose(np.array(features[0]), expected, atol=2e-4, rtol=1e-4)
    assert features.shape[-1] == 3 * HIDDEN


DECODING = [
    # variant, drafter's block, decoder's block, prompt, seed (chosen for blocks of many lengths, no near ties)
    ("full", 8, 8, 1, 7),
    ("full", 16, 16, 40, 20),
    ("full", 8, 5, 13, 13),
    ("sliding", 8, 8, 17, 9),
    ("sliding", 16, 16, 1, 7),
    ("mixed", 12, 12, 33, 34),
    ("window shorter than the block", 16, 16, 24, 8),
    ("bidirectional sliding", 8, 8, 5, 34),
    ("causal full", 4, 4, 9, 29),
    ("logit options", 8, 8, 20, 13),
    ("rope llama3", 16, 6, 7, 24),
    ("one layer, features out of order", 10, 10, 11, 23),
]


@pytest.mark.parametrize(("variant", "trained", "used", "prompt", "seed"), DECODING)
def test_acceptance_and_tokens_equal_the_reference_over_many_blocks(variant, trained, used, prompt, seed):
    assert_same_blocks(pair(seed, 4, **(VARIANTS[variant] | {"block_size": trained})), prompt, 64, used)


def drafter_for(target: LoadedTargetModel, ids: list[int] | None = None, **changes):
    shape = {"hidden_size": target.hidden_size, "num_target_layers": target.num_layers, "target_layer_ids": (0,)}
    drafter = random_drafter(3, target.vocab_size, **shape, **changes)
    if ids is not None:
        drafter.reduce_vocabulary(mx.array(ids), own_head=False)
    drafter.bind(target)
    return drafter


@pytest.mark.parametrize("architecture", ["gemma3_text", "gemma2"])
def test_embeddings_are_scaled_as_the_target_scales_them(architecture):
    """A published Gemma drafter does not name the factor that Gemma's backbone applies: sqrt(hidden size)."""
    target, tokens = LoadedTargetModel(small_models.build(architecture)), mx.array([[3, 7]])
    scaled = np.array(target.embed(tokens)) * target.hidden_size**0.5
    for factor in (1.0, 0.5):
        drafter = drafter_for(target, input_embedding_scale=factor)
        np.testing.assert_allclose(np.array(drafter.embed(tokens)), scaled * factor, rtol=1e-5)


def test_what_the_head_of_a_muse_target_does_is_not_done_twice():
    """Published drafters of Muse name the multiplier, rounded, and the cap that mlx-lm's model applies by itself."""
    model = small_models.build("muse_glimmer")
    target, factor, cap = LoadedTargetModel(model), model.args.output_multiplier, model.args.final_logit_softcapping
    drafter = drafter_for(target, output_multiplier=round(factor, 9), final_logit_softcapping=cap)
    hidden = mx.random.normal((1, 3, target.hidden_size), key=mx.random.key(1))
    raw = model.lm_head(hidden) if "lm_head" in model else model.model.embed_tokens.as_linear(hidden)
    assert mx.allclose(drafter.head(hidden), cap * mx.tanh(factor * raw / cap), atol=1e-5)
    drafter.config = replace(drafter.config, output_multiplier=factor / 2)
    assert not mx.allclose(drafter.head(hidden), target.head(hidden), atol=1e-3)


@pytest.mark.parametrize("ids", [None, [7, 3, 21]])
@pytest.mark.parametrize(
    ("multiplier", "cap", "logits"),
    [
        (1.0, None, lambda raw: 5 * np.tanh(raw / 5)),  # the target's own, whether the file names them or not
        (1.0, 5.0, lambda raw: 5 * np.tanh(raw / 5)),
        (0.5, 5.0, lambda raw: 5 * np.tanh(raw / 2 / 5)),
        (0.5, None, lambda raw: raw / 2),
        (1.0, 9.0, lambda raw: 9 * np.tanh(raw / 9)),
    ],
)
def test_a_multiplier_and_a_cap_replace_those_of_the_targets_head(multiplier, cap, logits, ids):
    target = LoadedTargetModel(small_models.build("gemma2"))
    target.adapter.config.final_logit_softcapping = 5.0
    changes = {} if ids is None else {"draft_vocab_size": len(ids)}
    drafter = drafter_for(target, ids, output_multiplier=multiplier, final_logit_softcapping=cap, **changes)
    hidden = 3 * mx.random.normal((1, 4, target.hidden_size), key=mx.random.key(0))
    raw = np.array(target.adapter.embedding.as_linear(hidden))[..., slice(None) if ids is None else ids]
    np.testing.assert_allclose(np.array(drafter.head(hidden)), logits(raw), rtol=1e-4, atol=1e-4)


def test_a_drafter_on_another_target_of_the_same_shape_gets_a_warning(caplog):
    mine, other = (LoadedTargetModel(qwen3_model(seed, 24)) for seed in (0, 1))
    drafter = random_drafter(3, 24, target_fingerprint=target_fingerprint(mine))
    with caplog.at_level(logging.WARNING):
        drafter.bind(mine)
        random_drafter(3, 24).bind(other)
        assert caplog.messages == []
        drafter.bind(other)
    assert "another target of the same shape" in caplog.text
