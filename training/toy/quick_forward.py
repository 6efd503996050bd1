"""Forward passes of small targets that train quickly on a CPU: mlx-lm's layers with the maths of ``cpu_math``.

Knows the modules of a few families of mlx-lm. Must not know data, losses or optimisers.
A family is a function for one decoder layer and the value at which its norms start.

Shapes: B batch, L length, E hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models import gemma3_text, qwen3
from mlx_lm.models.base import create_causal_mask

from dflash.adapters import TargetAdapter
from dflash.core.cpu_math import geglu

from ..quick_layers import decoder_layer, self_attention


def qwen3_layer(layer: Any, x_BLE: mx.array, config: Any) -> mx.array:
    """A decoder layer of Qwen3."""
    return decoder_layer(layer, x_BLE, "causal")


def gemma3_layer(layer: Any, x_BLE: mx.array, config: Any) -> mx.array:
    """A decoder layer of Gemma 3: norms on both sides of attention and MLP, most layers with a sliding window."""
    attention, mlp = layer.self_attn, layer.mlp
    window = config.sliding_window if attention.is_sliding else None
    mask_LL = create_causal_mask(x_BLE.shape[1], window_size=window)
    x_BLE = x_BLE + layer.post_attention_layernorm(self_attention(attention, layer.input_layernorm(x_BLE), mask_LL))
    y_BLE = layer.pre_feedforward_layernorm(x_BLE)
    y_BLE = mlp.down_proj(geglu(mlp.gate_proj(y_BLE), mlp.up_proj(y_BLE)))
    return x_BLE + layer.post_feedforward_layernorm(y_BLE)


@dataclass(frozen=True)
class Family:
    """mlx-lm's module, one decoder layer, and where a norm's weight starts by its name and the residual scale."""

    module: ModuleType
    layer: Callable[[Any, mx.array, Any], mx.array]
    norm_start: Callable[[str, float], float]


FAMILIES = {
    "qwen3": Family(qwen3, qwen3_layer, lambda name, scale: 1.0),
    # Gemma's norms multiply by one more than their weight; those after a sublayer set the size of what it adds.
    "gemma3_text": Family(gemma3_text, gemma3_layer, lambda name, scale: scale - 1.0 if "post_" in name else 0.0),
}
"""By ``model_type``."""


def hidden_states(adapter: TargetAdapter, tokens_BL: mx.array) -> mx.array:
    """Final normalised hidden states ``[B, L, E]``: what the adapter's backbone returns."""
    family, config = FAMILIES[adapter.config.model_type], adapter.config
    x_BLE = adapter.embed(tokens_BL) * adapter.embedding_scale
    for layer in adapter.layers:
        x_BLE = family.layer(layer, x_BLE, config)
    return adapter.backbone.norm(x_BLE)
