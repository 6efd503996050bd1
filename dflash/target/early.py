"""Hands each layer's output to a CPU while the next layer is being built.

To build a pass takes Python time, in which a CPU would have nothing to do: MLX's CPU backend evaluates a graph only
when it is complete, and ``async_eval`` lets the host continue only when fewer than 100 operations are left. Where BLAS
takes every core, the host would compete with it, and a GPU takes a graph as a whole: there nothing is handed over
early.
"""

from typing import Any

import mlx.nn as nn

from ..adapters.base import LayerCaller
from ..core.backend import begin_early, begins_early


class EarlyLayers:
    """Makes the calls of layers, through ``caller`` where there is one, and lets the CPU begin with each output."""

    def __init__(self, caller: LayerCaller | None):
        self._caller = caller

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``layer`` returns, on its way."""
        output = layer(*args, **kwargs) if self._caller is None else self._caller.call(layer, args, kwargs)
        begin_early(output)
        return output


def early_layers(caller: LayerCaller | None) -> LayerCaller | None:
    """A caller that begins early, where that pays (:func:`~dflash.core.backend.begins_early`); elsewhere ``caller``."""
    return EarlyLayers(caller) if begins_early() else caller
