"""Every published packaging of one drafter loads and drafts exactly what its plain form does; the rest is refused.

Through load_drafter: formats.py (configs), tensors.py (weights) and unsupported.py (what is refused). The plain form is
z-lab's; each case rewrites its config and weights as another packaging stores them.
"""

import json
import logging
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models import HIDDEN, LAYERS, draft_config, qwen3_model, random_drafter

from dflash import LoadedTargetModel, load_drafter, save_drafter
from dflash.errors import CheckpointError
from dflash.files import flat
from dflash.target.identity import target_fingerprint

VOCAB, BLOCK = 32, 8
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@lru_cache
def target(seed: int = 0) -> LoadedTargetModel:
    return LoadedTargetModel(qwen3_model(seed, VOCAB))


def plain(**changes) -> tuple[dict, dict]:
    """The published config and float32 weights of one drafter; equal but for ``changes`` to its config."""
    drafter = random_drafter(3, VOCAB, **changes)
    return json.loads(json.dumps(drafter.config.to_dict())), flat(drafter.parameters())


def write(folder: Path, config: dict, weights: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def logits(folder: Path, length: int = BLOCK - 1, context: int = 9) -> np.ndarray:
    """``[length, V]``, over a context that is longer than the windows here and arrives in two pieces."""
    drafter = load_drafter(folder)
    drafter.bind(target())
    cache = drafter.make_cache()
    size = len(drafter.target_layer_ids) * HIDDEN
    features = mx.random.normal((1, context, size), key=mx.random.key(7))
    for piece in (features[:, :4], features[:, 4:]):
        drafter.extend_context(piece, cache, mx.zeros(piece.shape[:2], mx.int32))
    return np.array(drafter.propose(mx.array([[5]]), length, cache).logits[0])


def inside(config: dict, **values) -> dict:
    return config | {"dflash_config": config["dflash_config"] | values}


def renamed(weights: dict, rename) -> dict:
    return {rename(name): w for name, w in weights.items()}


def with_copies(weights: dict) -> dict:
    """Copies of what is the target's, in every spelling; their values are never read."""
    table = mx.full((VOCAB, HIDDEN), 9.0)
    names = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
    tables = dict.fromkeys(names, table) | {"verifier_norm.weight": mx.ones(HIDDEN)}
    rotary = ("rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")
    return weights | tables | {name: mx.zeros(6) for name in rotary}


def deepspec(config: dict, **changes) -> dict:
    """Flat: no ``dflash_config``; the rest of the config is a copy of the target's."""
    flat_config = config | config["dflash_config"] | {"architectures": ["Qwen3DSparkModel"]}
    flat_config.pop("dflash_config")
    heads = {"markov_rank": 0, "markov_head_type": "vanilla", "enable_confidence_head": False, "num_anchors": 512}
    return flat_config | heads | {"sample_from_anchor": False, "partial_rotary_factor": 0.25} | changes


def speculators(config: dict, **changes) -> dict:
    """vLLM's: the decoder layer nested, tap ids one more, names of their own."""
    moved = ("dflash_config", "block_size", "architectures")
    nested = {name: value for name, value in config.items() if name not in moved}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config["block_size"] - 1}],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "aux_hidden_state_layer_ids": [i + 1 for i in config["dflash_config"]["target_layer_ids"]],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "block_size": config["block_size"],
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "max_anchors": 3072,
        "transformer_layer_config": nested | {"sliding_window": None},
        "tie_word_embeddings": False,
    } | changes


NOISE = {
    "_name_or_path": "/home/me/run", "initial_context_length": 4096, "transformers_version": "5.15.0",
    "do_sample": True, "temperature": 0.6, "top_k": 20, "num_beams": 1, "repetition_penalty": 1.0,
    "torch_dtype": "bfloat16", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "eos_token_id": [1, 2],
    "pad_token_id": None, "bos_token_id": None, "layer_norm_eps": 1e-5, "trained_steps": 12000, "notes": "mine",
    "router_aux_loss_coef": 0.001, "num_local_experts": 32, "swiglu_limit": 7.0, "max_window_layers": 28,
    "use_sliding_window": False, "attention_dropout": 0.0, "quantization": None, "quantization_config": None,
    "mlp_bias": False, "hidden_act": "silu", "attention_sink_bias": None, "logit_scale": 1.0, "markov_rank": 0,
}  # fmt: skip
FLOATS = {"hidden_size": 32.0, "num_hidden_layers": 2.0, "block_size": 8.0, "rope_theta": 10000, "head_dim": 12.0}
NULLS = {"rope_scaling": None, "sliding_window": None, "is_causal": None, "layer_types": None, "rope_parameters": None}

SAME = {
    "keys that say nothing": lambda c, w: (c | NOISE, w),
    "trainer's notes inside": lambda c, w: (inside(c, num_anchors=512, loss_decay_gamma=7.0, new_switch=False), w),
    "whole numbers with a point": lambda c, w: (inside(c | FLOATS, mask_token_id=31.0), w),
    "null values": lambda c, w: (c | NULLS, w),
    "block size inside": lambda c, w: (inside(c | {"block_size": 3}, block_size=8), w),
    "ids at the top": lambda c, w: (c | c["dflash_config"] | {"dflash_config": {}}, w),
    "the text config of a wrapper": lambda c, w: ({"text_config": c, "model_type": "wrapper"}, w),
    "text config beside dflash_config": lambda c, w: (
        {"text_config": {k: v for k, v in c.items() if k != "dflash_config"}, "dflash_config": c["dflash_config"]}, w
    ),
    "grouped attention named": lambda c, w: (inside(c, attention_mode="gqa", projector_type="dflash"), w),
    "the mask token's text": lambda c, w: (inside(c, mask_token="<|MASK|>"), w),
    "the target's quantisation": lambda c, w: (c | {"quantization_config": {"quant_method": "fp8"}}, w),
    "the target's list of layers": lambda c, w: (c | {"layer_types": [FULL] * 36}, w),
    "the target's text config": lambda c, w: (c | {"text_config": {"hidden_size": 99, "num_hidden_layers": 36}}, w),
    "layer ids with a point": lambda c, w: (inside(c, target_layer_ids=[0.0, 1.0, 3.0]), w),
    "prefix model.": lambda c, w: (c, renamed(w, lambda n: f"model.{n}")),
    "prefix of two wrappers": lambda c, w: (c, renamed(w, lambda n: f"module.model.{n}")),
    "prefix on some": lambda c, w: (c, renamed(w, lambda n: f"model.{n}" if n.startswith("layers") else n)),
    "copies of the target's weights": lambda c, w: (c, with_copies(w)),
    "copies under a prefix": lambda c, w: (c, renamed(with_copies(w), lambda n: f"model.{n}")),
    "assistant's names": lambda c, w: (
        c,
        renamed(w, lambda n: n.replace("layers.0.", "midlayer.").replace("hidden_norm", "encoder.output_norm_enc"))
        | {"encoder.fc.weight": w["fc.weight"]},
    ),
    "DeepSpec": lambda c, w: (deepspec(c), with_copies(w)),
    "speculators": lambda c, w: (speculators(c), with_copies(w)),
    "speculators without defaults": lambda c, w: (
        {k: v for k, v in speculators(c).items() if k not in ("speculators_config", "draft_vocab_size")}, w
    ),
    "speculators with tables of the whole vocabulary": lambda c, w: (
        speculators(c),
        with_copies(w) | {"d2t": mx.zeros(VOCAB, mx.int64), "t2d": mx.ones(VOCAB, mx.bool_)},
    ),
    "no head_dim": lambda c, w: ({k: v for k, v in c.items() if k != "head_dim"}, w),
    "rope inside rope_parameters": lambda c, w: (
        {k: v for k, v in c.items() if k not in ("rope_theta", "rope_scaling")}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        w,
    ),
    "no theta": lambda c, w: ({k: v for k, v in c.items() if k != "rope_theta"}, w),
    "theta of rope_parameters": lambda c, w: (
        c | {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, w
    ),
    "rope of images": lambda c, w: (c | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}, w),
}  # fmt: skip


@pytest.mark.parametrize("form", SAME)
def test_every_packaging_drafts_what_the_plain_form_does(tmp_path, form):
    config, weights = plain()
    changed_config, changed = SAME[form](config, dict(weights))
    if "encoder.fc.weight" in changed:
        changed.pop("fc.weight")
    expected = logits(write(tmp_path / "plain", config, weights))
    np.testing.assert_array_equal(logits(write(tmp_path / "other", changed_config, changed)), expected)


@pytest.mark.parametrize("stored", [mx.bfloat16, mx.float16])
def test_weights_of_every_floating_point_type_load(tmp_path, stored):
    config, weights = plain()
    weights = {n: w.astype(mx.bfloat16).astype(mx.float32) for n, w in weights.items()}
    folder = write(tmp_path / "other", config, {n: w.astype(stored) for n, w in weights.items()})
    np.testing.assert_allclose(logits(folder), logits(write(tmp_path / "plain", config, weights)), atol=1e-5)


# --- what a packaging says that is arithmetic ---------------------------------------------------------------


WINDOW = {"layer_types": (SLIDING, FULL), "sliding_window": 5}
LAYERED = {"layer_types": [SLIDING, FULL], "sliding_window": 5}
BY_TYPE = {FULL: YARN | {"rope_theta": 5000.0}, SLIDING: {"rope_type": "default"}}


def replaced(config: dict, *names: str, **values) -> dict:
    return {k: v for k, v in config.items() if k not in names} | values


MEANS = {  # packaging of a config: what it means, in plain words of ours
    "dflash_config.causal": (lambda c: inside(c, causal=True), {"is_causal": True}),
    "causal false on sliding layers": (lambda c: inside(c | LAYERED, causal=False), WINDOW | {"is_causal": False}),
    "is_causal before causal": (lambda c: inside(c | {"is_causal": True}, causal=False), {"is_causal": True}),
    "causal head": (lambda c: inside(c, causal_head=True), {"is_causal": True}),
    "causal head false": (lambda c: inside(c | LAYERED, causal_head=False), WINDOW),
    "query causal": (lambda c: c | {"dflash_query_causal": True}, {"is_causal": True}),
    "speculators with a window": (
        lambda c: speculators(
            replaced(c, "layer_types", "sliding_window"), layer_types=[SLIDING, FULL], sliding_window=5
        ),
        WINDOW,
    ),
    "speculators, not causal": (
        lambda c: speculators(c | LAYERED, sliding_window=5, sliding_window_non_causal=True),
        WINDOW | {"is_causal": False},
    ),
    "window by number of layers": (
        lambda c: replaced(c, "layer_types", use_sliding_window=True, max_window_layers=1, sliding_window=5),
        {"layer_types": (FULL, SLIDING), "sliding_window": 5},
    ),
    "window that is not used": (
        lambda c: replaced(c, "layer_types", use_sliding_window=False, max_window_layers=0, sliding_window=5), {}
    ),
    "softcap of the top level": (lambda c: c | {"final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
    "softcap off inside": (lambda c: inside(c | {"final_logit_softcapping": 3.0}, final_logit_softcapping=None), {}),
    "softcap 0": (lambda c: c | {"final_logit_softcapping": 0}, {}),
    "pairs of neighbours": (lambda c: c | {"rope_is_neox_style": False}, {"rope_is_neox_style": False}),
    "pairs of neighbours inside": (lambda c: inside(c, is_neox_style=False), {"rope_is_neox_style": False}),
    "lone type": (
        lambda c: c | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": YARN},
    ),
    "rope_type before type": (
        lambda c: c | {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "rope_scaling before rope_parameters": (
        lambda c: c | {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        {"rope_scaling": YARN},
    ),
    "yarn inside rope_parameters": (
        lambda c: replaced(c, "rope_theta", rope_parameters=YARN | {"rope_theta": 5000.0}),
        {"rope_scaling": YARN, "rope_theta": 5000.0},
    ),
    "original length of the top level": (
        lambda c: c
        | {"rope_scaling": YARN | {"original_max_position_embeddings": 9}, "original_max_position_embeddings": 64},
        {"rope_scaling": YARN},
    ),
    "rope by layer type": (
        lambda c: c | {"rope_parameters": BY_TYPE, "layer_types": [SLIDING, FULL], "sliding_window": 5},
        WINDOW
        | {"rope_parameters": {FULL: YARN | {"rope_theta": 5000.0}, SLIDING: {"rope_theta": 10000.0}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", MEANS)
def test_what_a_packaging_says_means_the_same_arithmetic(tmp_path, form):
    packaging, meaning = MEANS[form]
    config, weights = plain()
    found = logits(write(tmp_path / "form", packaging(config), weights))
    np.testing.assert_array_equal(found, logits(write(tmp_path / "plain", *plain(**meaning))))
    if meaning:
        assert np.abs(found - logits(write(tmp_path / "other", config, weights))).max() > 1e-3, "nothing changed"


def test_biases_of_attention_take_part(tmp_path):
    config, weights = plain(attention_bias=True)
    assert config["attention_bias"] is True
    assert "layers.1.self_attn.o_proj.bias" in weights
    drafts = logits(write(tmp_path / "biased", config, weights))
    none = {n: mx.zeros_like(w) if n.endswith("bias") else w for n, w in weights.items()}
    without = logits(write(tmp_path / "zero", config, none))
    assert np.abs(drafts - without).max() > 1e-3
    bare = {n: w for n, w in weights.items() if not n.endswith("bias")}
    np.testing.assert_allclose(without, logits(write(tmp_path / "plain", *plain()[:1], bare)), atol=1e-5)


@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "DSparkDraftModel"])
def test_a_deepspec_drafter_drafts_at_the_anchors_position_too(tmp_path, architecture):
    """Its block of 8 positions holds 8 drafts, and the first is read where z-lab's block has the anchor."""
    config, weights = plain()
    packaged = deepspec(config, architectures=[architecture])
    packaged.pop("sample_from_anchor")
    folder = write(tmp_path / "dspark", packaged, weights)
    assert load_drafter(folder).block_size == BLOCK + 1
    drafts = logits(folder, length=BLOCK)
    np.testing.assert_array_equal(drafts[1:], logits(write(tmp_path / "plain", config, weights)))
    save_drafter(load_drafter(folder), tmp_path / "again", dtype=mx.float32)
    np.testing.assert_array_equal(logits(tmp_path / "again", length=BLOCK), drafts)


@pytest.mark.parametrize(
    ("drafts", "explicit", "width"), [(7, None, 8), (8, None, 9), (None, True, 9), (None, False, 8), (None, None, 8)]
)
def test_speculators_say_how_many_drafts_a_block_holds(tmp_path, drafts, explicit, width):
    config, weights = plain()
    packaged = speculators(config, sample_from_anchor=explicit)
    packaged["speculators_config"]["proposal_methods"] = [{"speculative_tokens": drafts}] if drafts else []
    assert load_drafter(write(tmp_path, packaged, weights)).block_size == width


# --- reduced vocabularies -----------------------------------------------------------------------------------

KNOWN = [0, 3, 4, 9, 17, 30]


def reduced(config: dict, weights: dict, head: bool, tables: str) -> tuple[dict, dict]:
    known = mx.array(KNOWN, mx.int64)
    mask = mx.zeros(VOCAB, mx.bool_)
    mask[known] = True
    weights = dict(weights)
    if head:
        weights["lm_head.weight"] = target().model.model.embed_tokens.weight[known]
    if "d2t" in tables:
        weights["d2t"] = known - mx.arange(len(KNOWN))
    if "t2d" in tables:
        weights["t2d"] = mask
    return speculators(config, draft_vocab_size=len(KNOWN)), weights


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("tables", ["d2t and t2d", "d2t", "t2d"])
def test_a_reduced_vocabulary_drafts_the_targets_ids(tmp_path, head, tables):
    config, weights = plain()
    whole = logits(write(tmp_path / "plain", config, weights))
    folder = write(tmp_path / "reduced", *reduced(config, weights, head, tables))
    drafts = logits(folder)
    np.testing.assert_allclose(drafts[:, KNOWN], whole[:, KNOWN], atol=1e-4)
    assert np.isneginf(np.delete(drafts, KNOWN, axis=1)).all()
    save_drafter(load_drafter(folder), tmp_path / "again", dtype=mx.float32)
    np.testing.assert_array_equal(logits(tmp_path / "again"), drafts)


def broken_table(weights: dict, **changes) -> dict:
    return {n: w for n, w in (weights | changes).items() if w is not None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d2t": None, "t2d": None}, "lacks d2t"),
        ({"d2t": mx.zeros(5, mx.int64)}, "d2t has shape \\(5,\\)"),
        ({"d2t": mx.zeros(6)}, "expected 6 whole numbers"),
        ({"d2t": mx.full(6, 99), "t2d": None}, "different ids below 32"),
        ({"d2t": mx.array([1, 0, 0, 0, 0, 0]), "t2d": None}, "different ids below 32"),
        ({"t2d": mx.ones(VOCAB, mx.bool_)}, "the same in both tables"),
        ({"t2d": mx.ones(9, mx.bool_)}, "t2d has shape \\(9,\\)"),
        ({"lm_head.weight": mx.zeros((7, HIDDEN))}, "lm_head.weight has shape \\(7, 32\\)"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, changes, words):
    config, weights = reduced(*plain(), head=True, tables="d2t and t2d")
    with pytest.raises(CheckpointError, match=words):
        load_drafter(write(tmp_path, config, broken_table(weights, **changes)))


# --- refused by name ----------------------------------------------------------------------------------------

REFUSED = {
    "DFlash 2": ({"architectures": ["DFlash2DraftModel"]}, {}, {}, ["DFlash2DraftModel", "DFlash 2"]),
    "DFlash 2 by its keys": ({}, {"conv_kernel_size": 2, "conv_group_size": 16}, {}, ["conv_", "DFlash 2"]),
    "DFlash 2 by its weights": ({}, {}, {"candidate_selector.successor_codebook": 1}, ["candidate_", "DFlash 2"]),
    "MLA": ({}, {"attention_mode": "mla"}, {}, ["attention_mode 'mla'", "latent"]),
    "sinks": ({"attention_sink_bias": True}, {}, {}, ["attention_sink_bias", "sinks"]),
    "sinks by weights": ({}, {}, {"layers.0.self_attn.sinks": 1}, ["sinks", "a learned logit"]),
    "auxiliary norms": ({"fc_norm": True}, {}, {}, ["fc_norm", "auxiliary norms"]),
    "auxiliary norms by weights": ({}, {}, {"aux_hidden_norms.0.weight": 1}, ["aux_hidden_norms", "Laguna"]),
    "Laguna": ({"decoder_layer_type": "laguna"}, {}, {}, ["decoder_layer_type", "Laguna"]),
    "gate by weights": ({}, {}, {"layers.0.self_attn.g_proj.weight": 1}, ["g_proj", "gate"]),
    "Markov head": ({"markov_rank": 256}, {}, {}, ["markov_rank 256", "Markov"]),
    "Markov head inside": ({}, {"projector_type": "dspark", "markov_rank": 256}, {}, ["markov_rank 256", "Markov"]),
    "Markov head by weights": ({}, {}, {"markov_head.markov_w1.weight": 1}, ["markov_w1", "Markov"]),
    "confidence head": ({"enable_confidence_head": True}, {}, {}, ["enable_confidence_head", "confidence"]),
    "Domino": ({}, {"projector_type": "domino"}, {}, ["projector_type 'domino'", "Domino"]),
    "Domino by weights": ({}, {}, {"prefix_gru.weight_ih_l0": 1}, ["prefix_gru", "Domino"]),
    "length head": ({"use_thresh_head_two_model": True}, {}, {}, ["use_thresh_head_two_model", "length"]),
    "length head by weights": ({}, {}, {"thresh_head_two_model.out.bias": 1}, ["thresh_head", "length"]),
    "DFlare": ({"architectures": ["QwenDFlareDraftModel"]}, {}, {}, ["QwenDFlareDraftModel", "DFlare"]),
    "DFlare by weights": ({}, {}, {"layer_fusion_weights": 1}, ["layer_fusion_weights", "DFlare"]),
    "Gemma 4 block": ({"architectures": ["Gemma4DSparkModel"]}, {}, {}, ["Gemma4DSparkModel", "Gemma 4"]),
    "an Eagle": ({"speculators_model_type": "eagle3"}, {}, {}, ["eagle3", "Eagle"]),
    "window by a switch": ({}, {"use_swa": True, "swa_window_size": 4}, {}, ["use_swa", "layer_types"]),
    "shifted drafts": ({}, {"draft_shift": True}, {}, ["draft_shift"]),
    "mask embedding": ({}, {}, {"mask_embedding": 1}, ["mask_embedding"]),
    "other width": ({"target_hidden_size": 48}, {}, {}, ["target_hidden_size 48", "another width"]),
    "experts": ({}, {}, {"layers.0.mlp.experts.0.up_proj.weight": 1}, ["experts", "mixture"]),
    "factor of the target": ({"logit_scale": 0.0625}, {}, {}, ["logit_scale 0.0625"]),
    "no norms of queries": ({"use_qk_norm": False}, {}, {}, ["use_qk_norm"]),
    "activation": ({"hidden_act": "gelu"}, {}, {}, ["hidden_act 'gelu'", "SiLU"]),
    "unknown switch inside": ({}, {"new_switch": True}, {}, ["dflash_config", "'new_switch'"]),
    "unknown rope": ({"rope_scaling": {"rope_type": "spiral"}}, {}, {}, ["'spiral'"]),
    "layers without rope": ({"rope_parameters": {FULL: None}}, {}, {}, ["full_attention", "rotary"]),
    "embeddings as features": ({"aux_hidden_state_layer_ids": [0, 2]}, {"target_layer_ids": None}, {}, ["embeddings"]),
    "reduced without its size": ({}, {}, {"d2t": 5}, ["d2t", "draft_vocab_size"]),
    "another library's quantisation": (
        {"quantization_config": {"quant_method": "awq", "bits": 4}}, {}, {"fc.qweight": 1, "fc.scales": 1}, ["'awq'"]
    ),
    "packed by another library": ({}, {}, {"fc.weight_packed": 1}, ["fc.weight_packed", "not MLX's"]),
    "interleaved rope": ({"rope_interleave": True}, {}, {}, ["rope_interleave", "rope_is_neox_style"]),
    "scales without description": ({}, {}, {"fc.scales": 1}, ["fc.scales", "quantization"]),
    "NaN": ({}, {}, {"fc.weight": "nan"}, ["fc.weight", "NaN"]),
    "whole numbers": ({}, {}, {"fc.weight": "int"}, ["fc.weight", "int32", "floating-point"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, name):
    top, nested, tensors, words = REFUSED[name]
    config, weights = plain()
    for tensor, value in tensors.items():
        shape = weights["fc.weight"].shape
        made = {"nan": mx.full(shape, mx.nan), "int": mx.ones(shape, mx.int32)}.get(value)
        weights[tensor] = mx.full((4, 4), value) if made is None else made
    with pytest.raises(CheckpointError) as error:
        load_drafter(write(tmp_path, inside(config | top, **nested), weights))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_keys_that_are_passed_over_are_in_the_debug_log(tmp_path, caplog):
    config, weights = plain()
    with caplog.at_level(logging.DEBUG, logger="dflash.drafters.formats"):
        load_drafter(write(tmp_path, config | {"_name_or_path": "x", "do_sample": True}, weights))
    assert any("_name_or_path" in line and "do_sample" in line for line in caplog.messages)
    assert not [r for r in caplog.records if r.levelno > logging.DEBUG]


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "GptOss", "Gemma3Text", "Qwen3Moe", "Qwen3Next"])
def test_a_copy_of_a_targets_config_around_the_drafters_own_keys_loads(tmp_path, family):
    """Trainers start from the target's config; what they leave of it is no error."""
    transformers = pytest.importorskip("transformers")
    copied = getattr(transformers, f"{family}Config")().to_dict()
    config, weights = plain()
    own = config | {"hidden_act": "silu", "final_logit_softcapping": None, "rope_parameters": None}
    own |= {"attention_bias": False}
    folder = write(tmp_path / "copied", json.loads(json.dumps(copied | own, default=str)), weights)
    np.testing.assert_array_equal(logits(folder), logits(write(tmp_path / "plain", config, weights)))


def test_layer_ids_that_are_assumed_are_named(caplog):
    with caplog.at_level(logging.WARNING):
        assert draft_config(target_layer_ids=(), num_target_layers=28, num_hidden_layers=2).target_layer_ids == (1, 25)
    assert "[1, 25]" in caplog.text


def test_a_drafter_on_another_target_of_the_same_shape_gets_a_warning(caplog):
    drafter = random_drafter(3, VOCAB, target_fingerprint=target_fingerprint(target()))
    with caplog.at_level(logging.WARNING):
        drafter.bind(target())
        random_drafter(3, VOCAB).bind(target(1))
        assert caplog.messages == []
        drafter.bind(target(1))
    assert "another target of the same shape" in caplog.text
    assert len(target().adapter.layers) == LAYERS


def test_packagings_mix(tmp_path):
    """Speculators, prefixed, packed, in two files, with a reduced vocabulary, biases and a rope by layer type."""
    meaning = {"attention_bias": True, "intermediate_size": 64, "head_dim": 16, "layer_types": (SLIDING, FULL)}
    config, weights = plain(**meaning, sliding_window=5, rope_parameters=BY_TYPE)
    packed_config, packed = reduced(config, weights, head=True, tables="d2t and t2d")
    packed_config |= {"sliding_window": 5}
    dense = dict(packed)
    for name in [name for name, w in weights.items() if w.ndim == 2]:
        parts = mx.quantize(packed[name], group_size=32, bits=8)
        dense[name] = mx.dequantize(*parts, group_size=32, bits=8)
        layer = name.removesuffix(".weight")
        packed |= dict(zip((name, f"{layer}.scales", f"{layer}.biases"), parts, strict=True))
    packed = renamed(with_copies(dense) | packed, lambda name: f"model.{name}")
    files = {f"model-0000{i}-of-00002.safetensors": sorted(packed)[i - 1 :: 2] for i in (1, 2)}
    folder = tmp_path / "mixed"
    folder.mkdir()
    for file, names in files.items():
        mx.save_safetensors(str(folder / file), {name: packed[name] for name in names})
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    quantization = {"quantization": {"group_size": 32, "bits": 8, "model.lm_head": False}}
    (folder / "config.json").write_text(json.dumps(packed_config | quantization | NOISE | quantization))

    drafts = logits(folder)
    np.testing.assert_allclose(drafts, logits(write(tmp_path / "plain", packed_config, dense)), atol=1e-3, rtol=1e-4)
    save_drafter(load_drafter(folder), tmp_path / "again", dtype=mx.float32)
    np.testing.assert_array_equal(logits(tmp_path / "again"), drafts)
