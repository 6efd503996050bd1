"""Start computing each layer on a CPU while the next layer is being built.

Building a pass takes Python time in which a CPU would be idle: MLX's CPU backend evaluates a graph only when it is
complete, and ``async_eval`` lets the host continue only when fewer than 100 operations are left. A GPU takes a graph as
a whole, and where BLAS uses every core the host would compete with it, so there nothing starts early.
"""

from typing import Any

import mlx.nn as nn

from ..adapters.base import LayerCaller
from ..core.backend import begin, begins_early


def early_layers(caller: LayerCaller | None) -> LayerCaller | None:
    """A caller that starts early if that pays (:func:`~dflash.core.backend.begins_early`), otherwise ``caller``."""
    if not begins_early():
        return caller

    def begun(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = layer(*args, **kwargs) if caller is None else caller(layer, args, kwargs)
        begin(output)
        return output

    return begun
