"""Forward passes of small targets that train quickly on a CPU: mlx-lm's layers with the maths of `fastmath`.

Knows the modules of a few families of mlx-lm. Must not know data, losses or optimisers.
A family is a function for one decoder layer and the value at which its norms start.

Shapes: B batch, L length, H query heads, K key-value heads, G query heads a key-value head, D head size,
E hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from einops import rearrange
from mlx_lm.models import gemma3_text, qwen3

from dflash.adapters import TargetAdapter
from dflash.cpu_math import geglu, softmax, swiglu


def causal_attention(
    queries_BHLD: mx.array, keys_BKLD: mx.array, values_BKLD: mx.array, scale: float, window: int | None = None
) -> mx.array:
    """Causal attention with grouped heads, ``[B, H, L, D]``; a query sees itself and ``window - 1`` before it."""
    heads, length = queries_BHLD.shape[1:3]
    groups = heads // keys_BKLD.shape[1]
    queries = rearrange(queries_BHLD * scale, "B (K G) L D -> B K (G L) D", G=groups)
    scores = queries @ keys_BKLD.swapaxes(-1, -2)
    visible = mx.tri(length, dtype=mx.bool_)
    if window is not None:
        visible = visible & ~mx.tri(length, k=-window, dtype=mx.bool_)
    weights = softmax(scores + mx.tile(mx.where(visible, 0.0, -1e9), (groups, 1)))
    return rearrange(weights @ values_BKLD, "B K (G L) D -> B (K G) L D", G=groups)


def self_attention(attention: Any, x_BLE: mx.array, window: int | None = None) -> mx.array:
    """An attention module with normalised queries and keys, ``[B, L, E]``."""
    queries = rearrange(attention.q_proj(x_BLE), "B L (H D) -> B H L D", H=attention.n_heads)
    keys = rearrange(attention.k_proj(x_BLE), "B L (K D) -> B K L D", K=attention.n_kv_heads)
    values = rearrange(attention.v_proj(x_BLE), "B L (K D) -> B K L D", K=attention.n_kv_heads)
    queries, keys = attention.rope(attention.q_norm(queries)), attention.rope(attention.k_norm(keys))
    out = causal_attention(queries, keys, values, attention.scale, window)
    return attention.o_proj(rearrange(out, "B H L D -> B L (H D)"))


def qwen3_layer(layer: Any, x_BLE: mx.array, config: Any) -> mx.array:
    """A decoder layer of Qwen3."""
    x_BLE = x_BLE + self_attention(layer.self_attn, layer.input_layernorm(x_BLE))
    y_BLE, mlp = layer.post_attention_layernorm(x_BLE), layer.mlp
    return x_BLE + mlp.down_proj(swiglu(mlp.gate_proj(y_BLE), mlp.up_proj(y_BLE)))


def gemma3_layer(layer: Any, x_BLE: mx.array, config: Any) -> mx.array:
    """A decoder layer of Gemma 3: norms on both sides of attention and MLP, most layers with a sliding window."""
    attention, mlp = layer.self_attn, layer.mlp
    window = config.sliding_window if attention.is_sliding else None
    x_BLE = x_BLE + layer.post_attention_layernorm(self_attention(attention, layer.input_layernorm(x_BLE), window))
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
