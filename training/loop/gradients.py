"""Loss and gradients of several batches, side by side on a CPU and one wave after the other."""

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

    MLX runs one operation at a time on a CPU, and only its matrix products use more than one core; so each
    of ``threads`` batches gets a thread, a copy of the model to trace and one core. More batches than
    threads go in waves, so that memory holds the gradients of one wave and their sum. The result does not
    depend on the threads: batches are added in order.
    """

    def __init__(self, model: nn.Module, loss: Loss, threads: int):
        self.loss = loss
        self.threads = threads = threads if on_cpu() else 1
        # While a gradient is traced, the model's parameters are that trace's tracers: each thread needs a model.
        self.models = [model] if threads == 1 else [_copied(model) for _ in range(threads)]
        self.pool = ThreadPoolExecutor(threads) if threads > 1 else None
        if self.pool is not None:
            # The barrier holds every thread until all have started: otherwise one could start twice, another never.
            list(self.pool.map(_start_thread, [threading.Barrier(threads)] * threads))

    def __enter__(self) -> "MeanGradient":
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown()

    def __call__(self, parameters: Any, batches: Iterator[Batch]) -> tuple[list[float], Any]:
        """The loss of each batch and the mean gradients at ``parameters``; batches are made wave by wave."""
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
        mx.eval(parameters, wave)  # what is not computed yet belongs to this thread's stream
        set_blas_threads(1)  # each thread has one core; more BLAS threads would only fight for them
        try:
            return list(self.pool.map(partial(self._in_thread, parameters), self.models, wave))
        finally:
            set_blas_threads(self.threads)

    def _in_thread(self, parameters: Any, model: nn.Module, batch: Batch) -> tuple[mx.array, Any]:
        with mx.stream(_thread.stream):
            return _value_and_gradient(self.loss, parameters, model, batch)


def _value_and_gradient(loss: Loss, parameters: Any, model: nn.Module, batch: Batch) -> tuple[mx.array, Any]:
    def loss_of(parameters: Any) -> mx.array:
        model.update(parameters)  # the tracers, so that what the loss computes depends on them
        return loss(model, batch)

    own = tree_map(lambda array: array, parameters)  # value_and_grad puts its tracers into this very tree
    result = mx.value_and_grad(loss_of)(own)
    mx.eval(result)  # in this thread, whose stream the graph belongs to
    model.update(parameters)  # in place of tracers, or of the casts that a loss computed in
    return result


def _copied(model: nn.Module) -> nn.Module:
    """A copy with parameters of its own that shares what the model only refers to (config, a bound target)."""
    return copy.deepcopy(model, {id(value): value for value in vars(model).values()})


_thread = threading.local()


def _start_thread(ready: threading.Barrier) -> None:
    """Give the calling thread a stream, which belongs to the thread that made it."""
    _thread.stream = mx.new_stream(mx.default_device())
    ready.wait()
