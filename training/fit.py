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

from .arrays import flat, nested
from .checkpoints import STATE, Best, cut_log, load_checkpoint, read_log, save_checkpoint, write_log
from .gradients import Batch, Loss, MeanGradient
from .interrupt import Interrupt
from .optimizer import AdamWSettings, MuonSettings, Optimizer
from .ranks import PeerLostError, Ranks

logger = logging.getLogger(__name__)

Evaluate = Callable[[], dict[str, Any]]

_RECENT, _ENOUGH = 64, 16  # losses whose median a new one is measured by, and how many make a median


@dataclass(frozen=True)
class FitSettings:
    """All counts are in steps, so that a run does not depend on how fast the machine is.

    A step takes the mean gradient of ``batches_per_step`` batches, all ranks together. ``threads`` of them
    go side by side on a CPU, all of them if ``None``; the others follow (gradient accumulation). A loss of
    more than ``explosion`` times the recent median stops the run.
    """

    steps: int
    batches_per_step: int = 2
    threads: int | None = None
    log_every: int = 20
    checkpoint_every: int = 50
    evaluate_every: int = 200
    explosion: float | None = None
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

    ``batch(number)`` must be a function of the number alone; ``loss(model, *batch)`` is a scalar. Progress
    goes to ``folder``, as :mod:`~dflash.training.checkpoints` says; with ``score``, the name of a result of
    ``evaluate``, the weights for which it was greatest are kept too. A run stopped at any moment continues
    from its last checkpoint to the same weights.

    Ctrl-C finishes the step, or an evaluation and the step after it, saves and raises ``KeyboardInterrupt``. A
    loss or gradient that is not finite, or a loss that explodes, raises :class:`~dflash.errors.TrainingError` with
    ``name_batch`` of the offending batch; the weights of that step are not saved.
    """
    ranks = ranks or Ranks()
    optimizer = Optimizer(model.trainable_parameters(), settings.optimizer)
    begun, losses = load_checkpoint(folder / STATE, model, optimizer) if ranks.writes else (0, [])
    if ranks.writes:
        folder.mkdir(parents=True, exist_ok=True)
        cut_log(folder, begun)
    checkpoint_bytes = 4 * sum(a.nbytes for a in flat(model.trainable_parameters()).values())  # two moments, the best
    best = Best(folder, score) if score is not None and ranks.writes else None
    ranks.allow(checkpoint_bytes)
    begun, losses = _all_start_alike(ranks, model, optimizer, begun, losses)
    recent = deque(losses, maxlen=max(_RECENT, settings.log_every))
    if begun:
        logger.info("Continuing %s at step %d of %d.", folder, begun, settings.steps)

    def due(done: int, every: int) -> bool:
        return done % every == 0 or done == settings.steps

    def save(done: int) -> None:
        if ranks.writes:
            save_checkpoint(folder / STATE, done, model, optimizer, list(recent))
        ranks.allow(checkpoint_bytes)

    def evaluate_after(done: int) -> None:
        if evaluate is None or not due(done, settings.evaluate_every):
            return
        with clock.paused():
            results = evaluate()
        if best is not None:
            best.offer(done, model, results)
        if ranks.writes:
            write_log(folder, done, **results)
        ranks.allow(checkpoint_bytes)

    size = settings.batches_per_step
    mean_gradient = MeanGradient(model, loss, min(settings.threads or size, size))
    clock = _Clock()
    steps = range(begun, settings.steps)
    bar = tqdm(steps, initial=begun, total=settings.steps, disable=None if ranks.writes else True, desc=folder.name)
    with Interrupt() as interrupt:
        if begun and ranks.flag_of_first(ranks.writes and not _is_evaluated(folder, begun)):
            evaluate_after(begun)
        for step in bar:
            numbers = range(step * size, (step + 1) * size)
            parameters = model.trainable_parameters()
            own, gradients = mean_gradient(parameters, (clock.counted(batch(n)) for n in ranks.share(numbers)))
            try:
                told = ranks.joined([*own, float(interrupt.asked)])
                gradients = ranks.average(gradients)
            except PeerLostError:
                logger.info("Ending after step %d of %d.", step, settings.steps)
                save(step)
                raise
            values, stop = told[:size], any(told[size:])
            _check_losses(values, recent, settings.explosion, [name_batch(n) for n in numbers], step)
            share = settings.optimizer.share(step, settings.steps)
            updated, norm = optimizer.update(parameters, gradients, share)
            mx.eval(norm, updated, optimizer.inner.state)
            if not math.isfinite(norm):
                names = ", ".join(name_batch(n) for n in numbers)
                raise TrainingError(f"The gradient is {float(norm)} at step {step + 1}, in {names}.{_KEPT}.")
            model.update(updated)
            recent.append(float(np.float32(sum(values) / size)))  # so that every rank has the same
            bar.set_postfix(loss=f"{recent[-1]:.3f}", refresh=False)

            done = step + 1
            if ranks.writes and due(done, settings.log_every):
                window = list(recent)[-((step % settings.log_every) + 1) :]
                speed = clock.tokens_per_second() * ranks.size
                mean = sum(window) / len(window)
                write_log(folder, done, loss=mean, norm=float(norm), rate=share, tokens_per_s=speed)
            # Before the evaluation: whatever happens in that, it is all that is lost.
            if stop or due(done, settings.checkpoint_every) or due(done, settings.evaluate_every):
                save(done)
            if stop:
                logger.info("Stopped at step %d of %d; the same command continues.", done, settings.steps)
                raise KeyboardInterrupt
            evaluate_after(done)


def _is_evaluated(folder: Path, step: int) -> bool:
    return any(line["step"] == step and "tokens_per_s" not in line for line in read_log(folder))


def _all_start_alike(
    ranks: Ranks, model: nn.Module, optimizer: Optimizer, done: int, losses: list[float]
) -> tuple[int, list[float]]:
    """Rank 0's weights, optimiser state, steps done and recent losses; only it may have the run's folder."""
    if ranks.size == 1:
        return done, losses
    done, count = (int(n) for n in ranks.joined([done, len(losses)])[:: ranks.size])
    model.update(nested(ranks.from_first(flat(model.trainable_parameters()))))
    optimizer.state = ranks.from_first(optimizer.state)
    return done, ranks.joined(losses if ranks.rank == 0 else [0.0] * count)[:: ranks.size]


_KEPT = " The last checkpoint is from before it. Begin again with a lower learning rate, or without the data"


def _check_losses(
    values: list[float], recent: Sequence[float], explosion: float | None, names: list[str], step: int
) -> None:
    """Raise :class:`TrainingError` naming the first batch whose loss is not finite, or far above the recent ones."""
    median = statistics.median(list(recent)[-_RECENT:]) if len(recent) >= _ENOUGH else math.inf
    limit = math.inf if explosion is None else explosion * median
    for value, name in zip(values, names, strict=True):
        if not math.isfinite(value):
            raise TrainingError(f"The loss is {value} at step {step + 1}, in {name}.{_KEPT}.")
        if value > limit:
            raise TrainingError(
                f"The loss is {value:.4g} at step {step + 1}, in {name}: more than {explosion:g} times the "
                f"recent median {median:.4g}.{_KEPT}, or go on with a greater explosion."
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
