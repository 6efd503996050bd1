"""The training loop: batches in, weights out, and the same weights whether or not it was interrupted.

Knows a model, a loss, batches by their number, and checkpoints. Must not know what is learned: target and
drafter train through this one loop.
"""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from dflash.errors import TrainingError
from dflash.files import flat, nested

from .checkpoints import STATE, Best, load_checkpoint, read_log, save_checkpoint, truncate_log, write_log
from .distributed import PeerLostError, Ranks
from .gradients import Batch, Loss, MeanGradient
from .interrupt import Interrupt
from .optimizer import AdamWSettings, MuonSettings, Optimizer

logger = logging.getLogger(__name__)

Evaluate = Callable[[], dict[str, Any]]

_RECENT, _ENOUGH = 64, 16  # losses whose median a new one is measured by, and how many make a median


@dataclass(frozen=True)
class FitSettings:
    """All counts are in steps, so that a run does not depend on how fast the machine is.

    A step takes the mean gradient of ``batches_per_step`` batches, all ranks together. ``threads`` of them
    go side by side on a CPU, all of them if ``None``; the others follow (gradient accumulation). A loss of
    more than ``max_loss_spike`` times the recent median stops the run.
    """

    steps: int
    batches_per_step: int = 2
    threads: int | None = None
    log_every: int = 20
    checkpoint_every: int = 50
    evaluate_every: int = 200
    max_loss_spike: float | None = None
    optimizer: MuonSettings | AdamWSettings = field(default_factory=MuonSettings)


def fit(
    model: nn.Module,
    batch: Callable[[int], Batch],
    loss: Loss,
    settings: FitSettings,
    folder: Path,
    evaluate: Evaluate | None = None,
    *,
    score: str | None = None,
    name_batch: Callable[[int], str] = "batch {}".format,
    ranks: Ranks | None = None,
) -> None:
    """Train ``model`` in place for ``settings.steps`` steps, or what is left of them.

    ``batch(number)`` must be a function of the number alone; ``loss(model, batch)`` is a scalar. Progress
    goes to ``folder``, as :mod:`~dflash.training.loop.checkpoints` says; with ``score``, the name of a result of
    ``evaluate``, the weights for which it was greatest are kept too. A run stopped at any moment continues
    from its last checkpoint to the same weights.

    Ctrl-C finishes the step, or an evaluation and the step after it, saves and raises ``KeyboardInterrupt``. A
    loss or gradient that is not finite, or a loss that explodes, raises :class:`~dflash.errors.TrainingError` with
    ``name_batch`` of the offending batch; the weights of that step are not saved.
    """
    ranks = ranks or Ranks()
    run = _Run(model, settings, folder, evaluate, score, ranks)
    size = settings.batches_per_step
    mean_gradient = MeanGradient(model, loss, min(settings.threads or size, size))
    steps = range(run.begun, settings.steps)
    bar = tqdm(
        steps, initial=run.begun, total=settings.steps, disable=None if ranks.is_main else True, desc=folder.name
    )
    with Interrupt() as interrupt:
        run.make_up_for_an_evaluation()
        for step in bar:
            numbers = range(step * size, (step + 1) * size)
            parameters = model.trainable_parameters()
            own, gradients = mean_gradient(parameters, (run.clock.counted(batch(n)) for n in ranks.shard(numbers)))
            try:
                told = ranks.all_gather([*own, float(interrupt.asked)])
                gradients = ranks.all_reduce_mean(gradients)
            except PeerLostError:
                logger.info("Ending after step %d of %d.", step, settings.steps)
                run.save(step)
                raise
            values, stop = told[:size], any(told[size:])
            _check_losses(values, run.recent, settings.max_loss_spike, [name_batch(n) for n in numbers], step)
            lr_scale = settings.optimizer.lr_scale(step, settings.steps)
            updated, norm = run.optimizer.update(parameters, gradients, lr_scale)
            mx.eval(norm, updated, run.optimizer.inner.state)
            if not math.isfinite(norm):
                names = ", ".join(name_batch(n) for n in numbers)
                raise TrainingError(f"The gradient is {float(norm)} at step {step + 1}, in {names}.{_KEPT}.")
            model.update(updated)
            run.recent.append(float(np.float32(sum(values) / size)))  # so that every rank has the same
            bar.set_postfix(loss=f"{run.recent[-1]:.3f}", refresh=False)

            done = step + 1
            run.report(done, float(norm), lr_scale)
            # Before the evaluation: whatever happens in that, it is all that is lost.
            if stop or run.due(done, settings.checkpoint_every) or run.evaluates(done):
                run.save(done)
            if stop:
                logger.info("Stopped at step %d of %d; the same command continues.", done, settings.steps)
                raise KeyboardInterrupt
            if run.evaluates(done):
                run.evaluate(done)


class _Run:
    """What a run continues from and leaves in its folder: checkpoints, metrics, evaluations. Only rank 0 writes."""

    def __init__(
        self,
        model: nn.Module,
        settings: FitSettings,
        folder: Path,
        evaluate: Evaluate | None,
        score: str | None,
        ranks: Ranks,
    ):
        self.model, self.settings, self.folder, self.ranks = model, settings, folder, ranks
        self.optimizer = Optimizer(model.trainable_parameters(), settings.optimizer)
        begun, losses = load_checkpoint(folder / STATE, model, self.optimizer) if ranks.is_main else (0, [])
        if ranks.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            truncate_log(folder, begun)
        self._evaluate = evaluate
        self._best = Best(folder, score) if score is not None and ranks.is_main else None
        weights = flat(model.trainable_parameters()).values()
        self._checkpoint_bytes = 4 * sum(w.nbytes for w in weights)  # they, two moments, and the best
        ranks.allow(self._checkpoint_bytes)
        self.begun, losses = _all_start_alike(ranks, model, self.optimizer, begun, losses)
        self.recent = deque(losses, maxlen=max(_RECENT, settings.log_every))
        self.clock = _Clock()
        if self.begun:
            logger.info("Continuing %s at step %d of %d.", folder, self.begun, settings.steps)

    def due(self, done: int, every: int) -> bool:
        """Whether something is due after ``done`` steps; at the end everything is."""
        return done % every == 0 or done == self.settings.steps

    def evaluates(self, done: int) -> bool:
        """Whether an evaluation is due after ``done`` steps."""
        return self._evaluate is not None and self.due(done, self.settings.evaluate_every)

    def report(self, done: int, norm: float, lr_scale: float) -> None:
        """Log the steps since the last report, if one is due."""
        if not (self.ranks.is_main and self.due(done, self.settings.log_every)):
            return
        window = list(self.recent)[-(((done - 1) % self.settings.log_every) + 1) :]
        speed = self.clock.tokens_per_second() * self.ranks.size
        mean = sum(window) / len(window)
        write_log(self.folder, done, loss=mean, norm=norm, rate=lr_scale, tokens_per_s=speed)

    def save(self, done: int) -> None:
        """Write the checkpoint that a run continues from."""
        if self.ranks.is_main:
            save_checkpoint(self.folder / STATE, done, self.model, self.optimizer, list(self.recent))
        self.ranks.allow(self._checkpoint_bytes)

    def evaluate(self, done: int) -> None:
        """Evaluate, keep the weights if they are the best so far, and log the results."""
        assert self._evaluate is not None
        with self.clock.paused():
            results = self._evaluate()
        if self._best is not None:
            self._best.offer(done, self.model, results)
        if self.ranks.is_main:
            write_log(self.folder, done, **results)
        self.ranks.allow(self._checkpoint_bytes)

    def make_up_for_an_evaluation(self) -> None:
        """Evaluate where the run continues, if it was stopped in that evaluation."""
        if self.begun and self.evaluates(self.begun):
            lines = read_log(self.folder) if self.ranks.is_main else []
            there = any(line["step"] == self.begun and "tokens_per_s" not in line for line in lines)
            if self.ranks.broadcast_flag(not there):
                self.evaluate(self.begun)


def _all_start_alike(
    ranks: Ranks, model: nn.Module, optimizer: Optimizer, done: int, losses: list[float]
) -> tuple[int, list[float]]:
    """Rank 0's weights, optimiser state, steps done and recent losses; only it may have the run's folder."""
    if ranks.size == 1:
        return done, losses
    done, count = (int(n) for n in ranks.all_gather([done, len(losses)])[:: ranks.size])
    model.update(nested(ranks.broadcast(flat(model.trainable_parameters()))))
    optimizer.state = ranks.broadcast(optimizer.state)
    return done, ranks.all_gather(losses if ranks.rank == 0 else [0.0] * count)[:: ranks.size]


_KEPT = " The last checkpoint is from before it. Begin again with a lower learning rate, or without the data"


def _check_losses(
    values: list[float], recent: Sequence[float], max_loss_spike: float | None, names: list[str], step: int
) -> None:
    """Raise :class:`TrainingError` naming the first batch whose loss is not finite, or far above the recent ones."""
    median = statistics.median(list(recent)[-_RECENT:]) if len(recent) >= _ENOUGH else math.inf
    limit = math.inf if max_loss_spike is None else max_loss_spike * median
    for value, name in zip(values, names, strict=True):
        if not math.isfinite(value):
            raise TrainingError(f"The loss is {value} at step {step + 1}, in {name}.{_KEPT}.")
        if value > limit:
            raise TrainingError(
                f"The loss is {value:.4g} at step {step + 1}, in {name}: more than {max_loss_spike:g} times the "
                f"recent median {median:.4g}.{_KEPT}, or go on with a greater max_loss_spike."
            )


class _Clock:
    """Tokens per second between reports, without pauses."""

    def __init__(self) -> None:
        self.started, self.tokens = time.perf_counter(), 0

    def counted(self, arrays: Batch) -> Batch:
        self.tokens += arrays[0].size
        return arrays

    def tokens_per_second(self) -> float:
        now = time.perf_counter()
        speed = self.tokens / (now - self.started)
        self.started, self.tokens = now, 0
        return speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.started += time.perf_counter() - begin
