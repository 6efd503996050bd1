"""DFlare: every drafter layer mixes the target's layers by itself, and has separate projections for the context.

In DFlash all drafter layers share one context; here each has its own weighted mean of the tapped layers. Formulas and
weight names are those of DFlare (arXiv:2606.02091) and AngelSlim.

Shapes: B batch, S context length, T tapped target layers, D drafter layers, E hidden size, K key-value heads, H head
size.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from einops import rearrange

from .checkpoints.config import DFlashConfig
from .dflash import DFlashDraftModel
from .kinds import register_drafter
from .layers import Attention, DraftLayer

_FIRST_WEIGHT = 2.0  # of a layer's own tap before the softmax, in a new drafter; as published


class DFlareAttention(Attention):
    """Attention with separate projections for the context; norms and rotary positions are the block's."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__(config, layer)
        size, width, bias = config.hidden_size, self.kv_heads * config.head_dim, config.attention_bias
        self.k_proj_target = nn.Linear(size, width, bias=bias)
        self.v_proj_target = nn.Linear(size, width, bias=bias)

    def context_keys_values(self, context_BSE: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values, each ``[B, K, S, H]``, of committed tokens from position ``offset`` on."""
        keys_BKSH = rearrange(self.k_proj_target(context_BSE), "B S (K H) -> B K S H", K=self.kv_heads)
        values_BKSH = rearrange(self.v_proj_target(context_BSE), "B S (K H) -> B K S H", K=self.kv_heads)
        return self.rope(self.k_norm(keys_BKSH), offset=offset), values_BKSH


class DFlareLayer(DraftLayer):
    """A layer with :class:`DFlareAttention`."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__(config, layer)
        self.self_attn = DFlareAttention(config, layer)


@register_drafter("dflare")
class QwenDFlareDraftModel(DFlashDraftModel):
    """A DFlare drafter. Each layer of a new one reads mostly the tapped layer of its own relative depth."""

    added_modules: ClassVar[tuple[str, ...]] = ("layer_fusion_weights",)

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.pop("fc")
        self.layers = [DFlareLayer(config, i) for i in range(config.num_hidden_layers)]
        layers, taps = config.num_hidden_layers, len(config.target_layer_ids)
        own_D1 = mx.array([[round(d * (taps - 1) / max(layers - 1, 1))] for d in range(layers)])
        self.layer_fusion_weights = mx.where(mx.arange(taps) == own_D1, _FIRST_WEIGHT, 0.0)

    @classmethod
    def recognises(cls, signs: Mapping[str, Any]) -> bool:
        """Whether a config names DFlare."""
        return any("dflare" in name.lower() for name in signs["architectures"])

    def context(self, features_BSF: mx.array) -> mx.array:
        """The context ``[B, S, D, E]`` of each layer, from target features."""
        taps_BSTE = mx.unflatten(features_BSF, -1, (-1, self.config.hidden_size))
        weights_DT = mx.softmax(self.layer_fusion_weights.astype(mx.float32), axis=-1).astype(features_BSF.dtype)
        return self.hidden_norm(weights_DT @ taps_BSTE)

    def context_keys_values(self, layer: int, context: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """As in DFlash, from the layer's own part of ``context [B, S, D, E]``."""
        attention = self.layers[layer].self_attn
        assert isinstance(attention, DFlareAttention)
        return attention.context_keys_values(context[:, :, layer], offset)
