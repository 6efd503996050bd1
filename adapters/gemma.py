"""Gemma targets: embeddings scaled by the backbone, soft-capped logits, text models inside wrappers.

Shapes: B batch, L length, E hidden size.
"""

import mlx.core as mx
import mlx.nn as nn

from .base import TargetAdapter
from .registry import register_adapter
from .whole_models import WholeModelAdapter


@register_adapter("gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text")
class GemmaAdapter(TargetAdapter):
    """The backbone multiplies embeddings by ``sqrt(hidden_size)``; Gemma 2 and 4 soft-cap their logits."""

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def head_table(self) -> nn.Module:
        tied = getattr(self.language_model, "tie_word_embeddings", True)
        return self.embedding if tied else self.language_model.lm_head

    def cap_logits(self, logits: mx.array) -> mx.array:
        """``logits`` with the model's soft cap, if it has one."""
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else mx.tanh(logits / cap) * cap


@register_adapter("gemma3n")
class Gemma3nAdapter(WholeModelAdapter, GemmaAdapter):
    """Several streams pass through the layers, and the backbone computes the logits itself.

    Features are the stream that predictions are made from (``altup_active_idx``).
    """

    @property
    def language_model(self) -> nn.Module:
        return self.model.model.language_model

    @property
    def backbone(self) -> nn.Module:
        return self.language_model

    def feature(self, output: mx.array) -> mx.array:
        return output[self.config.altup_active_idx]
