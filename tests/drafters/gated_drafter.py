"""A drafter of one's own, as another package would write it: features pass a gate with an option of its own."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from dflash import DFlashConfig, DFlashDraftModel, register_drafter


@dataclass(frozen=True)
class GatedConfig(DFlashConfig):
    """``gate_scale`` multiplies what the gate lets through."""

    gate_scale: float = 1.0


@register_drafter("gated")
class GatedDrafter(DFlashDraftModel):
    """Each channel of the context is multiplied by a sigmoid of the features."""

    config_class = GatedConfig

    def __init__(self, config: GatedConfig):
        super().__init__(config)
        self.gate = nn.Linear(self.fc.weight.shape[1], config.hidden_size)

    def context(self, features_BSF: mx.array) -> mx.array:
        gate_BSE = mx.sigmoid(self.gate(features_BSF)) * self.config.gate_scale
        return super().context(features_BSF) * gate_BSE
