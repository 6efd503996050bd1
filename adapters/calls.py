"""Records the module calls of one forward pass, their arguments and outputs, independently of any adapter.

Shapes: B batch, L length, E hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

_ONE_AT_A_TIME = RLock()  # __call__ of shared classes must be restored in reverse order
ROUNDING = 2e-2  # of the largest number; models compute in half precision too


@dataclass(eq=False)
class Call:
    """One call of a module; ``parent`` is the call that made it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parent: "Call | None"
    output: Any = None

    @property
    def callers(self) -> list["Call"]:
        """The calls within which this one was made."""
        return [] if self.parent is None else [self.parent, *self.parent.callers]

    @property
    def values(self) -> list[Any]:
        """All arguments, positional ones first."""
        return [*self.args, *self.kwargs.values()]

    @property
    def tokens(self) -> mx.array | None:
        """The token ids among the arguments, if there are any."""
        arrays = (x for x in self.values if isinstance(x, mx.array))
        return next((x for x in arrays if mx.issubdtype(x.dtype, mx.integer)), None)

    @property
    def hidden(self) -> mx.array | None:
        """The hidden states among the arguments: the first array of floating-point numbers."""
        arrays = (x for x in self.values if isinstance(x, mx.array))
        return next((x for x in arrays if mx.issubdtype(x.dtype, mx.floating)), None)


@dataclass
class Pass:
    """One pass of a model over ``tokens [B, L]``: its logits ``[B, L, V]``, its caches, and every call in order."""

    model: nn.Module
    tokens: mx.array
    calls: list[Call] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    logits: mx.array = field(init=False)

    def __post_init__(self) -> None:
        self.caches = make_prompt_cache(self.model)
        with _ONE_AT_A_TIME, _recorded(self.model, self.calls):
            self.logits = self.model(self.tokens, cache=self.caches)

    def calls_of(self, module: nn.Module) -> list[Call]:
        """The calls of ``module``, in order."""
        return [call for call in self.calls if call.module is module]

    def first_call(self, modules: Iterable[nn.Module]) -> Call | None:
        """The earliest call of any of ``modules``, ``None`` if none is called."""
        wanted = {id(module) for module in modules}
        return next((call for call in self.calls if id(call.module) in wanted), None)


def _snapshot(value: Any) -> Any:
    """The current arrays in ``value``: models change some in place (``h *= scale``). Other objects stay the same."""
    if isinstance(value, tuple):
        return tuple(_snapshot(item) for item in value)
    return mx.stop_gradient(value) if isinstance(value, mx.array) else value


@contextmanager
def _recorded(model: nn.Module, calls: list[Call]) -> Iterator[None]:
    """Record into ``calls`` by patching the modules' classes, where Python looks up ``__call__``."""
    stack: list[Call] = []
    thread = get_ident()  # other threads may use modules of the same classes meanwhile

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            of_the_same_call = stack and stack[-1].module is self  # super().__call__
            if of_the_same_call or get_ident() != thread:
                return original(self, *args, **kwargs)
            noted_kwargs = {name: _snapshot(value) for name, value in kwargs.items()}
            stack.append(Call(self, _snapshot(args), noted_kwargs, stack[-1] if stack else None))
            calls.append(stack[-1])
            try:
                output = original(self, *args, **kwargs)
                stack[-1].output = _snapshot(output)
                return output
            finally:
                stack.pop()

        return call

    classes = {type(module) for module in model.modules() if callable(module)}
    originals = [(cls, cast(Any, cls).__call__, "__call__" in vars(cls)) for cls in classes]
    for cls, original, _ in originals:
        cast(Any, cls).__call__ = recording(original)
    try:
        yield
    finally:
        for cls, original, own in originals:
            if own:
                cast(Any, cls).__call__ = original
            else:
                del cast(Any, cls).__call__


def streams(value: Any, shape_BLE: tuple[int, ...]) -> list[mx.array]:
    """Every array ``[B, L, E]`` in a layer's input or output, also of several values and of stacked streams."""
    if isinstance(value, list | tuple):
        return [stream for item in value for stream in streams(item, shape_BLE)]
    if not isinstance(value, mx.array) or value.shape[-3:] != shape_BLE:
        return []
    return list(value.reshape(-1, *shape_BLE))


def factor(ours: mx.array, theirs: mx.array) -> float | None:
    """The number ``theirs / ours``, or ``None`` if ``theirs`` is not a multiple of ``ours``."""
    a, b = ours.astype(mx.float32), theirs.astype(mx.float32)
    scale = mx.sum(a * b) / mx.maximum(mx.sum(a * a), 1e-30)
    rest = mx.max(mx.abs(b - scale * a)) / mx.maximum(mx.max(mx.abs(b)), 1e-30)
    return cast(float, scale.item()) if cast(float, rest.item()) <= ROUNDING else None


def embedding_factors(
    embed: Callable[[mx.array], mx.array], layers: Sequence[nn.Module], one: Pass, other: Pass
) -> list[float]:
    """The factors on ``embed(tokens)`` in the first layer's input, one for each stream that is a multiple of it.

    Two passes over different tokens are subtracted, which cancels what depends on the position alone. Empty if a norm
    or a projection lies between the table and the first of ``layers``.
    """
    first = [p.first_call(layers) for p in (one, other)]
    if first[0] is None or first[1] is None:
        return []
    table = embed(one.tokens) - embed(other.tokens)
    inputs = [streams(call.hidden, table.shape) for call in first if call is not None]
    found = (factor(table, a - b) for a, b in zip(*inputs, strict=True))
    return [number for number in found if number is not None]
