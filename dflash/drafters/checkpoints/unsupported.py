"""Config keys, architectures and weights of published drafters that are not supported, each refused by name."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...core.errors import CheckpointError
from ...core.values import short

_MLA = "multi-head latent attention"
_DFLASH2 = "DFlash 2 (dynamic convolutions and a path selector)"
_DSPARK = "DSpark's Markov head"
_CONFIDENCE = "DSpark's confidence head"
_DOMINO = "Domino (a recurrent head over the drafted tokens)"
_DFLARE = "DFlare (every layer mixes the target's layers by itself)"
_LENGTH = "AdaFlash's length head"
_SINKS = "attention sinks (a learned logit for each head)"
_NORMS = "auxiliary norms (each target layer's features are normalised on their own, as in Laguna)"
_GEMMA = "the Gemma 4 block (norms after attention and MLP, a scale for each layer)"
_MASK = "a mask embedding of the drafter's own"
_SCALE = "a factor of the target's own arithmetic, which drafters of this format do not have"
_WIDTH = "a drafter of another width than its target"
_SWA = "a sliding window for all layers by one switch; name sliding layers in layer_types instead"

_GATED = "gated attention and offset norms, as in Qwen3.5"
_INTERLEAVED = "rotary positions of neighbouring pairs; published drafters say so by rope_is_neox_style false"

DOMINO_SIZES = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
"""Sizes of Domino's head, which some trainers write for every ``projector_type``."""

_OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "default")

_KEYS: dict[str, str] = {
    "conv_kernel_size": _DFLASH2, "conv_group_size": _DFLASH2, "selector_rank": _DFLASH2, "selector_top_k": _DFLASH2,
    "selector_vocab_size": _DFLASH2, "dflash2_dynamic_conv": _DFLASH2, "dflash2_candidate_selector": _DFLASH2,
    "markov_rank": _DSPARK, "enable_confidence_head": _CONFIDENCE,
    "shift_label": _DOMINO, **dict.fromkeys(DOMINO_SIZES, _DOMINO),
    "layer_fusion": _DFLARE, "use_layer_fusion": _DFLARE,
    "use_thresh_head_two_model": _LENGTH, "thresh_head_bottleneck_dim": _LENGTH, "thresh_head_direct_len": _LENGTH,
    "attention_sink_bias": _SINKS, "add_swa_attention_sink_bias": _SINKS, "add_full_attention_sink_bias": _SINKS,
    "attention_sinks": _SINKS, "use_attention_sinks": _SINKS, "use_sinks": _SINKS,
    "aux_hidden_norms": _NORMS, "use_aux_hidden_norms": _NORMS, "fc_norm": _NORMS, "use_fc_norm": _NORMS,
    "norm_before_fc": _NORMS,
    "g_proj": "a gate on the attention's output, as in Laguna",
    "dflash_context_residual": "a residual from the last context token",
    "dflash_block_position_embedding": "learned embeddings of block positions",
    "dflash_gated_layer_fusion": "a gated mix of the target's layers",
    "enable_qwen35_gated_q_proj": _GATED,
    "mask_embedding": _MASK, "use_mask_embedding": _MASK, "separate_mask_embedding": _MASK,
    "speculative_config": "an older packaging of speculators, with the drafter's keys in a section of their own",
    "dflare_config": f"{_DFLARE} in the packaging of TorchSpec",
    "use_swa": _SWA, "rope_interleave": _INTERLEAVED, "rope_interleaved": _INTERLEAVED, "mlp_bias": "biases in the MLP",
    "attn_logit_softcapping": "soft-capped attention scores", "log_snr_conditioning": "conditioning on a noise level",
}  # fmt: skip

_ONE = (None, 1, True)  # 1 == 1.0 == True
_KEYS_BY_VALUE: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_mode": ((None, "gqa", "mha", "mqa"), _MLA),
    "projector_type": ((None, "dflash", "dspark", "domino"), "another head after the drafter's layers"),
    "hidden_act": ((None, "silu", "swish"), "another activation than SiLU"),
    "hidden_activation": ((None, "silu", "swish"), "another activation than SiLU"),
    "use_qk_norm": ((None, True), "attention without normalised queries and keys"),
    "qk_norm": ((None, True), "attention without normalised queries and keys"),
    "use_aux_hidden_state": ((None, True), "a drafter without the target's features"),
    "logit_scale": (_ONE, _SCALE), "logits_scaling": (_ONE, _SCALE), "residual_multiplier": (_ONE, _SCALE),
    "embedding_multiplier": (_ONE, _SCALE),
    "decoder_layer_type": ((None, "", "qwen3", "default"), "another decoder layer, as in Laguna"),
}  # fmt: skip

_ARCHITECTURES = (
    (r"Gemma4.*DSpark", _GEMMA), (r"DeepseekV4|DSV4", _MLA),
    (r"Qwen3_?[5-9].*DSpark", _GATED), (r"Eagle", "an Eagle drafter"),
    (r"MTP|NextN", "a multi-token-prediction head"),
    (r"Medusa", "Medusa heads"), (r"Laguna", _NORMS),
)  # fmt: skip
_SPECULATORS = ("dflash", "dflash2", "dspark", "domino")
_ALGORITHMS = {
    "dflare": f"{_DFLARE} in the packaging of speculators", "mtp": "a multi-token-prediction head",
    "eagle3": "an Eagle drafter", "eagle": "an Eagle drafter", "peagle": "an Eagle drafter",
}  # fmt: skip

_TENSORS = (
    (r"candidate_selector\.|(attention|mlp)_conv\.", _DFLASH2),
    (r"markov_head\.|markov_w[12]", _DSPARK),
    (r"confidence_head\.", _CONFIDENCE),
    (r"prefix_gru\.|embed_proj\.", _DOMINO),
    (r"layer_fusion_weights|[kv]_proj_target\.", _DFLARE),
    (r"thresh_head", _LENGTH),
    (r"sink", _SINKS),
    (r"aux_hidden_norms\.|fc_norm\.", _NORMS),
    (r"\.g_proj\.", "a gate on the attention's output, as in Laguna"),
    (r"[qk]v?_[ab]_proj|kv_a_layernorm|q_a_layernorm", _MLA),
    (r"\.experts\.|\.router\.|mlp\.gate\.", "a mixture of experts"),
    (r"mask_embedding|mask_hidden", _MASK),
    (r"hidden_dim_adapter", _WIDTH),
    (r"layer_scalar|(pre|post)_feedforward_layernorm", _GEMMA),
    (r"^mtp\.", "a multi-token-prediction head"),
    (r"_blocks$|weight_packed|qweight|qzeros|weight_scale|input_scale|\.absmax", "a quantisation that is not MLX's"),
)


def refuse_key(name: str, value: Any) -> None:
    """Raise ``CheckpointError`` if ``value`` of the config key ``name`` asks for something unsupported."""
    what = _KEYS_BY_VALUE[name][1] if name in _KEYS_BY_VALUE else _KEYS.get(name)
    if what is None or is_neutral(name, value):
        return
    if name == "projector_type":
        what = _ALGORITHMS.get(str(value), what)
    raise CheckpointError(f"config.json: {name} {short(value)} is not supported; it means {what}.")


def is_neutral(name: str, value: Any) -> bool:
    """Whether ``value`` of the key ``name`` asks for nothing: a supported value, or a switch that is off."""
    if name in _KEYS_BY_VALUE:
        return value in _KEYS_BY_VALUE[name][0]
    return any(value is off or (value == off and not isinstance(value, bool)) for off in _OFF)


def refuse_architecture(architectures: Iterable[Any], algorithms: Iterable[str]) -> None:
    """Raise ``CheckpointError`` for the names of another kind of drafter.

    ``algorithms`` are those of vLLM's speculators, in lower case.
    """
    for name in architectures:
        for pattern, what in _ARCHITECTURES:
            if re.search(pattern, str(name), re.IGNORECASE):
                raise CheckpointError(f"config.json: the architecture {name!r} is not supported; it means {what}.")
    for name in algorithms:
        if name not in _SPECULATORS:
            what = f"it means {_ALGORITHMS[name]}" if name in _ALGORITHMS else f"expected {', '.join(_SPECULATORS)}"
            raise CheckpointError(f"config.json: the algorithm {name!r} is not supported; {what}.")


def explain_tensors(names: Iterable[str]) -> str:
    """A clause on what unknown tensors belong to, ``", which belong to ..."``; empty if it is not known."""
    found: Mapping[str, None] = {what: None for name in names for pattern, what in _TENSORS if re.search(pattern, name)}
    return f", which belong to {' and to '.join(found)}" if found else ""
