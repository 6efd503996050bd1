"""One pass over a tree of drafts: each token sees the context and its ancestors, from the position of its depth.

mlx-lm's layers take positions from their cache's ``offset`` and a mask that their backbone made for a chain. So each
layer is called with the tree's mask, and its rotary modules are replaced by stand-ins that rotate each row by its own
position. Other uses of positions (learned ones, scales) are out of reach: the trial of
:meth:`~dflash.LoadedTargetModel.check_trees` finds them.

Shapes: B = 1 batch, H heads, L rows of the pass, S context, D size of a head.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..adapters.stand_ins import StandIn, standing_in
from ..core.errors import IncompatibleModelsError
from ..core.trees import ancestors, depths_of_rows


class TreePass:
    """Calls layers in a pass over the anchor and a tree of ``parents`` after ``context`` tokens.

    Raises ``IncompatibleModelsError``, naming the layer, if an argument may depend on the order of rows in an unknown
    way.
    """

    def __init__(self, parents: Sequence[int], context: int):
        seen_LL = mx.array(ancestors(parents))
        self._length = len(parents) + 1
        self._mask_LS = mx.concatenate([mx.ones((self._length, context), mx.bool_), seen_LL], axis=1)
        self._depths_L = mx.array(depths_of_rows(parents), mx.int32)
        self._called = 0

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``layer`` returns for the rows of a tree."""
        args = tuple(self._exchanged(value) for value in args)
        kwargs = {name: self._exchanged(value) for name, value in kwargs.items()}
        self._called += 1
        rotary = [
            (owner, name, _Rotary(child, self._depths_L))
            for owner in layer.modules()
            for name, child in owner.items()
            if isinstance(child, nn.Module) and _is_rotary(type(child))
        ]
        with standing_in(rotary):
            return layer(*args, **kwargs)

    def _exchanged(self, value: Any) -> Any:
        """A layer's argument, with the tree's mask instead of a chain's."""
        if isinstance(value, str):
            return self._mask_LS if value == "causal" else value
        if not isinstance(value, mx.array) or value.shape[:2] == (1, self._length):  # one entry per row
            return value
        if value.dtype == mx.bool_ and value.shape[-2:] == self._mask_LS.shape:
            return self._mask_LS
        raise IncompatibleModelsError(
            f"Layer {self._called} is called with an array of shape {value.shape} that may depend on positions, "
            "so no tree of drafts can be verified here; leave out tree."
        )


class _Rotary(StandIn):
    """Replaces a rotary module, and rotates each row by the position of its depth."""

    def __init__(self, rotary: nn.Module, depths_L: mx.array):
        super().__init__(rotary)
        self._depths_L = depths_L

    def __call__(self, x_BHLD: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        # Rows become the batch, whose entries mx.fast.rope gives an offset each.
        rows_LH1D = x_BHLD.swapaxes(0, 2)
        return cast(mx.array, self._module(rows_LH1D, offset=offset + self._depths_L, **options)).swapaxes(0, 2)


@cache
def _is_rotary(kind: type) -> bool:
    """Whether modules of this class are called with an array and the position of its first row."""
    parameters = list(inspect.signature(kind.__call__).parameters)
    return len(parameters) > 2 and parameters[2] == "offset"
