"""A small random model of every architecture of the installed mlx-lm.

``VALUES`` are small sizes by field name, ``CHANGES`` what one architecture needs beyond them. Windows are 8 to 16
tokens, so that a short run wraps them several times. Random weights keep the scale of activations, so that every layer
depends on its input and best tokens lead clearly.
"""

import dataclasses
import importlib
import pkgutil
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_unflatten

from dflash.core.files import flat

HIDDEN, VOCAB, WINDOW = 64, 96, 12
FULL, SLIDING = "full_attention", "sliding_attention"

NOT_MODELS = {
    *("activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline"),
    *("rope_utils", "ssm", "switch_layers"),
}
"""Modules of ``mlx_lm.models`` that are no architectures."""

VALUES: dict[str, Any] = {
    # sizes
    **dict.fromkeys(("hidden_size", "hidden_dim", "n_embd", "d_model", "model_dim", "block_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "intermediate_size_mlp"), 128),
    **dict.fromkeys(("shared_intermediate_size", "shared_expert_intermediate_size", "dense_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "max_seq_len"), 4096),
    # attention
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("rope_theta", "swa_rope_theta", "rotary_emb_base", "global_rope_theta"), 10_000.0),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 0.5),
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "layernorm_epsilon"), 1e-5),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "use_qk_norm", "qk_norm"), False),
    "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 16.0,
    "tie_word_embeddings": False,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 2048,
    # experts: the router's choice must not flip with rounding, so all of few experts are asked
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "decoder_sparse_step", "first_k_dense_replace", "moe_layer_freq"), 1),
    **dict.fromkeys(("norm_topk_prob", "use_expert_bias"), True),
    "routed_scaling_factor": 1.0,
    "mlp_only_layers": (),
    "num_dense_layers": 1,
    # recurrent layers
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "conv1d_width", "d_conv"), 4),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "time_step_rank"), 16),
    **dict.fromkeys(("conv_L_cache", "short_conv_kernel_size"), 3),
    **dict.fromkeys(("use_conv_bias", "conv_bias"), True),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 32),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    "mamba_proj_bias": False,
    # others
    **dict.fromkeys(("scale_emb", "scale_depth", "logits_scaling", "embedding_multiplier"), 1.0),
    **dict.fromkeys(("attention_multiplier", "residual_multiplier"), 0.5),
    "dim_model_base": HIDDEN,
}

SLIDING_4 = [SLIDING, FULL, SLIDING, FULL]
RECURRENT_4 = ["linear_attention", "linear_attention", "linear_attention", FULL]
MAMBA_4 = ["mamba", "attention", "mamba", "attention"]
LINEAR_ATTENTION = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 2,
    "head_dim": 32,
    "short_conv_kernel_size": 3,
    "kda_safe_gate": True,
    "gate_lower_bound": -5.0,
}
YARN = {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096}
LLAMA4_ROPE = YARN | {"rope_theta": 10_000.0, "llama_4_scaling_beta": 0.1, "mscale_all_dim": 0.0}
LONGCAT = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_num": 1, "num_layers": 2}
GEMMA_LAYERS = {"num_hidden_layers": 6, "sliding_window_pattern": 3, "layer_types": [SLIDING, SLIDING, FULL] * 2}

CHANGES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2, "hidden_dim_scale_factor": 2.0},
    "afmoe": {"layer_types": SLIDING_4},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2, "num_swa_key_value_heads": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 2, "num_key_value_heads": 4},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 2, "num_key_value_heads": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": YARN | {"mscale_all_dim": 0, "mscale": 1.0, "beta_fast": 32, "beta_slow": 1}},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": SLIDING_4, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gear": {"layer_types": [SLIDING, FULL, "conv_mixer", "conv_mixer"]},
    "gemma3_text": GEMMA_LAYERS,
    "gemma3n": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": [SLIDING, FULL] * 3,
        "rope_local_base_freq": 10_000.0,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": GEMMA_LAYERS | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16},
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "granitemoehybrid": {"layer_types": MAMBA_4, "position_embedding_type": "rope"},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "layers_block_type": MAMBA_4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 2,
    },
    "kimi_k3": {
        "linear_attn_config": LINEAR_ATTENTION,
        "activation_situ_beta": 4.0,
        "attn_res_block_size": 2,
        "num_experts_per_token": 2,
    },
    "kimi_linear": {"linear_attn_config": LINEAR_ATTENTION, "num_experts_per_token": 2},
    "laguna": {"layer_types": SLIDING_4},
    "lfm2": {
        "layer_types": ["conv", FULL, "conv", FULL],
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 128,
    },
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv", FULL]},
    "lille-130m": {"block_size": 4096},
    "llama": {"layer_types": SLIDING_4},
    "llama4": {
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
        "rope_scaling": None,
        "attention_chunk_size": WINDOW,
        "use_qk_norm": True,
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": LONGCAT | {"attention_method": "MLA", "zero_expert_type": "identity"},
    "longcat_flash_ngram": LONGCAT
    | {"attention_method": "MLA", "zero_expert_type": "identity", "ngram_vocab_size_ratio": 2},
    "mamba2": {"time_step_limit": [0.0, 100.0]},
    "mellum": {
        "layer_types": SLIDING_4,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 10_000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "minicpm3": {"rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}},
    "minimax_m3_vl": {"moe_layer_freq": [0, 1, 1, 1], "mlp_layer_types": None},
    "ministral3": {"layer_types": SLIDING_4, "rope_parameters": LLAMA4_ROPE},
    "mistral4": {"rope_parameters": LLAMA4_ROPE, "num_key_value_heads": 4},
    "muse_spark": {
        "layer_types": SLIDING_4,
        "layer_rope_theta": [10_000.0, 0, 10_000.0, 0],
        "rope_parameters": {"rope_theta": 10_000.0},
        "post_norm_eps": 1e-5,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.5,
        "moe_hidden_size": 64,
        "num_shared_experts": 0,
    },
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": i == 1, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.0, "no_op": i == 2, "replace_with_linear": False},
            }
            for i in range(4)
        ]
    },
    "nemotron_h": {"hybrid_override_pattern": "M*-M", "time_step_limit": [0.0, 100.0]},
    "olmo_hybrid": {"layer_types": RECURRENT_4, "linear_allow_neg_eigval": True},
    "openelm": {
        "ffn_dim_divisor": 32,
        "ffn_multipliers": [1.0] * 4,
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4,
    },
    "phi3small": {
        "vocab_size": 100_352,  # its head silences tokens by fixed number
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 128,
        "gegelu_limit": 20.0,
    },
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16, "num_key_value_heads": 4},
    "recurrent_gemma": {
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
        "attention_bias": False,
        "num_key_value_heads": 1,
        "lru_width": 64,
    },
    "rwkv7": dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 16),
    "spark2_5": {
        "layer_types": SLIDING_4,
        "rope_parameters": {FULL: {"rope_theta": 10_000.0}, SLIDING: {"rope_theta": 10_000.0}},
    },
    "step3p5": {"layer_types": SLIDING_4, "share_expert_dim": 64},
}
"""What an architecture (or the text model of a wrapper) needs beyond ``VALUES``."""

TEXT_MODELS = {
    "gemma3": "gemma3_text.ModelArgs",
    "gemma3n": "gemma3n.TextConfig",
    "gemma4": "gemma4_text.ModelArgs",
    "kimi_k25": "deepseek_v3.ModelArgs",
    "kimi_k3": "kimi_k3.TextArgs",
    "kimi_vl": "kimi_vl.TextArgs",
    "lfm2-vl": "lfm2.ModelArgs",
    "llama4": "llama4.TextArgs",
    "minimax_m3_vl": "minimax_m3_vl.TextArgs",
    "mistral3": "ministral3.ModelArgs",
    "muse_spark": "muse_spark.TextArgs",
    "pixtral": "llama.ModelArgs",
    "qwen2_vl": "qwen2.ModelArgs",
    "qwen3_5": "qwen3_5.TextModelArgs",
    "qwen3_5_moe": "qwen3_5.TextModelArgs",
    "qwen3_vl": "qwen3.ModelArgs",
    "qwen3_vl_moe": "qwen3_moe.ModelArgs",
}
"""Wrappers around a language model, with the config class of their ``text_config``."""


def architecture_names() -> list[str]:
    """Every module of ``mlx_lm.models`` that is an architecture."""
    return sorted(m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__) if m.name not in NOT_MODELS)


def build(name: str, seed: int = 0, limit: int = 20_000_000, **changes: Any) -> nn.Module:
    """A small float32 model of the architecture ``name`` with random weights; ``changes`` go to its (text) config.

    Raises ``ValueError`` if it would have more than ``limit`` parameters.
    """
    module = importlib.import_module(f"mlx_lm.models.{name}")
    if name in TEXT_MODELS:
        text_module, _, text_class = TEXT_MODELS[name].rpartition(".")
        args_class = getattr(importlib.import_module(f"mlx_lm.models.{text_module}"), text_class)
        text_config = small_config(args_class, text_module, changes)
        config = {"model_type": name, "vocab_size": VOCAB, "text_config": text_config}
    else:
        config = small_config(module.ModelArgs, name, changes)
    mx.random.seed(seed)  # some models draw vectors, which stay near their first values
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters = sum(w.size for w in flat(model.parameters()).values())
    if parameters > limit:
        raise ValueError(f"{name} is not small: {parameters:,} parameters")
    return randomize(model, seed)


def small_config(args_class: type, model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Values for the fields that ``args_class`` has, then the architecture's own, then ``changes``."""
    names = {f.name for f in dataclasses.fields(args_class)}
    small = {name: list(v) if isinstance(v, tuple) else v for name, v in VALUES.items() if name in names}
    return {"model_type": model_type} | small | CHANGES.get(model_type, {}) | changes


def randomize(model: nn.Module, seed: int) -> nn.Module:
    """Random matrices that keep the scale of activations, embeddings of size 1, vectors near their old values."""
    weights = []
    for i, (name, w) in enumerate(flat(model.parameters()).items()):
        if not mx.issubdtype(w.dtype, mx.floating):
            continue
        noise = mx.random.normal(w.shape, key=mx.random.key(1000 * seed + i))
        if w.ndim < 2:
            weights.append((name, w.astype(mx.float32) + 0.1 * noise))
        elif "embed" in name or "wte" in name:
            weights.append((name, noise))
        else:
            weights.append((name, noise * 1.5 * w.shape[-1] ** -0.5))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model
