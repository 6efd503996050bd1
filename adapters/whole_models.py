"""GPT-NeoX (Pythia) and Lille targets: architectures whose backbone computes the logits itself.

Shapes: B batch, L length, E hidden size.
"""

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from dflash.core.errors import IncompatibleModelsError

from .base import TargetAdapter
from .registry import register_adapter
from .stand_ins import StandIn, standing_in


class WholeModelAdapter(TargetAdapter):
    """Takes what the backbone's last norm returns; MLX is lazy, so what the backbone does with it is not computed."""

    norm_name: ClassVar[str] = "norm"
    """The backbone's attribute that holds its last norm."""

    def run_backbone(self, tokens_BL: mx.array, cache: list[Any] | None) -> mx.array:
        """Normalised final hidden states ``[B, L, E]``."""
        if self.norm_name not in self.backbone:
            raise IncompatibleModelsError(
                f"{type(self.backbone).__name__} has no {self.norm_name}; norm_name must name the backbone's last norm."
            )
        norm = _KeptOutput(self.backbone[self.norm_name])
        with standing_in([(self.backbone, self.norm_name, norm)]):
            self.backbone(tokens_BL, cache=cache)
        return norm.output


class _KeptOutput(StandIn):
    output: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        self.output = self._module(x)
        return self.output


@register_adapter("gpt_neox")
class GPTNeoXAdapter(WholeModelAdapter):
    """GPT-NeoX and Pythia."""

    norm_name = "final_layer_norm"

    @property
    def layers(self) -> list[nn.Module]:
        return self.backbone.h

    @property
    def embedding(self) -> nn.Module:
        return self.backbone.embed_in

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
    def hidden_size(self) -> int:
        return self.config.n_embd

    @property
    def max_length(self) -> int | None:
        """The model's block size."""
        return self.config.block_size
