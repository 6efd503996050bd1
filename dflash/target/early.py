"""A pass that the device begins with while its last layers are still being built.

Knows how the calls of layers are made. Must not know what a pass is for, or any architecture.

To build a pass takes Python time: 1.7 ms for the bundled target's ten layers on a server CPU, which computes 16 tokens
in 16 ms. Where the pass depends on tokens that were just found, the device has nothing else to do meanwhile.
"""

import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..adapters.base import LayerCaller
from ..backend import on_cpu


class EarlyLayers:
    """Makes the calls of layers and hands each output to the device at once.

    The pass may have a ``caller`` of its own, which then makes the calls. ``begun_at`` is when the device got the first
    layer, in seconds of ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.caller: LayerCaller | None = None
        self.begun_at: float | None = None

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``layer`` returns, on its way."""
        output = layer(*args, **kwargs) if self.caller is None else self.caller.call(layer, args, kwargs)
        mx.async_eval(output)
        if self.begun_at is None:
            self.begun_at = time.perf_counter()
        return output


def early_in_pipeline() -> EarlyLayers | None:
    """For a pass that is built while the device computes the one before it: early on a CPU, else as a whole.

    MLX's CPU backend lets the host go on when no more than 100 operations are left, the last third of a small model's
    pass. Text and policy and then all of the next pass's layers would have to be done in that time; of layers that are
    handed over early, only the first. A GPU takes a whole pass at once, and each handing over costs it a commit.
    """
    return EarlyLayers() if on_cpu() else None
