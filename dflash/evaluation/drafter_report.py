"""What a drafter is: its kind, what it reads and drafts, its weights, and every key of its config with its meaning.

Knows where to look. Must not know the command line, files or how drafting works.
"""

import dataclasses
import json
from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..core.files import flat
from ..drafters.checkpoints.config import DFlashConfig
from ..drafters.checkpoints.quantized import description
from ..drafters.kinds import drafters

MEANINGS = {
    "hidden_size": "width of drafter and target",
    "intermediate_size": "width of the MLP",
    "num_hidden_layers": "layers of the drafter",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key-value heads",
    "vocab_size": "tokens of the target",
    "mask_token_id": "the token that stands for what is not yet drafted",
    "head_dim": "size of a head",
    "num_target_layers": "layers of the target that it was trained for",
    "block_size": "positions that one pass fills",
    "target_layer_ids": "target layers whose outputs it reads, from 0",
    "max_position_embeddings": "longest sequence that it was made for",
    "rope_theta": "base of the rotary positions",
    "rope_scaling": "how rotary positions are stretched, on all layers",
    "rope_parameters": "rotary positions of each layer type",
    "rope_is_neox_style": "false: rotary positions turn neighbouring pairs",
    "rms_norm_eps": "added to the mean square in norms",
    "layer_types": "which layers see all of the context, and which a window of it",
    "sliding_window": "tokens that a sliding layer sees, its own among them",
    "is_causal": "whether a position sees the block after it (false) or not (true); null: not on sliding layers",
    "input_embedding_scale": "factor on the target's embeddings",
    "output_multiplier": "factor on the target's logits",
    "final_logit_softcapping": "cap c of logits, c * tanh(x / c)",
    "attention_bias": "biases in the attention's projections",
    "sample_from_anchor": "whether the anchor's position predicts the first draft",
    "elastic_blocks": "whether it has learned blocks of every length, and fills only what is asked for",
    "draft_vocab_size": "tokens that it can draft, where not all",
    "target_fingerprint": "the target that it was trained for",
    "model_type": "the layers' family",
    # DFlash 2
    "conv_kernel_size": "rows of the block that a convolution mixes",
    "conv_group_size": "channels that share a convolution's dynamic coefficients",
    "selector_rank": "numbers for each token in the selector's tables",
    "selector_top_k": "candidates at each position, among which the selector chooses",
    "selector_vocab_size": "ids below it can be candidates; larger ones are padding",
    # DSpark
    "markov_rank": "numbers for each token in the Markov head's tables; 0: no such head",
    "markov_head_type": "how the token before changes the logits: vanilla, gated or rnn",
    "enable_confidence_head": "whether a head says how likely each draft is accepted",
    "confidence_head_with_markov": "whether that head reads the token before too",
    "confidence_temperatures": "divisors of that head's logits, one a draft",
}
"""Meanings of the keys of published configs."""


def drafter_report(drafter: Any, name: str) -> dict[str, str]:
    """What ``drafter``, loaded from ``name``, is and reads, in the order in which to show it.

    Keys of a kind that another package registers are shown without a meaning, unless it adds one to :data:`MEANINGS`.
    """
    kind = next((kind for kind, known in drafters.all().items() if known is type(drafter)), None)
    about = (type(drafter).__doc__ or "").strip().partition("\n")[0]
    report = {
        "drafter": name,
        "kind": f"{kind or type(drafter).__name__}: {about}",
        "drafts": f"up to {drafter.block_size - 1} tokens a block",
        "reads": _features(drafter.target_layer_ids),
    }
    if isinstance(drafter, nn.Module):
        report["weights"] = _weights(drafter)
    config = getattr(drafter, "config", None)
    if isinstance(config, DFlashConfig):
        for field in dataclasses.fields(config):
            meaning = MEANINGS.get(field.name)
            report[field.name] = f"{_shown(getattr(config, field.name))}{f': {meaning}' if meaning else ''}"
    return report


def _features(layer_ids: tuple[int, ...]) -> str:
    if not layer_ids:
        return "the tokens alone"
    return f"the outputs of the target's layers {', '.join(map(str, layer_ids))}"


def _weights(model: nn.Module) -> str:
    weights = flat(model.parameters())
    dtypes = Counter(str(w.dtype).removeprefix("mlx.core.") for w in weights.values())
    count = sum(w.size for w in weights.values() if mx.issubdtype(w.dtype, mx.floating))
    quantised = description(model)
    bits = f", quantised to {quantised['bits']} bits" if quantised else ""
    return f"{len(weights)} tensors, {count:,} floating-point numbers, {', '.join(dtypes)}{bits}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        parts = [str(part) for part in value]
        return f"{len(parts)} x {parts[0]}" if len(parts) > 1 and len(set(parts)) == 1 else ", ".join(parts) or "none"
    return value if isinstance(value, str) else json.dumps(value)
