"""The fallback adapter: finds the parts of any mlx-lm model by structure.

It assumes that ``model.layers`` are the decoder layers, that one module (the backbone) owns that list and the token
embedding, and that the rest of the model is the head. :mod:`dflash.target.trial` checks whether the parts are right.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from dflash.core.errors import IncompatibleModelsError

from .base import TargetAdapter
from .calls import Pass, embedding_factors
from .stand_ins import StandIn, standing_in

ModulePath = tuple[tuple[str, nn.Module], ...]


class GenericAdapter(TargetAdapter):
    """Backbone, embedding and head by structure; ``IncompatibleModelsError`` if one is not found."""

    guessed: ClassVar[bool] = True

    def __init__(self, model: nn.Module):
        super().__init__(model)
        name = type(model).__name__
        layers = getattr(model, "layers", None)
        if not layers:
            raise IncompatibleModelsError(f"{name} has no decoder layers under 'layers'.")
        path = next((p for p in _paths(model) if _list_with(p[-1][1], layers[0])), None)
        if path is None:
            raise IncompatibleModelsError(f"No module of {name} owns the list of its decoder layers.")
        self._holder = path[-1][1]
        self._layers = _list_with(self._holder, layers[0])
        with_table = [i for i, (_, module) in enumerate(path) if _tables(module)]
        if not with_table or with_table[-1] == 0:
            found = ", ".join(f"{key} ({type(part).__name__})" for key, part in self._holder.items())
            raise IncompatibleModelsError(
                f"{type(self._holder).__name__} of {name} has no token embedding: an nn.Embedding is looked for next "
                f"to the layers, and it has {found}."
            )
        self._name, self._backbone = path[with_table[-1]]
        self._owner = path[with_table[-1] - 1][1]
        self._embedding = _tables(self._backbone)[0]

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
    def layers_owner(self) -> nn.Module:
        return self._holder

    @property
    def embedding(self) -> nn.Module:
        return self._embedding

    @property
    def hidden_size(self) -> int:
        return self.embed(mx.zeros((1, 1), mx.int32)).shape[-1]

    @property
    def vocab_size(self) -> int:
        return self._embedding.weight.shape[0]

    @cached_property
    def embedding_scale(self) -> float:
        """Measured on two short passes; 1 if the backbone does more than multiply embeddings by a factor."""
        half = self.vocab_size // 2
        tokens = mx.arange(8)[None] % half
        one, other = (Pass(self.model, ids) for ids in (tokens, tokens + half))
        found = embedding_factors(self.embed, self._layers, one, other)
        return float(f"{found[0]:.6g}") if found else 1.0

    def head(self, hidden_BLE: mx.array) -> mx.array:
        """The model's own call, with the backbone replaced by one that returns ``hidden_BLE``."""
        with standing_in([(self._owner, self._name, _Returns(self._backbone, hidden_BLE))]):
            return self._owner(mx.zeros(hidden_BLE.shape[:2], mx.int32))


class _Returns(StandIn):
    """Returns given hidden states when called as the backbone."""

    def __init__(self, backbone: nn.Module, hidden_BLE: mx.array):
        super().__init__(backbone)
        self._hidden_BLE = hidden_BLE

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._hidden_BLE


def _paths(module: nn.Module, path: ModulePath = ()) -> Iterator[ModulePath]:
    """The path to each module that is not in a list, as names and modules from the outermost inwards."""
    path = path or (("", module),)
    yield path
    for name, value in module.items():
        if isinstance(value, nn.Module):
            yield from _paths(value, (*path, (name, value)))


def _list_with(module: nn.Module, layer: nn.Module) -> list[nn.Module]:
    return next((v for v in module.values() if isinstance(v, list) and v and v[0] is layer), [])


def _tables(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.values() if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
