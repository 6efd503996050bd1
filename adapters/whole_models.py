"""GPT-NeoX (Pythia) and Lille targets: architectures whose backbone computes the logits itself.

Shapes: B batch, L length, E hidden size.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from .base import TargetAdapter
from .registry import register_adapter


class WholeModelAdapter(TargetAdapter):
    """Repeats the backbone's call up to the last norm; subclasses name the parts."""

    @property
    def norm(self) -> nn.Module:
        """The norm after the last layer."""
        raise NotImplementedError

    def run_backbone(self, tokens_BL: mx.array, cache: list[Any] | None) -> mx.array:
        """Normalised final hidden states ``[B, L, E]``."""
        hidden_BLE, layers = self.embed(tokens_BL), self.layers
        caches = [None] * len(layers) if cache is None else cache
        mask = create_attention_mask(hidden_BLE, caches[0])
        for layer, kv in zip(layers, caches, strict=True):
            hidden_BLE = layer(hidden_BLE, mask, cache=kv)
        return self.norm(hidden_BLE)


@register_adapter("gpt_neox")
class GPTNeoXAdapter(WholeModelAdapter):
    """GPT-NeoX and Pythia."""

    @property
    def layers(self) -> list[nn.Module]:
        return self.backbone.h

    @property
    def embedding(self) -> nn.Module:
        return self.backbone.embed_in

    @property
    def norm(self) -> nn.Module:
        return self.backbone.final_layer_norm

    @property
    def head_table(self) -> nn.Module:
        return self.backbone.embed_out


@register_adapter("lille-130m")
class LilleAdapter(WholeModelAdapter):
    """Lille 130M, whose head is tied."""

    @property
    def backbone(self) -> nn.Module:
        return self.model.transformer

    @property
    def embedding(self) -> nn.Module:
        return self.backbone.tok_embeddings

    @property
    def norm(self) -> nn.Module:
        return self.backbone.norm

    @property
    def hidden_size(self) -> int:
        return self.config.n_embd

    @property
    def max_length(self) -> int | None:
        """The model's block size."""
        return self.config.block_size
