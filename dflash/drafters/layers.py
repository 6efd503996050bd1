"""The layers of a DFlash drafter: normalised attention to context and block, and a gated feed-forward.

Weight names are those of published checkpoints. Decoding and training share these layers (:data:`Attend`).

Shapes: B batch, L block positions, H query heads, K key-value heads, D head size, E hidden size.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from einops import rearrange

from ..core.cpu_math import swiglu
from .checkpoints.config import DFlashConfig
from .rope import build_rope

Attend = Callable[[mx.array, mx.array, mx.array], mx.array]
"""Attention of a block: ``(queries_BHLD, keys_BKLD, values_BKLD) -> out_BHLD``.

Keys and values are the block's own; the callable adds the context's: from a cache for the one block of decoding, from
shared contexts for the many blocks of training.
"""


class Attention(nn.Module):
    """Attention with normalised queries and keys, as in Qwen3; the context enters by keys and values only."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        size, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(size, self.heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(size, self.kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(size, self.kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * head_dim, size, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.rope = build_rope(
            head_dim, config.rope(layer), config.max_position_embeddings, traditional=not config.rope_is_neox_style
        )

    def keys_values(self, hidden_BLE: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values, each ``[B, K, L, D]``, of positions ``offset ..`` (one offset, or one a row)."""
        keys_BKLD = rearrange(self.k_proj(hidden_BLE), "B L (K D) -> B K L D", K=self.kv_heads)
        values_BKLD = rearrange(self.v_proj(hidden_BLE), "B L (K D) -> B K L D", K=self.kv_heads)
        return self.rope(self.k_norm(keys_BKLD), offset=offset), values_BKLD

    def __call__(self, x_BLE: mx.array, offset: int | mx.array, attend: Attend) -> mx.array:
        queries_BHLD = rearrange(self.q_proj(x_BLE), "B L (H D) -> B H L D", H=self.heads)
        queries_BHLD = self.rope(self.q_norm(queries_BHLD), offset=offset)
        out_BHLD = attend(queries_BHLD, *self.keys_values(x_BLE, offset))
        return self.o_proj(rearrange(out_BHLD, "B H L D -> B L (H D)"))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DraftLayer(nn.Module):
    """One pre-norm transformer layer of the drafter."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x_BLE: mx.array, offset: int | mx.array, attend: Attend) -> mx.array:
        x_BLE = x_BLE + self.self_attn(self.input_layernorm(x_BLE), offset, attend)
        return x_BLE + self.mlp(self.post_attention_layernorm(x_BLE))
