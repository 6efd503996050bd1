"""The training loop: batches in, weights out, and the same weights whether or not it was interrupted.

Knows a model, a loss, batches by step number, and checkpoints. Must not know what is learned: target and
drafter train through this one loop.
"""

import copy
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from tqdm import tqdm

from .arrays import flat, nested, read_arrays, write_arrays
from .cpu import set_blas_threads
from .fastmath import on_cpu, warm_up
from .optimizer import Optimizer, OptimizerSettings, schedule

logger = logging.getLogger(__name__)

Loss = Callable[..., mx.array]
Evaluate = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class FitSettings:
    """All counts are in steps, so that a run does not depend on how fast the machine is."""

    steps: int
    batches_per_step: int = 2
    log_every: int = 20
    checkpoint_every: int = 50
    evaluate_every: int = 200
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)


def save_checkpoint(path: Path, step: int, model: nn.Module, optimizer: Optimizer) -> None:
    """Write weights, optimiser state and the number of steps done to one file."""
    arrays = {f"model.{k}": v for k, v in flat(model.trainable_parameters()).items()}
    arrays |= {f"optimizer.{k}": v for k, v in optimizer.state.items()}
    write_arrays(path, arrays, {"step": str(step)})


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Restore what :func:`save_checkpoint` wrote; returns the number of steps done, 0 without a file."""
    if not path.exists():
        return 0
    arrays, metadata = read_arrays(path)
    parts: dict[str, dict[str, mx.array]] = {"model": {}, "optimizer": {}}
    for name, value in arrays.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = value
    model.update(nested(parts["model"]))
    optimizer.state = parts["optimizer"]
    return int(metadata["step"])


class MeanGradient:
    """Loss and gradients, averaged over several batches.

    MLX runs one operation at a time on a CPU, and only its matrix products use more than one core; so each
    batch of a step gets a thread, a copy of the model to trace and one core. The result does not depend on
    the threads: batches are added in order.
    """

    def __init__(self, model: nn.Module, loss: Loss, batches: int):
        self.loss = loss
        self.models = [copy.deepcopy(model) for _ in range(batches)]
        self.threads = threads = batches if on_cpu() else 1
        self.pool = ThreadPoolExecutor(threads)
        ready, turn = threading.Barrier(threads), threading.Lock()
        list(self.pool.map(lambda _: _start_thread(turn, ready), range(threads)))

    def __call__(self, parameters: Any, batches: list[tuple[mx.array, ...]]) -> tuple[mx.array, Any]:
        """Mean loss and gradients of the loss at ``parameters``; the models take their turn in order."""
        if self.threads > 1:
            set_blas_threads(1)
        results = list(self.pool.map(partial(self._one, parameters), self.models, batches))
        mean = tree_map(lambda *values: sum(values[1:], values[0]) / len(values), *results)
        return mean[0], mean[1]

    def use_all_cores(self) -> None:
        """Give one matrix product the cores of all threads again."""
        if self.threads > 1:
            set_blas_threads(self.threads)

    def _one(self, parameters: Any, model: nn.Module, arrays: tuple[mx.array, ...]) -> tuple[mx.array, Any]:
        def loss_of(parameters: Any) -> mx.array:
            model.update(parameters)
            return self.loss(model, *arrays)

        own = tree_map(lambda array: array, parameters)  # value_and_grad puts its tracers into this very tree
        with mx.stream(_thread.stream):
            result = mx.value_and_grad(loss_of)(own)
            mx.eval(result)
        return result


_thread = threading.local()


def _start_thread(turn: threading.Lock, ready: threading.Barrier) -> None:
    """Give the calling thread a stream, which belongs to the thread that made it, and warm it up."""
    with turn:
        _thread.stream = mx.new_stream(mx.default_device())
        with mx.stream(_thread.stream):
            warm_up()
    ready.wait()


def fit(
    model: nn.Module,
    batch: Callable[[int], tuple[mx.array, ...]],
    loss: Loss,
    settings: FitSettings,
    folder: Path,
    evaluate: Evaluate | None = None,
) -> None:
    """Train ``model`` in place for ``settings.steps`` steps, or what is left of them.

    ``batch(number)`` must be a function of the number alone; ``loss(model, *batch)`` is a scalar. A step
    takes the mean gradient of ``batches_per_step`` batches, side by side on a CPU. Progress goes
    to ``folder``: ``state.safetensors`` (to continue from) and ``log.jsonl``. A run stopped at any moment
    continues from its last checkpoint to the same weights. Raises :class:`FloatingPointError` on a loss
    that is not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = Optimizer(model.trainable_parameters(), settings.optimizer)
    done = load_checkpoint(folder / "state.safetensors", model, optimizer)
    if done:
        logger.info("Continuing %s at step %d of %d.", folder, done, settings.steps)

    mean_gradient = MeanGradient(model, loss, settings.batches_per_step)
    recent: list[float] = []
    started, tokens = time.perf_counter(), 0
    for step in tqdm(range(done, settings.steps), initial=done, total=settings.steps, disable=None, desc=folder.name):
        first = step * settings.batches_per_step
        batches = [batch(first + i) for i in range(settings.batches_per_step)]
        parameters = model.trainable_parameters()
        value, gradients = mean_gradient(parameters, batches)
        share = schedule(step, settings.steps, settings.optimizer)
        mean_gradient.use_all_cores()
        updated, norm = optimizer.update(parameters, gradients, share)
        model.update(updated)
        mx.eval(value, norm, updated, optimizer.both.state)
        recent.append(float(value))
        tokens += sum(arrays[0].size for arrays in batches)
        if not math.isfinite(recent[-1]):
            raise FloatingPointError(f"The loss is {recent[-1]} at step {step}; lower the recipe's learning rates.")
        last = step + 1 == settings.steps
        if (step + 1) % settings.log_every == 0 or last:
            seconds = time.perf_counter() - started
            _log(folder, step=step + 1, loss=sum(recent) / len(recent), norm=float(norm), tokens_per_s=tokens / seconds)
            recent, started, tokens = [], time.perf_counter(), 0
        if (step + 1) % settings.checkpoint_every == 0 or last:
            save_checkpoint(folder / "state.safetensors", step + 1, model, optimizer)
        if evaluate is not None and (last or (step + 1) % settings.evaluate_every == 0):
            paused = time.perf_counter()
            _log(folder, step=step + 1, **evaluate())
            started += time.perf_counter() - paused


def _log(folder: Path, **values: float) -> None:
    """One line to the log and to ``log.jsonl``."""
    rounded = {k: v if isinstance(v, int) else float(f"{v:.5g}") for k, v in values.items()}
    logger.info("%s", " ".join(f"{k} {v}" for k, v in rounded.items()))
    with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(rounded) + "\n")
