"""Run a layer again on the first tokens of a block, from the state before the block.

For caches that cannot drop tokens, such as a recurrent state. Only what the state needs is computed again. MLX is lazy,
so the layer's output is not. Matrix products and causal convolutions are played back from the block's pass, since
neither reads a later token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..adapters.stand_ins import StandIn, standing_in
from .caches import members
from .ring import RowsCache


def _remember(cache: Any) -> list[dict[str, Any]]:
    """Each member's attributes. Lists are changed in place; arrays are replaced, or written to past the offset only."""
    return [{name: list(v) if isinstance(v, list) else v for name, v in _state(m).items()} for m in members(cache)]


def _state(member: Any) -> dict[str, Any]:
    # A replay writes the block's entries again, at the same places; an older ring would have to be copied for that.
    return {"offsets": member.offsets} if isinstance(member, RowsCache) else vars(member)


def restore(cache: Any, before: list[dict[str, Any]]) -> None:
    """Give a cache back the state that :func:`_remember` returned."""
    for member, state in zip(members(cache), before, strict=True):
        vars(member).update(state)


def _cut(value: Any, batch: int, length: int, kept: int) -> Any:
    """A layer's argument for the first ``kept`` of ``length`` tokens.

    ``[..., B, L, ...]`` has one entry per token; ``[..., L, S + L]`` is a mask, queries by keys.
    """
    if isinstance(value, list | tuple):
        return type(value)(_cut(v, batch, length, kept) for v in value)
    if not isinstance(value, mx.array):
        return value
    shape = value.shape
    axis = next((i + 1 for i in range(value.ndim - 1) if shape[i : i + 2] == (batch, length)), None)
    if axis is not None and (value.dtype != mx.bool_ or value.ndim == 2):
        return value[(*[slice(None)] * axis, slice(kept))]
    if value.ndim >= 2 and shape[-2] == length:
        return value[..., :kept, : shape[-1] - (length - kept)]
    return value


class _Product(StandIn):
    """Replaces a linear map or convolution: records its outputs for a block, or plays their first tokens back."""

    def __init__(self, linear: nn.Module, shape: tuple[int, int]):
        super().__init__(linear)
        self._shape = shape
        self._outputs: list[mx.array] = []
        self._played = self._kept = 0

    def rewound(self, kept: int) -> "_Product":
        self._played, self._kept = 0, kept
        return self

    def __call__(self, x: mx.array) -> mx.array:
        if not self._kept:
            self._outputs.append(self._module(x))
            return self._outputs[-1]
        recorded = self._outputs[self._played] if self._played < len(self._outputs) else None
        self._played += 1
        if recorded is None or recorded.shape[:2] != self._shape:
            return self._module(x)
        return recorded[:, : self._kept]


Products = list[tuple[nn.Module, str, _Product]]


def _products(layer: nn.Module, shape: tuple[int, int]) -> Products:
    """A stand-in for every linear map and causal convolution of ``layer``, with its module and its name there."""
    return [
        (owner, name, _Product(child, shape))
        for owner in layer.modules()
        for name, child in owner.items()
        if isinstance(child, nn.Linear | nn.QuantizedLinear) or _is_causal(child)
    ]


def _is_causal(child: Any) -> bool:
    """Whether it is a convolution over ``[earlier tokens, block]``, with one output per token of the block."""
    return isinstance(child, nn.Conv1d) and child.padding == 0


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer, for ``shape`` (batch, tokens), that changed ``cache``, and the cache's state before it."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, int]
    products: Products
    cache: Any
    before: Any

    def replay(self, kept: int) -> None:
        """Leave the cache as it is after the block's first ``kept`` tokens."""
        restore(self.cache, self.before)
        if kept:
            self._again(kept, lambda value: _cut(value, *self.shape, kept))

    def replay_rows(self, kept: Sequence[int]) -> None:
        """Leave each row's state as it is after the first ``kept[row]`` tokens, entries of all as they are.

        The whole block runs again, as a prompt with padding on the right: lengths and mask say where each row ends.
        """
        restore(self.cache, self.before)
        for member in members(self.cache):
            if isinstance(member, ArraysCache):
                member.prepare(lengths=list(kept))
        mask_BL = mx.arange(self.shape[1]) < mx.array(list(kept))[:, None]

        def masked(value: Any) -> Any:
            is_mask = isinstance(value, mx.array) and value.dtype == mx.bool_ and value.shape == self.shape
            return mask_BL if is_mask else value

        self._again(self.shape[1], masked)

    def _again(self, kept: int, changed: Callable[[Any], Any]) -> None:
        """Call the layer with changed arguments; its products play back their first ``kept`` tokens."""
        with standing_in([(owner, name, product.rewound(kept)) for owner, name, product in self.products]):
            self.layer(*map(changed, self.args), **{name: changed(value) for name, value in self.kwargs.items()})


@dataclass
class Recorder:
    """Calls layers in one pass of ``length`` tokens, and records the calls that ``caches`` need."""

    length: int
    caches: dict[int, Any]
    calls: dict[int, LayerCall] = field(default_factory=dict)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``layer`` returns; the call is recorded if one of its arguments is a cache that must be replayed."""
        cache = next((a for a in (*args, *kwargs.values()) if id(a) in self.caches), None)
        if cache is None or id(cache) in self.calls:
            return layer(*args, **kwargs)
        hidden_BLE = next(a for a in (*args, *kwargs.values()) if isinstance(a, mx.array))
        shape = hidden_BLE.shape[0], self.length
        products = _products(layer, shape)
        self.calls[id(cache)] = LayerCall(layer, args, kwargs, shape, products, cache, _remember(cache))
        with standing_in(products):
            return layer(*args, **kwargs)
