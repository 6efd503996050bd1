"""An adapter for a family that dflash does not know: its parts have names of their own."""

import mlx.core as mx
import mlx.nn as nn

from dflash.adapters import TargetAdapter, register_adapter


@register_adapter("external_family")
class ExternalAdapter(TargetAdapter):
    """The text model is called ``decoder``, its table ``words``; the logits are divided by ``temper``."""

    @property
    def backbone(self) -> nn.Module:
        return self.model.decoder

    @property
    def embedding(self) -> nn.Module:
        return self.backbone.words

    def head(self, hidden_BLE: mx.array) -> mx.array:
        return self.embedding.as_linear(hidden_BLE) / self.model.temper
