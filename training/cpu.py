"""A faster pass of the target on a CPU, for training: the layers of LLaMA and Qwen with the maths of ``cpu_math``.

On a CPU, MLX's element-wise operations and attention take as long as a small model's matrix products. On other
devices, and for other families, the target's own pass is used. Decoding never uses these layers: its text must equal
plain mlx-lm's to the last bit.

Shapes: B batch, L length, S keys, H query heads, K key-value heads, G query heads a key-value head, D head size,
E hidden size, F feature size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from einops import rearrange
from mlx_lm.models import llama, qwen2, qwen3

from dflash import LoadedTargetModel
from dflash.adapters import TargetAdapter
from dflash.core.backend import on_cpu
from dflash.core.cpu_math import softmax, swiglu

FAMILIES = (llama.TransformerBlock, qwen2.TransformerBlock, qwen3.TransformerBlock)
"""Layers with two norms, a gated MLP, and norms of queries and keys or none."""


def forward_hidden(
    target: LoadedTargetModel, tokens_BL: mx.array, layer_ids: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """Final hidden states ``[B, L, E]`` and features ``[B, L, F]`` of whole sequences, as ``target.forward_hidden``."""
    if not has_quick_layers(target.adapter):
        return target.forward_hidden(tokens_BL, None, layer_ids)
    return target.adapter.forward(tokens_BL, None, layer_ids, quick_layer)


def model_to_write_with(target: LoadedTargetModel) -> nn.Module:
    """The target's model for mlx-lm's batched generation, or an equivalent with quick layers."""
    return _QuickModel(target) if has_quick_layers(target.adapter) else target.model


def has_quick_layers(adapter: TargetAdapter) -> bool:
    """Whether this module speeds up a model: on a CPU, in float32, for a known family."""
    return on_cpu() and all(
        type(layer) in FAMILIES and layer.input_layernorm.weight.dtype == mx.float32 for layer in adapter.layers
    )


class _QuickModel(nn.Module):
    """What mlx-lm's generation needs of a model. The target is not among its parameters."""

    def __init__(self, target: LoadedTargetModel):
        super().__init__()
        self._target = target

    @property
    def layers(self) -> list[nn.Module]:
        return self._target.model.layers

    def make_cache(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self._target.model)

    def __call__(self, tokens_BL: mx.array, cache: list[Any] | None = None) -> mx.array:
        hidden_BLE, _ = self._target.adapter.forward(tokens_BL, cache, (), quick_layer)
        return self._target.head(hidden_BLE)


def quick_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array:
    """What ``layer(*args, **kwargs)`` returns, ``[B, L, E]``; an adapter calls it in place of mlx-lm's."""
    return decoder_layer(layer, *args, **kwargs)


def decoder_layer(layer: Any, x_BLE: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    """What ``layer(x, mask, cache)`` returns, ``[B, L, E]``."""
    x_BLE = x_BLE + self_attention(layer.self_attn, layer.input_layernorm(x_BLE), mask, cache)
    y_BLE, mlp = layer.post_attention_layernorm(x_BLE), layer.mlp
    return x_BLE + mlp.down_proj(swiglu(mlp.gate_proj(y_BLE), mlp.up_proj(y_BLE)))


def self_attention(attention: Any, x_BLE: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    """What ``attention(x, mask, cache)`` returns, ``[B, L, E]``."""
    queries = rearrange(attention.q_proj(x_BLE), "B L (H D) -> B L H D", H=attention.n_heads)
    keys, values = (
        rearrange(project(x_BLE), "B L (K D) -> B L K D", K=attention.n_kv_heads)
        for project in (attention.k_proj, attention.v_proj)
    )
    if "q_norm" in attention:
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    queries_BHLD, keys_BKSD, values_BKSD = (array.transpose(0, 2, 1, 3) for array in (queries, keys, values))
    if cache is None:
        queries_BHLD, keys_BKSD = attention.rope(queries_BHLD), attention.rope(keys_BKSD)
    else:
        queries_BHLD = attention.rope(queries_BHLD, offset=cache.offset)
        keys_BKSD = attention.rope(keys_BKSD, offset=cache.offset)
        keys_BKSD, values_BKSD = cache.update_and_fetch(keys_BKSD, values_BKSD)
    out = masked_attention(queries_BHLD, keys_BKSD, values_BKSD, attention.scale, mask)
    return attention.o_proj(rearrange(out, "B H L D -> B L (H D)"))


def masked_attention(
    queries_BHLD: mx.array, keys_BKSD: mx.array, values_BKSD: mx.array, scale: float, mask: Any
) -> mx.array:
    """Attention with grouped heads, ``[B, H, L, D]``; ``mask`` as mlx-lm gives it: none, ``"causal"`` or an array."""
    heads, length = queries_BHLD.shape[1:3]
    groups, most = heads // keys_BKSD.shape[1], keys_BKSD.shape[2]
    queries = rearrange(queries_BHLD * scale, "B (K G) L D -> B K (G L) D", G=groups)
    scores = queries @ keys_BKSD.swapaxes(-1, -2)
    if mask is not None:
        visible = mx.tri(length, most, most - length, dtype=mx.bool_) if isinstance(mask, str) else mask
        added = mx.where(visible, 0.0, -1e9) if visible.dtype == mx.bool_ else visible
        added = added.reshape(-1, 1, *added.shape[-2:])  # [B or 1, 1, L, S]: the same for all heads
        scores = scores + mx.tile(added, (1, 1, groups, 1))
    return rearrange(softmax(scores) @ values_BKSD, "B K (G L) D -> B (K G) L D", G=groups)
