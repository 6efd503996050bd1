"""The adapter of last resort: finds the parts of any mlx-lm model by their usual shape.

Knows that ``model.layers`` are the decoder layers, that one module owns that list (the backbone) and the
token embedding, and that what the model does with the backbone's output is its head. Must not know any
one architecture. Whether it found the right parts is for :mod:`dflash.adapters.conformance` to say.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash.errors import IncompatibleModelsError

from .base import TargetAdapter


class GenericAdapter(TargetAdapter):
    """Backbone, embedding and head by structure.

    Raises :class:`~dflash.errors.IncompatibleModelsError` in the constructor if one is not found.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        name = type(model).__name__
        layers = getattr(model, "layers", None)
        if not layers:
            raise IncompatibleModelsError(f"{name} has no decoder layers under 'layers'.")
        found = next((f for f in _submodules(model) if _holds(f[2], layers[0])), None)
        if found is None:
            raise IncompatibleModelsError(f"No module of {name} owns the list of its decoder layers.")
        self._owner, self._name, self._backbone = found
        tables = [m for m in self._backbone.values() if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
        if not tables:
            raise IncompatibleModelsError(f"{type(self._backbone).__name__} of {name} has no token embedding.")
        self._embedding = tables[0]
        self._layers = next(v for v in self._backbone.values() if isinstance(v, list) and v and v[0] is layers[0])

    @property
    def language_model(self) -> nn.Module:
        return self._owner

    @property
    def backbone(self) -> nn.Module:
        return self._backbone

    @property
    def layers(self) -> list[nn.Module]:
        return self._layers

    @property
    def embedding(self) -> nn.Module:
        return self._embedding

    @property
    def hidden_size(self) -> int:
        return self.embed(mx.zeros((1, 1), mx.int32)).shape[-1]

    @property
    def vocab_size(self) -> int:
        return self._embedding.weight.shape[0]

    def head(self, hidden_BLE: mx.array) -> mx.array:
        """The model's own call, with the backbone standing aside for ``hidden_BLE``."""
        backbone = self._backbone
        self._owner[self._name] = _StandIn(backbone, hidden_BLE)
        try:
            return self._owner(mx.zeros(hidden_BLE.shape[:2], mx.int32))
        finally:
            self._owner[self._name] = backbone


class _StandIn:
    """Answers a backbone's call with given hidden states, and lends its attributes."""

    def __init__(self, backbone: nn.Module, hidden_BLE: mx.array):
        self._backbone, self._hidden_BLE = backbone, hidden_BLE

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._hidden_BLE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)


def _submodules(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Each module below ``model`` that is not in a list: its owner, name and itself, outermost first."""
    for name, value in model.items():
        if isinstance(value, nn.Module):
            yield model, name, value
            yield from _submodules(value)


def _holds(module: nn.Module, layer: nn.Module) -> bool:
    return any(isinstance(value, list) and value and value[0] is layer for value in module.values())
