"""Loss and mean gradient of several batches, computed in parallel on a CPU."""

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from dflash.core.backend import on_cpu, set_blas_threads

Loss = Callable[..., mx.array]
Batch = tuple[Any, ...]
"""Arrays, of which the first is the tokens; a named tuple where a loss wants names."""


class MeanGradient:
    """Gradients averaged over the batches of a step, and the loss of each.

    On a CPU, MLX runs one operation at a time and only matrix products use more than one core. So each of ``threads``
    batches gets a thread, a copy of the model to trace, and one core. More batches than threads are computed in waves,
    so that memory holds the gradients of one wave and their sum. Batches are added in order, so the result does not
    depend on the number of threads.
    """

    def __init__(self, model: nn.Module, loss: Loss, threads: int):
        self.loss = loss
        self.threads = threads = threads if on_cpu() else 1
        # A trace replaces the model's parameters by its tracers, so each thread needs a model.
        self.models = [model] if threads == 1 else [_copied(model) for _ in range(threads)]
        self.pool = ThreadPoolExecutor(threads) if threads > 1 else None
        if self.pool is not None:
            # Without the barrier one thread could run two of these calls and another none.
            list(self.pool.map(_start_thread, [threading.Barrier(threads)] * threads))

    def __enter__(self) -> "MeanGradient":
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown()

    def __call__(self, parameters: Any, batches: Iterator[Batch]) -> tuple[list[float], Any]:
        """The loss of each batch and the mean gradients at ``parameters``; batches are taken wave by wave."""
        losses: list[float] = []
        total: Any = None
        while wave := list(islice(batches, self.threads)):
            if total is not None:
                mx.eval(total)  # or the graph would keep the gradients of all waves
            for value, gradients in self._results(parameters, wave):
                losses.append(float(value))
                total = gradients if total is None else tree_map(mx.add, total, gradients)
        return losses, tree_map(lambda array: array / len(losses), total)

    def _results(self, parameters: Any, wave: list[Batch]) -> list[tuple[mx.array, Any]]:
        if self.pool is None:
            return [_value_and_gradient(self.loss, parameters, self.models[0], wave[0])]
        mx.eval(parameters, wave)  # lazy arrays belong to this thread's stream
        set_blas_threads(1)  # one core per thread
        try:
            return list(self.pool.map(partial(self._in_thread, parameters), self.models, wave))
        finally:
            set_blas_threads(self.threads)

    def _in_thread(self, parameters: Any, model: nn.Module, batch: Batch) -> tuple[mx.array, Any]:
        with mx.stream(_thread.stream):
            return _value_and_gradient(self.loss, parameters, model, batch)


def _value_and_gradient(loss: Loss, parameters: Any, model: nn.Module, batch: Batch) -> tuple[mx.array, Any]:
    def loss_of(parameters: Any) -> mx.array:
        model.update(parameters)  # so that the loss depends on the tracers
        return loss(model, batch)

    own = tree_map(lambda array: array, parameters)  # value_and_grad puts its tracers into this very tree
    result = mx.value_and_grad(loss_of)(own)
    mx.eval(result)  # in this thread, whose stream the graph belongs to
    model.update(parameters)  # replaces tracers, or casts made by the loss
    return result


def _copied(model: nn.Module) -> nn.Module:
    """A copy with its own parameters that shares everything else (config, the bound target)."""
    return copy.deepcopy(model, {id(value): value for value in vars(model).values()})


_thread = threading.local()


def _start_thread(ready: threading.Barrier) -> None:
    """Give the calling thread its own stream: a stream belongs to the thread that created it."""
    _thread.stream = mx.new_stream(mx.default_device())
    ready.wait()
