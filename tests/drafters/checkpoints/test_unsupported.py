"""What is not supported is refused by name; what means nothing to a drafter is ignored."""

import logging

import mlx.core as mx
import pytest
from support.packagings import FULL, assert_refused, inside, plain, write

from dflash import load_drafter
from dflash.core.errors import CheckpointError

REFUSED = {
    "DFlash 2 as DFlash": ({"drafter_kind": "dflash"}, {"conv_kernel_size": 2}, {}, ["conv_", "DFlash 2"]),
    "DFlash 2 with MLA": (
        {"architectures": ["DFlash2DraftModel"]}, {"attention_mode": "mla"}, {}, ["attention_mode", "latent attention"]
    ),
    "DFlash 2 by its weights": ({}, {}, {"candidate_selector.successor_codebook": 1}, ["candidate_", "DFlash 2"]),
    "MLA": ({}, {"attention_mode": "mla"}, {}, ["attention_mode 'mla'", "latent"]),
    "sinks": ({"attention_sink_bias": True}, {}, {}, ["attention_sink_bias", "sinks"]),
    "sinks by weights": ({}, {}, {"layers.0.self_attn.sinks": 1}, ["sinks", "a learned logit"]),
    "auxiliary norms": ({"fc_norm": True}, {}, {}, ["fc_norm", "auxiliary norms"]),
    "auxiliary norms by weights": ({}, {}, {"aux_hidden_norms.0.weight": 1}, ["aux_hidden_norms", "Laguna"]),
    "Laguna": ({"decoder_layer_type": "laguna"}, {}, {}, ["decoder_layer_type", "Laguna"]),
    "gate by weights": ({}, {}, {"layers.0.self_attn.g_proj.weight": 1}, ["g_proj", "gate"]),
    "Markov head": ({"drafter_kind": "dflash", "markov_rank": 256}, {}, {}, ["markov_rank 256", "Markov"]),
    "Markov head by weights": ({}, {}, {"markov_head.markov_w1.weight": 1}, ["markov_w1", "Markov"]),
    "confidence head": (
        {"drafter_kind": "dflash", "enable_confidence_head": True}, {}, {}, ["enable_confidence_head", "confidence"]
    ),
    "Domino as DFlash": (
        {"drafter_kind": "dflash"}, {"projector_type": "domino", "emb_dim": 8}, {}, ["emb_dim 8", "Domino"]
    ),
    "Domino by weights": ({}, {}, {"prefix_gru.weight_ih_l0": 1}, ["prefix_gru", "Domino"]),
    "length head": ({"use_thresh_head_two_model": True}, {}, {}, ["use_thresh_head_two_model", "length"]),
    "length head by weights": ({}, {}, {"thresh_head_two_model.out.bias": 1}, ["thresh_head", "length"]),
    "DFlare of speculators": ({"speculators_model_type": "dflare"}, {}, {}, ["dflare", "DFlare"]),
    "DFlare of TorchSpec": (
        {"dflare_config": {"mask_token_id": 5}}, {"mask_token_id": None}, {}, ["dflare_config", "DFlare", "TorchSpec"]
    ),
    "speculators' older form": (
        {"speculative_config": {"mask_token_id": 5}}, {"mask_token_id": None}, {}, ["speculative_config", "older"]
    ),
    "DFlare by weights": ({}, {}, {"layer_fusion_weights": 1}, ["layer_fusion_weights", "DFlare"]),
    "Gemma 4 block": ({"architectures": ["Gemma4DSparkModel"]}, {}, {}, ["Gemma4DSparkModel", "Gemma 4"]),
    "DFlare without its sign": (
        {}, {}, {"fc.weight": None, "layer_fusion_weights": 1}, ["lacks fc.weight", "layer_fusion_weights", "DFlare"]
    ),
    "an algorithm of speculators": (
        {"speculators_model_type": "jetspec"}, {}, {}, ["'jetspec'", "expected dflash, dflash2, dspark, domino"]
    ),
    "Domino's size": ({}, {"emb_dim": 256}, {}, ["emb_dim 256", "Domino"]),
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
        shape = weights["fc.weight"].shape if "fc.weight" in weights else ()
        made = {"nan": mx.full(shape, mx.nan), "int": mx.ones(shape, mx.int32)}.get(value)
        weights[tensor] = mx.full((4, 4), value or 0) if made is None else made
        if value is None:
            del weights[tensor]
    assert_refused(tmp_path, inside(config | top, **nested), weights, *words)


def test_sizes_of_another_head_mean_nothing_to_a_projector_that_has_none(tmp_path):
    config, weights = plain()
    sizes = {"pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024}
    load_drafter(write(tmp_path / "outside", config | sizes | {"projector_type": "dflash"}, weights))
    load_drafter(write(tmp_path / "inside", inside(config, **sizes, projector_type="dflash"), weights))


def test_a_mask_embedding_in_a_file_of_its_own_is_refused(tmp_path):
    write(tmp_path, *plain())
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt is not supported"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "warned"),
    [
        ("use_post_norm", True, True),
        ("fc_bias", True, True),
        ("residual_scale", True, True),
        ("use_post_norm", False, False),
        ("layer_norm_eps", 1e-5, False),
        ("norm_topk_prob", True, False),
        ("use_cache", True, False),
    ],
)
def test_an_unknown_switch_of_a_part_is_warned_of(tmp_path, caplog, key, value, warned):
    config, weights = plain()
    load_drafter(write(tmp_path, config | {key: value}, weights))
    assert [key in line and "fewer drafts are accepted" in line for line in caplog.messages] == [True] * warned


def test_keys_that_are_ignored_are_in_the_debug_log(tmp_path, caplog):
    config, weights = plain()
    with caplog.at_level(logging.DEBUG, logger="dflash.drafters.checkpoints.formats"):
        load_drafter(write(tmp_path, config | {"_name_or_path": "x", "do_sample": True}, weights))
    assert any("_name_or_path" in line and "do_sample" in line for line in caplog.messages)
    assert not [r for r in caplog.records if r.levelno > logging.DEBUG]
