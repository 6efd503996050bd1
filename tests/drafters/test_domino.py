"""Domino against the NumPy reference: the same drafts, acceptance and tokens, and exact sampling."""

import random

import mlx.core as mx
import numpy as np
import pytest
from support import packagings
from support.agreement import (
    KNOWN,
    assert_pairs_are_exact,
    assert_same_blocks,
    context_of,
    pair_of,
)
from support.models import draft_config, randomize
from support.packagings import FULL, SLIDING
from support.reference_domino import DenseDomino

from dflash import load_drafter
from dflash.decoding.sampling import DrawingSampler
from dflash.drafters.domino import DominoConfig, DominoDraftModel

VOCAB = 24
HEAD = {"gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": 1}
WINDOW = {"layer_types": (SLIDING, FULL), "sliding_window": 6}
VARIANTS = {"published": {}, "in place": {"sample_from_anchor": False, "is_causal": True},
            "window, every draft": {"pure_draft_prefix_len": 0, **WINDOW}}  # fmt: skip


def random_domino(seed: int, vocab: int = VOCAB, known: list[int] = KNOWN, **changes) -> DominoDraftModel:
    """Its correction is as large as the logits, and its state hardly fades."""
    model = DominoDraftModel(
        DominoConfig(**{**vars(draft_config(vocab)), "sample_from_anchor": True, **HEAD, **changes})
    )
    if model.config.draft_vocab_size:
        model.reduce_vocabulary(mx.array(known), own_head=True)
    randomize(model, seed, scale=2.0)
    model.embed_proj[2].weight = 3 * model.embed_proj[2].weight
    return model


def pair(seed: int, vocab: int = VOCAB, **changes):
    return pair_of(random_domino(seed, vocab, **changes), DenseDomino, seed, vocab)


def random_changes(seed: int) -> dict:
    """Any configuration: where drafts are read, sizes, windows, factors, a part of the vocabulary."""
    chance = random.Random(seed)
    anchor, block = chance.random() < 0.5, chance.choice([2, 5, 8])
    block += not anchor
    window = {"layer_types": tuple(chance.choices([SLIDING, FULL], k=2)), "sliding_window": chance.randint(2, 12)}
    return {
        "sample_from_anchor": anchor,
        "block_size": block,
        "pure_draft_prefix_len": chance.randint(0, block - (not anchor)),
        "gru_hidden_dim": chance.choice([1, 3, 16]),
        "emb_dim": chance.choice([1, 4, 9]),
        "is_causal": chance.choice([None, True, False]),
        "elastic_blocks": chance.random() < 0.3,
        "input_embedding_scale": chance.choice([1.0, 3.0]),
        "output_multiplier": chance.choice([1.0, 0.5]),
        "final_logit_softcapping": chance.choice([None, 4.0]),
        "draft_vocab_size": chance.choice([None, len(KNOWN)]),
        **chance.choice([{}, window]),
    }


@pytest.mark.parametrize("seed", range(60))
def test_drafts_follow_the_formulas_whatever_the_configuration(seed):
    both, context = pair(seed, **random_changes(seed)), [1, 7, 45][seed % 3]
    drafter, dense, (features, cache) = both.drafter, both.dense, context_of(both, context)
    length = drafter.block_size - 1
    proposal, expected = drafter.propose(mx.array([[5]]), length, cache), dense.drafts(features, 5)
    assert proposal.tokens.tolist() == [expected.tokens]
    known = np.stack(expected.logits) if dense.known is None else np.stack(expected.logits)[:, dense.known]
    np.testing.assert_allclose(np.array(proposal.logits[0]), known, atol=1e-3, rtol=1e-4)
    assert proposal.candidates is None if dense.known is None else proposal.candidates[0].tolist() == [KNOWN] * length
    assert (proposal.log_q, proposal.confidence) == (None, None)
    short = drafter.propose(mx.array([[5]]), 2, cache)
    if not drafter.config.elastic_blocks:
        np.testing.assert_allclose(np.array(short.logits[0]), np.array(proposal.logits[0, :2]), atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sampled_tokens_take_the_place_of_the_best_and_their_distribution_is_told(variant):
    both, sampler = pair(1, **VARIANTS[variant]), DrawingSampler(5.0, top_k=9)
    features, cache = context_of(both, 9)
    mx.random.seed(1)
    sampled = both.drafter.draw(mx.array([[5]]), both.drafter.block_size - 1, cache, sampler)
    expected = both.dense.drafts(features, 5, sampled.tokens[0].tolist())
    assert sampled.tokens[0].tolist() != both.dense.drafts(features, 5).tokens, "nothing was sampled"
    np.testing.assert_allclose(np.array(sampled.logits[0]), np.stack(expected.logits), atol=1e-3, rtol=1e-4)
    np.testing.assert_array_equal(np.array(sampled.log_q[0]), np.array(sampler.log_distribution(sampled.logits[0])))


@pytest.mark.parametrize(("variant", "prompt", "seed"), [("published", 7, 3), ("window, every draft", 17, 7),
                                                         ("in place", 5, 5)])  # fmt: skip
def test_acceptance_and_tokens_equal_the_reference_over_many_blocks(variant, prompt, seed):
    assert_same_blocks(pair(seed, 4, **VARIANTS[variant]), prompt, 48)


def test_speculative_sampling_with_corrected_drafts_is_exact_over_joint_tokens(monkeypatch):
    both = pair(3, 4)
    assert_pairs_are_exact(monkeypatch, both.target, both.drafter, 6.0, 1.0, 37.7)  # 15 degrees of freedom, 0.1 %


# --- packagings -------------------------------------------------------------------------------------------


def specforge(config: dict) -> dict:
    """As its configs are: a DFlash label, a size written twice, the anchor's key as a label's shift."""
    assert config["dflash_config"]["projector_type"] == "domino"
    return config | {"architectures": ["DFlashDraftModel"], "emb_dim": config["dflash_config"]["emb_dim"]}


def without_keys(config: dict) -> dict:
    """What SpecForge takes where the two keys lack: no shift, and a correction from the first draft on."""
    inner = {k: v for k, v in config["dflash_config"].items() if k not in ("shift_label", "pure_draft_prefix_len")}
    return config | {"dflash_config": inner}


def speculators(config: dict) -> dict:
    packaged, inner = packagings.speculators(config), config["dflash_config"]
    packaged["speculators_config"] |= {"algorithm": "domino", "proposal_methods": []}
    return packaged | {
        "architectures": ["DominoSpeculator"], "speculators_model_type": "domino",
        "sample_from_anchor": inner["shift_label"], "logits_correction_emb_dim": inner["emb_dim"],
        "lambda_base_start": 1.0, "lambda_base_decay_ratio": 0.5,
        **{name: inner[name] for name in ("gru_hidden_dim", "pure_draft_prefix_len")},
    }  # fmt: skip


PACKAGINGS = {
    "our own": (lambda config: config, "", {}),
    "our own, in place": (lambda config: config, "", {"sample_from_anchor": False}),
    "SpecForge": (specforge, "", {}),
    "SpecForge, in place": (specforge, "", {"sample_from_anchor": False}),
    "SpecForge, older": (specforge, "logit_head.", {}),
    "SpecForge without two keys": (without_keys, "", {"sample_from_anchor": False, "pure_draft_prefix_len": 0}),
    "speculators": (speculators, "logits_correction.", {}),
    "speculators, in place": (speculators, "logits_correction.", {"sample_from_anchor": False}),
}


@pytest.mark.parametrize("form", PACKAGINGS)
def test_every_packaging_drafts_the_same(tmp_path, form):
    packaging, prefix, changes = PACKAGINGS[form]
    drafter = random_domino(3, packagings.VOCAB, **changes)
    config, weights = packagings.published(drafter)
    weights = packagings.renamed(weights, lambda name: prefix * name.startswith(("prefix_gru", "embed_proj")) + name)
    packaged = packagings.write(tmp_path / "form", packaging(config), packagings.with_copies(weights))
    assert type(load_drafter(packaged)) is DominoDraftModel
    assert load_drafter(packaged).target_layer_ids == (0, 1, 3)
    packagings.assert_same_drafts(packaged, drafter)


def test_what_is_saved_is_the_published_packaging_and_loads_bit_equal(tmp_path):
    config = packagings.assert_saved(random_domino(3, packagings.VOCAB), tmp_path / "whole")
    assert config["architectures"] == ["DominoDraftModel"]
    published = {"projector_type": "domino", "shift_label": True, **HEAD}
    assert published.items() <= config["dflash_config"].items()
    shapes = {name: w.shape for name, w in mx.load(str(tmp_path / "whole" / "model.safetensors")).items()}
    assert {name: shape for name, shape in shapes.items() if name.startswith(("prefix_gru", "embed_proj"))} == {
        "prefix_gru.weight_ih_l0": (30, 32), "prefix_gru.weight_hh_l0": (30, 10),
        "embed_proj.0.weight": (6, 42), "embed_proj.2.weight": (packagings.VOCAB, 6),
    }  # fmt: skip
    part = {"draft_vocab_size": len(packagings.KNOWN), "sample_from_anchor": False}
    drafter = random_domino(3, packagings.VOCAB, packagings.KNOWN, **part)
    assert packagings.assert_saved(drafter, tmp_path / "part", mx.float32)["dflash_config"]["shift_label"] is False
    proposal = packagings.assert_same_drafts(tmp_path / "part", drafter)
    assert set(proposal.tokens[0].tolist()) <= set(packagings.KNOWN)


REFUSED = {
    "no sizes": ({"emb_dim": None, "gru_hidden_dim": None}, {}, ["emb_dim, gru_hidden_dim missing"]),
    "size": ({"gru_hidden_dim": 0}, {}, ["gru_hidden_dim", "0"]),
    "prefix": ({"pure_draft_prefix_len": 9}, {}, ["pure_draft_prefix_len", "8 drafts", "9"]),
    "prefix of another type": ({"pure_draft_prefix_len": True}, {}, ["pure_draft_prefix_len", "True"]),
    "shift": ({"shift_label": "yes"}, {}, ["sample_from_anchor", "'yes'"]),
    "biases": ({}, {"prefix_gru.bias_ih_l0": (30,)}, ["prefix_gru.bias_ih_l0", "Domino"]),
    "two layers": ({}, {"prefix_gru.weight_hh_l1": (30, 10)}, ["prefix_gru.weight_hh_l1"]),
    "another width": ({"gru_hidden_dim": 11}, {}, ["prefix_gru.weight_ih_l0", "(33, 32)"]),
    "no weights": ({}, {"embed_proj.0.weight": None}, ["lacks embed_proj.0.weight"]),
    "a misspelt key": ({"pure_draft_prefix_length": 1}, {}, ["pure_draft_prefix_length", "'pure_draft_prefix_len'"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(tmp_path, name):
    changes, tensors, words = REFUSED[name]
    config, weights = packagings.published(random_domino(3, packagings.VOCAB))
    weights |= {n: mx.ones(shape) for n, shape in tensors.items() if shape}
    weights = {n: w for n, w in weights.items() if tensors.get(n, True)}
    packagings.assert_refused(tmp_path, packagings.inside(config, **changes), weights, *words)
