"""Drafters of every kind against the reference: the same drafts, acceptance and tokens, and exact sampling.

Random drafters are rarely right. So decoding is compared over tiny vocabularies: drafts are right by accident often
enough for blocks of many lengths, and each test checks that they occurred.
"""

import mlx.core as mx
import numpy as np
import pytest
from support.agreement import (
    assert_follows,
    assert_pairs_are_exact,
    assert_same_blocks,
    context_of,
    pair_of,
    prompt_of,
)
from support.models import HIDDEN
from support.packagings import FULL, SLIDING
from support.reference import Block, softmax
from support.reference_kinds import DENSE

from dflash.decoding.sampling import DrawingSampler

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LOGIT_OPTIONS = {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 4.0}

VARIANTS = {
    "dflash": {
        "full": {},
        "sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 6},
        "mixed": {"layer_types": (SLIDING, FULL), "sliding_window": 9},
        "window shorter than the block": {"layer_types": (FULL, SLIDING), "sliding_window": 3},
        "window longer than the text": {"layer_types": (SLIDING, SLIDING), "sliding_window": 400},
        "causal full": {"is_causal": True},
        "bidirectional sliding": {"is_causal": False, "layer_types": (SLIDING, SLIDING), "sliding_window": 6},
        "one head of keys": {"num_key_value_heads": 1, "head_dim": 16},
        "ungrouped": {"num_key_value_heads": 4, "head_dim": 8},
        "logit options": LOGIT_OPTIONS,
        "biases": {"attention_bias": True},
        "rope linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        "rope llama3": {"rope_scaling": LLAMA3},
        "one layer, features out of order": {"num_hidden_layers": 1, "target_layer_ids": (3, 0)},
        "reduced vocabulary": {"draft_vocab_size": 7, **LOGIT_OPTIONS},
    },
    "dflash2": {
        "as published": {"is_causal": False, "layer_types": (SLIDING, SLIDING), "sliding_window": 6},
        "causal": {"is_causal": True, "layer_types": (SLIDING, FULL), "sliding_window": 9, "conv_kernel_size": 3},
        "taps longer than the block": {"block_size": 3, "conv_kernel_size": 5, "conv_group_size": 4},
        "one channel a group, one tap": {"conv_kernel_size": 1, "conv_group_size": 1, "selector_top_k": 1},
        "logit options": LOGIT_OPTIONS,
        "padded vocabulary": {"selector_vocab_size": 19, "selector_top_k": 16},
        "reduced vocabulary": {"draft_vocab_size": 7, "selector_top_k": 7},
    },
    "dspark": {
        "vanilla": {"markov_head_type": "vanilla"},
        "gated, causal window": {
            "markov_head_type": "gated", "layer_types": (SLIDING, SLIDING), "sliding_window": 6
        },
        "rnn, window, not causal": {"is_causal": False, "layer_types": (SLIDING, FULL), "sliding_window": 9},
        "anchor drafts nothing": {"sample_from_anchor": False, "is_causal": True},
        "confidence alone": {"markov_rank": 0},
        "Markov alone": {"enable_confidence_head": False},
        "calibrated, from hidden states alone": {
            "confidence_head_with_markov": False, "confidence_temperatures": (0.5, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 4.0)
        },
        "logit options": LOGIT_OPTIONS,
        "reduced vocabulary": {"draft_vocab_size": 7},
    },
    "domino": {
        "published": {},
        "in place": {"sample_from_anchor": False, "is_causal": True},
        "window, every draft": {"pure_draft_prefix_len": 0, "layer_types": (SLIDING, FULL), "sliding_window": 6},
        "logit options": LOGIT_OPTIONS | {"gru_hidden_dim": 1, "emb_dim": 1, "pure_draft_prefix_len": 3},
        "reduced vocabulary": {"draft_vocab_size": 7},
    },
    "dflare": {
        "full": {},
        "three layers, window": {"num_hidden_layers": 3, "layer_types": (SLIDING, FULL, SLIDING), "sliding_window": 6},
        "causal, biases": {"is_causal": True, "attention_bias": True},
    },
}  # fmt: skip
ROWS = [(kind, variant) for kind, variants in VARIANTS.items() for variant in variants]


def variant_of(kind: str, variant: str, seed: int = 1, vocab: int = 24, **changes):
    return pair_of(kind, seed, vocab, **VARIANTS[kind][variant] | changes)


@pytest.mark.parametrize(
    ("kind", "variant", "context"), [*((*row, 45) for row in ROWS), *((*row, 1) for row in ROWS if row[0] == "dflash")]
)
def test_drafts_follow_the_formulas_at_any_context_length(kind, variant, context):
    both = variant_of(kind, variant)
    drafter, (features, cache) = both.drafter, context_of(both, context)
    assert cache.offset == context
    length = drafter.config.block_size - (not drafter.config.sample_from_anchor)
    assert length == drafter.block_size - 1
    tolerance = 1e-4 if kind == "dflash" else 2e-3
    proposal = drafter.propose(mx.array([[5]]), length, cache)
    assert proposal.log_q is None
    assert_follows(proposal, both.dense.drafts(features, 5), both.dense.known, tolerance)
    short = drafter.propose(mx.array([[5]]), 2, cache)
    np.testing.assert_allclose(np.array(short.logits), np.array(proposal.logits[:, :2]), atol=tolerance, rtol=1e-4)


def numbers(block: Block) -> np.ndarray:
    return np.concatenate([np.ravel(block.scores or block.logits), block.confidence])


def differ(a: Block, b: Block) -> bool:
    x, y = numbers(a), numbers(b)
    return x.shape != y.shape or np.abs(x - y).max() > 0.02


@pytest.mark.parametrize("kind", [*DENSE])
def test_every_part_and_variant_counts_so_that_the_comparison_can_miss_none(kind):
    names = [name for name in VARIANTS[kind] if "vocabulary" not in name]
    pairs = [variant_of(kind, name) for name in names]
    features = context_of(pairs[0], 45)[0]
    first, *others = (
        both.dense.drafts(features[:, : len(both.drafter.target_layer_ids) * HIDDEN], 5) for both in pairs
    )
    for name, other in zip(names[1:], others, strict=True):
        assert differ(first, other), name
    plain, added = pairs[0].dense, pairs[0].drafter.added_modules
    for part in (name for name in plain.weights if any(module in name for module in added)):
        less = {name: 0.8 * w if name == part else w for name, w in plain.weights.items()}
        assert differ(first, DENSE[kind](less, plain.config, plain.target).drafts(features, 5, first.tokens)), part


SAMPLED = [("dflash2", "as published", 12.0), ("dflash2", "padded vocabulary", 12.0), ("dspark", "vanilla", 5.0),
           ("dspark", "rnn, window, not causal", 5.0), ("domino", "in place", 5.0)]  # fmt: skip


@pytest.mark.parametrize(("kind", "variant", "temp"), SAMPLED)
def test_sampled_tokens_take_the_place_of_the_best_and_their_distribution_is_told(kind, variant, temp):
    both, sampler = variant_of(kind, variant), DrawingSampler(temp, top_k=9)
    features, cache = context_of(both, 9)
    mx.random.seed(1)
    sampled = both.drafter.draw(mx.array([[5]]), both.drafter.block_size - 1, cache, sampler)
    assert sampled.tokens[0].tolist() != both.dense.drafts(features, 5).tokens, "nothing was sampled"
    block = both.dense.drafts(features, 5, sampled.tokens[0].tolist())
    assert_follows(sampled, block, None, 2e-3)
    if block.candidates:  # their own distribution, without the sampler's filters
        q = np.exp(np.array(sampled.log_q[0], np.float64))
        np.testing.assert_allclose(q, softmax(np.stack(block.scores) / temp), atol=2e-3)
    else:
        np.testing.assert_array_equal(np.array(sampled.log_q[0]), np.array(sampler.log_distribution(sampled.logits[0])))


@pytest.mark.parametrize(
    ("kind", "options", "vocab", "temp", "flatter"),
    [("dspark", {}, 4, 6.0, 1.0), ("dflash2", {"selector_top_k": 2}, 4, 1.4, 6.0)],
    ids=["every token", "candidates"],
)
def test_speculative_sampling_is_exact_over_joint_tokens(monkeypatch, kind, options, vocab, temp, flatter):
    """Of DFlash 2, the drafter can never sample two of the four tokens that the target may."""
    both = pair_of(kind, 3, vocab, **options)
    assert_pairs_are_exact(monkeypatch, both.target, both.drafter, temp, flatter)


DECODING = [
    # kind, variant, the drafter's block, the decoder's, prompt, seed (chosen for blocks of many lengths, no near ties)
    ("dflash", "full", 16, 16, 40, 20),
    ("dflash", "full", 8, 5, 13, 13),
    ("dflash", "sliding", 16, 16, 1, 7),
    ("dflash", "mixed", 12, 12, 33, 34),
    ("dflash", "causal full", 4, 4, 9, 29),
    ("dflash", "one layer, features out of order", 10, 10, 11, 23),
    ("dflash2", "as published", 8, 8, 7, 1),
    ("dflash2", "causal", 8, 8, 17, 7),
    ("dspark", "gated, causal window", 8, 9, 17, 7),
    ("dspark", "anchor drafts nothing", 8, 8, 5, 5),
    ("domino", "window, every draft", 8, 9, 17, 7),
    ("dflare", "three layers, window", 8, 8, 17, 3),
]


@pytest.mark.parametrize(("kind", "variant", "trained", "used", "prompt", "seed"), DECODING)
def test_acceptance_and_tokens_equal_the_reference_over_many_blocks(kind, variant, trained, used, prompt, seed):
    assert_same_blocks(variant_of(kind, variant, seed, 4, block_size=trained), prompt, 40, used)


@pytest.mark.parametrize("kind", ["plain", "llama3"])
def test_target_features_and_logits_follow_the_formulas(kind):
    both = pair_of("dflash", 2, target_changes={} if kind == "plain" else {"rope_scaling": LLAMA3})
    tokens = prompt_of(40, 24)
    logits, features = both.target.forward_with_hidden_states(mx.array([tokens]), None, (2, 0, 3))
    expected_logits, outputs = both.dense_target(tokens)
    np.testing.assert_allclose(np.array(logits[0]), expected_logits, atol=2e-4, rtol=1e-4)
    expected = np.concatenate([outputs[i] for i in (2, 0, 3)], axis=-1)
    np.testing.assert_allclose(np.array(features[0]), expected, atol=2e-4, rtol=1e-4)
    assert features.shape[-1] == 3 * HIDDEN
