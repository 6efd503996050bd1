"""Files of the kinds beside DFlash: packagings draft the same, what is saved is as published, faults are named."""

from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest
from support import packagings, reference
from support.agreement import dense_of, numpy_weights
from support.kinds import random_drafter
from support.models import HIDDEN
from support.packagings import FULL, KNOWN, SLIDING, VOCAB, flat, inside, without_inside

from dflash import load_drafter, save_drafter

HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
DOMINO = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")


def speculators(algorithm: str, config: dict, **changes) -> dict:
    """Either kind with a head, packed by vLLM's speculators."""
    inner = config["dflash_config"]
    packaged = packagings.speculators(config, **{name: inner[name] for name in (*HEADS, *DOMINO) if name in inner})
    packaged["speculators_config"] |= {"algorithm": algorithm, "proposal_methods": [{"speculative_tokens": 8}]}
    return packaged | {"architectures": ["DSparkDraftModel"], "speculators_model_type": algorithm} | changes


def domino_of_speculators(config: dict) -> dict:
    inner = config["dflash_config"]
    changes = {"sample_from_anchor": inner["shift_label"], "logits_correction_emb_dim": inner["emb_dim"]}
    packaged = speculators("domino", config, architectures=["DominoSpeculator"], lambda_base_start=1.0, **changes)
    packaged["speculators_config"]["proposal_methods"] = []
    return {name: value for name, value in packaged.items() if name != "emb_dim"}


def of_specforge(config: dict) -> dict:
    """A DFlash label, and a size that is written twice."""
    assert config["dflash_config"]["projector_type"] == "domino"
    return config | {"architectures": ["DFlashDraftModel"], "emb_dim": config["dflash_config"]["emb_dim"]}


def labelled(name: str):
    return lambda config: config | {"architectures": [name]}


def of_deepspec(config: dict, architecture: str = "Qwen3DSparkModel") -> dict:
    """The architecture alone says where the first draft is read."""
    bare = flat(without_inside(config, "projector_type", "attention_mode", "sample_from_anchor"))
    return bare | {"architectures": [architecture], "num_anchors": 512, "partial_rotary_factor": 0.25}


AS_PUBLISHED = {"is_causal": False, "layer_types": (SLIDING, SLIDING), "sliding_window": 6}
IN_PLACE = {"sample_from_anchor": False}
FORMS = {  # what is made of a config, a pattern and the stored form of weights' names, the drafter's options
    "dflash2": {
        "z-lab": (dict, {}, AS_PUBLISHED),
        "by its other name": (labelled("Qwen3DFlash2DraftModel"), {}, {}),
        "by its keys, renamed by a server": (labelled("DFlashDraftModel"), {}, {}),
        "flat": (flat, {}, {}),
        "tables with a suffix": (dict, {"codebook": "codebook.weight"}, {}),
    },
    "dspark": {
        "DeepSpec": (of_deepspec, {}, {}),
        "SpecForge": (dict, {"markov_head.": "logit_head."}, {"markov_head_type": "vanilla"}),
        "SpecForge without the anchor's key": (lambda c: without_inside(c, "sample_from_anchor"), {}, {}),
        "speculators": (lambda c: speculators("dspark", c), {}, {}),
        "LFM2.5": (
            lambda c: without_inside(c, "projector_type", "sample_from_anchor")
            | {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": True}, {}, {}
        ),
        "a DFlash label with the anchor's key": (
            lambda c: of_deepspec(c, "DFlashDraftModel") | {"sample_from_anchor": True}, {}, {}
        ),
    },
    "domino": {
        "our own, in place": (dict, {}, IN_PLACE),
        "SpecForge": (of_specforge, {}, {}),
        "SpecForge, older": (of_specforge, {"prefix_gru": "logit_head.prefix_gru"}, IN_PLACE),
        "SpecForge without two keys": (
            lambda c: without_inside(c, "shift_label", "pure_draft_prefix_len"), {},
            IN_PLACE | {"pure_draft_prefix_len": 0},
        ),
        "speculators": (domino_of_speculators, {"embed_proj": "logits_correction.embed_proj"}, {}),
        "speculators, in place": (domino_of_speculators, {"prefix_gru": "logits_correction.prefix_gru"}, IN_PLACE),
    },
    "dflare": {"AngelSlim": (labelled("QwenDFlareDraftModel"), {}, {"layer_types": (SLIDING, FULL), **AS_PUBLISHED})},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind, forms in FORMS.items() for form in forms])
def test_every_packaging_drafts_the_same(tmp_path, kind, form):
    packaging, names, options = FORMS[kind][form]
    drafter = random_drafter(kind, 3, VOCAB, **options)
    config, weights = packagings.published(drafter)
    for ours, stored in names.items():
        renamed = packagings.renamed(weights, lambda name, ours=ours, stored=stored: name.replace(ours, stored))
        assert renamed.keys() != weights.keys()
        weights = renamed
    folder = packagings.write(tmp_path, packaging(config), packagings.with_copies(weights, own=kind == "dspark"))
    loaded = load_drafter(folder)
    assert type(loaded) is type(drafter)
    assert loaded.target_layer_ids == (0, 1, 3)
    packagings.assert_same_drafts(loaded, drafter)


def test_kernels_of_a_wider_type_than_the_layers_load(tmp_path):
    config, weights = packagings.published(random_drafter("dflash2", 3, VOCAB))
    narrow = {name: w if name.endswith("base_kernel") else w.astype(mx.bfloat16) for name, w in weights.items()}
    folder = packagings.write(tmp_path / "narrow", config, narrow)
    wide = {name: w.astype(mx.float32) for name, w in narrow.items()}
    packagings.assert_same_drafts(folder, packagings.write(tmp_path / "wide", config, wide))


def test_blocks_are_causal_only_where_the_config_says_so(tmp_path):
    """DFlash 2's layers slide and are bidirectional: layer types alone would say causal."""
    config, weights = packagings.published(random_drafter("dflash2", 3, VOCAB, **AS_PUBLISHED))
    assert config["is_causal"] is False
    scores = {
        causal: packagings.proposal(packagings.write(tmp_path / str(causal), config | {"is_causal": causal}, weights))
        for causal in (False, True, None)
    }
    assert mx.array_equal(scores[True].logits, scores[None].logits)
    assert mx.abs(scores[True].logits - scores[False].logits).max() > 0.1


CONVOLUTION = {"base_kernel": (2, 2, HIDDEN), "kernel_projection.weight": (2 * 2 * HIDDEN // 8, HIDDEN)}
SAVED = {  # the architecture, keys inside dflash_config, shapes of the kind's own weights
    "dflash2": (
        "DFlash2DraftModel",
        {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 3,
         "selector_vocab_size": 19, "block_size": 8, "mask_token_id": VOCAB - 1},
        {f"layers.{i}.{part}_conv.{name}": shape for i in (0, 1) for part in ("attention", "mlp")
         for name, shape in CONVOLUTION.items()}
        | {"candidate_selector.hidden_projection.weight": (5, HIDDEN)}
        | {f"candidate_selector.{name}_codebook": (VOCAB, 5) for name in ("predecessor", "successor")},
    ),
    "dspark": (
        "DSparkDraftModel",
        {"projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 6, "sample_from_anchor": True},
        {"markov_head.markov_w1.weight": (VOCAB, 6), "markov_head.markov_w2.weight": (VOCAB, 6),
         "markov_head.joint_proj.weight": (18, HIDDEN + 12), "markov_head.joint_proj.bias": (18,),
         "confidence_head.proj.weight": (1, HIDDEN + 6), "confidence_head.proj.bias": (1,)},
    ),
    "domino": (
        "DominoDraftModel",
        {"projector_type": "domino", "shift_label": True, "gru_hidden_dim": 10, "emb_dim": 6,
         "pure_draft_prefix_len": 1},
        {"prefix_gru.weight_ih_l0": (30, HIDDEN), "prefix_gru.weight_hh_l0": (30, 10),
         "embed_proj.0.weight": (6, HIDDEN + 10), "embed_proj.2.weight": (VOCAB, 6)},
    ),
    "dflare": ("QwenDFlareDraftModel", {}, {"layer_fusion_weights": (2, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAVED)
def test_what_is_saved_is_the_published_packaging_and_loads_bit_equal(tmp_path, kind):
    architecture, inner, shapes = SAVED[kind]
    drafter = random_drafter(kind, 3, VOCAB, **({"selector_vocab_size": 19} if kind == "dflash2" else {}))
    config = packagings.assert_saved(drafter, tmp_path)
    assert config["architectures"] == [architecture]
    assert inner.items() <= config["dflash_config"].items()
    assert not inner.keys() & config.keys()
    stored = {name: w.shape for name, w in mx.load(str(tmp_path / "model.safetensors")).items()}
    assert {name: stored[name] for name in stored if any(part in name for part in drafter.added_modules)} == shapes


@pytest.mark.parametrize("kind", ["dspark", "domino"])
def test_a_head_over_a_part_of_the_vocabulary_comes_back_in_both_packagings(tmp_path, kind):
    drafter = random_drafter(kind, 3, VOCAB, draft_vocab_size=len(KNOWN), sample_from_anchor=False)
    config = packagings.assert_saved(drafter, tmp_path / "saved", mx.float32)
    assert config["dflash_config"].get("shift_label", config["dflash_config"].get("sample_from_anchor")) is False
    proposal = packagings.assert_same_drafts(tmp_path / "saved", drafter)
    assert proposal.logits.shape == (1, 7, len(KNOWN))
    assert set(proposal.tokens[0].tolist()) <= set(drafter.token_ids.tolist())
    if kind == "dspark":
        packed = speculators("dspark", config, draft_vocab_size=len(KNOWN))
        packed["speculators_config"]["proposal_methods"] = []
        weights = dict(mx.load(str(tmp_path / "saved" / "model.safetensors")))
        packagings.assert_same_drafts(packagings.write(tmp_path / "packed", packed, weights), drafter)


@pytest.mark.parametrize("tables", ["both", "embedding", "copies"])
def test_tables_of_dsparks_own_are_used_unless_they_are_the_targets(tmp_path, tables):
    config, weights = packagings.published(random_drafter("dspark", 3, VOCAB))
    target = packagings.target().model
    table = target.model.embed_tokens.weight
    other = mx.random.normal(table.shape, key=mx.random.key(9))
    weights |= {"embed_tokens.weight": table if tables == "copies" else other}
    if tables != "embedding":
        weights["lm_head.weight"] = table if tables == "copies" else other[::-1]
    folder = packagings.write(tmp_path / "own", of_deepspec(config), weights)
    drafter = load_drafter(folder)
    drafter.bind(packagings.target())
    own = {"both": {"embed_tokens", "lm_head"}, "embedding": {"embed_tokens"}, "copies": set()}[tables]
    assert {"embed_tokens", "lm_head"} & drafter.keys() == own

    tables_of = {"model.embed_tokens.weight": table if tables == "copies" else other, "lm_head.weight": table}
    of_target = numpy_weights(target) | {name: np.array(w, np.float64) for name, w in tables_of.items()}
    dense = dense_of("dspark", drafter, reference.DenseTarget(of_target, asdict(target.args)))
    expected = dense.drafts(np.array(packagings.features(), np.float64)[0], 5)
    save_drafter(load_drafter(folder), tmp_path / "again", mx.float32)
    proposal = packagings.assert_same_drafts(folder, tmp_path / "again")
    assert proposal.tokens.tolist() == [expected.tokens]
    np.testing.assert_allclose(np.array(proposal.logits[0]), np.stack(expected.logits), atol=1e-3, rtol=1e-4)
    np.testing.assert_allclose(np.array(proposal.confidence[0]), expected.confidence, atol=1e-4)


def named(architecture: str):
    return lambda config: of_deepspec(config, architecture)


REFUSED = {  # keys inside dflash_config or a packaging, shapes of further weights (None: left out), words
    "dflash2": {
        "a missing key": ({"conv_group_size": None}, {}, ["conv_group_size missing"]),
        "groups that do not divide": ({"conv_group_size": 5}, {}, ["hidden_size 32", "conv_group_size 5"]),
        "more candidates than tokens": ({"selector_top_k": 33}, {}, ["selector_top_k 33", "32"]),
        "no candidates": ({"selector_top_k": 0}, {}, ["selector_top_k", "positive"]),
        "a rank that does not fit": ({"selector_rank": 4}, {}, ["codebook has shape (32, 5)", "(32, 4)"]),
        "taps that do not fit": ({"conv_kernel_size": 3}, {}, ["base_kernel has shape (2, 2, 32)"]),
    },
    "dspark": {
        "no packaging": (named("DFlashDraftModel"), {}, ["sample_from_anchor", "DFlashDraftModel"]),
        "head": ({"markov_head_type": "gate"}, {}, ["markov_head_type 'gate'", "'gated'"]),
        "rank": ({"markov_rank": -1}, {}, ["markov_rank", "-1"]),
        "switch": ({"enable_confidence_head": 2}, {}, ["enable_confidence_head", "true or false", "2"]),
        "temperatures": ({"confidence_temperatures": [1.0, 2.0]}, {}, ["confidence_temperatures", "8"]),
        "gated attention": (named("Qwen35DSparkModel"), {}, ["Qwen35DSparkModel", "gated attention"]),
        "MLA": (named("DeepseekV4DSparkModel"), {}, ["latent"]),
        "weights of another head": ({}, {"markov_head.gate_proj.weight": (4, 4)}, ["gate_proj", "Markov"]),
        "no weights": ({}, {"markov_head.markov_w1.weight": None}, ["lacks markov_head.markov_w1.weight"]),
    },
    "domino": {
        "no sizes": ({"emb_dim": None, "gru_hidden_dim": None}, {}, ["emb_dim, gru_hidden_dim missing"]),
        "size": ({"gru_hidden_dim": 0}, {}, ["gru_hidden_dim", "0"]),
        "prefix": ({"pure_draft_prefix_len": 9}, {}, ["pure_draft_prefix_len", "8 drafts", "9"]),
        "prefix of another type": ({"pure_draft_prefix_len": True}, {}, ["pure_draft_prefix_len", "True"]),
        "shift": ({"shift_label": "yes"}, {}, ["sample_from_anchor", "'yes'"]),
        "biases": ({}, {"prefix_gru.bias_ih_l0": (30,)}, ["prefix_gru.bias_ih_l0", "Domino"]),
        "two layers": ({}, {"prefix_gru.weight_hh_l1": (30, 10)}, ["prefix_gru.weight_hh_l1"]),
        "another width": ({"gru_hidden_dim": 11}, {}, ["prefix_gru.weight_ih_l0", "(33, 32)"]),
        "no weights": ({}, {"embed_proj.0.weight": None}, ["lacks embed_proj.0.weight"]),
        "a misspelt key": (
            {"pure_draft_prefix_length": 1}, {}, ["pure_draft_prefix_length", "'pure_draft_prefix_len'"]
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind, faults in REFUSED.items() for fault in faults])
def test_what_cannot_be_right_is_refused_in_one_line(tmp_path, kind, fault):
    changes, tensors, words = REFUSED[kind][fault]
    config, weights = packagings.published(random_drafter(kind, 3, VOCAB))
    config = inside(config, **changes) if isinstance(changes, dict) else changes(config)
    weights |= {name: mx.ones(shape) for name, shape in tensors.items() if shape}
    weights = {name: w for name, w in weights.items() if tensors.get(name, True)}
    packagings.assert_refused(tmp_path, config, weights, *words)
