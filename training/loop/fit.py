"""The training loop for any model. Interruptions do not change the weights it ends with."""

import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from dflash.core.errors import StopTraining, TrainingError
from dflash.core.progress import draws_bars

from .distributed import PeerLostError, Ranks
from .gradients import Batch, Loss, MeanGradient
from .interrupt import Interrupt
from .optimizer import Optimizer
from .run import ADVICE, RECENT, Evaluate, OnLog, Run, check_identity
from .settings import FitSettings

logger = logging.getLogger(__name__)

_ENOUGH = 16  # losses for a meaningful median

Batches = Callable[[int], Batch]


def fit(
    model: nn.Module,
    batch: Batches,
    loss: Loss,
    settings: FitSettings,
    folder: Path,
    evaluate: Evaluate | None = None,
    *,
    score: str | None = None,
    name_batch: Callable[[int], str] = "batch {}".format,
    ranks: Ranks | None = None,
    identity: dict[str, Any] | None = None,
    may_change: Collection[str] = (),
    on_log: Sequence[OnLog] = (),
    optimizer: Optimizer | None = None,
) -> None:
    """Train ``model`` in place for ``settings.steps`` steps, or the remaining ones.

    ``batch(number)`` must be a function of the number alone; ``loss(model, batch)`` is a scalar. Progress is saved in
    ``folder`` (see :mod:`~dflash.training.loop.run_folder`). ``score`` names a result of ``evaluate``; the weights with
    the highest score are kept as well. An interrupted run continues from its last checkpoint to the same weights. A
    longer run continues a shorter one from the step at which the learning rate began to fall.

    ``identity`` is plain data that describes the model, the data and the loss. It is recorded in the folder; a folder
    with another identity is refused, unless they differ only in keys of ``may_change``. The functions in ``on_log`` get
    every line of the log. ``optimizer`` is a new one for the settings, if the caller needs to see it too.

    Ctrl-C finishes the step (or an evaluation and the step after it), saves, and raises ``KeyboardInterrupt``. One of
    ``on_log`` that raises ``StopTraining`` ends the run in the same way, and its error is raised again. Raises
    ``TrainingError`` for the folder of another run, and, with ``name_batch`` of the batch and without saving the step,
    for an exploding loss and for a loss, gradient or weight that is not finite; ``CheckpointError`` for an unusable
    checkpoint.
    """
    ranks = ranks or Ranks()
    if ranks.is_main:
        check_identity(folder, identity, may_change, settings)
    interrupt = Interrupt()
    optimizer = optimizer or Optimizer(model.trainable_parameters(), settings.optimizer, settings.steps)
    run = Run(model, settings, folder, evaluate, score, ranks, on_log, optimizer, interrupt)
    with MeanGradient(model, loss, min(settings.threads, settings.batches_per_step)) as mean_gradient, interrupt:
        run.make_up_for_an_evaluation()
        left, hidden = range(run.begun, settings.steps), not (ranks.is_main and draws_bars())
        bar = tqdm(left, folder.name, settings.steps, initial=run.begun, disable=hidden)
        for number in bar:
            begin = time.perf_counter()
            done, stop = _step(run, mean_gradient, batch, name_batch, number)
            if ranks.is_main and done == run.begun + 2:  # the first one also compiles
                run.forecast(done, time.perf_counter() - begin)
            bar.set_postfix_str(f"loss {run.recent[-1]:.3f}", refresh=False)
            if stop is not None or run.saves(done):
                run.save(done)
            if stop is not None:
                why = f" by a callback ({stop})" if isinstance(stop, StopTraining) else ""
                logger.info("Stopped at step %d of %d%s; the same command continues.", done, settings.steps, why)
                raise stop
            if run.evaluates(done):
                run.evaluate(done)


def _step(
    run: Run, mean_gradient: MeanGradient, batch: Batches, name_batch: Callable[[int], str], step: int
) -> tuple[int, KeyboardInterrupt | StopTraining | None]:
    """Make step number ``step``: the mean gradient over all ranks, its checks, and the update.

    Returns the steps done, and what is to end the run on all ranks, if anything.
    """
    numbers, parameters = run.numbers(step), run.model.trainable_parameters()
    own, gradients = mean_gradient(parameters, (run.clock.counted(batch(n)) for n in run.ranks.shard(numbers)))
    try:
        asked = run.interrupt.asked
        told = run.ranks.all_gather([*own, 0.0 if asked is None else 2.0 if isinstance(asked, StopTraining) else 1.0])
        gradients = run.ranks.all_reduce_mean(gradients)
    except PeerLostError:
        logger.info("Ending after step %d of %d.", step, run.settings.steps)
        run.save(step)
        raise
    values, stop = told[: len(numbers)], max(told[len(numbers) :])
    names = [name_batch(n) for n in numbers]
    check_losses(values, run.recent, run.settings.max_loss_spike, names, step)
    updated, norm = run.optimizer.update(parameters, gradients)
    mx.eval(norm, updated, run.optimizer.inner.state)
    if not math.isfinite(norm):
        where = f"at step {step + 1}, in {', '.join(names)}"
        raise TrainingError(f"The norm of the gradient is {float(norm)} {where}. {ADVICE}")
    run.model.update(updated)
    run.recent.append(float(np.float32(sum(values) / len(values))))  # so that every rank has the same
    run.report(step + 1, float(norm))
    if stop and asked is None:  # another rank was asked
        asked = StopTraining() if stop == 2 else KeyboardInterrupt()
    return step + 1, asked


def check_losses(
    values: list[float], recent: Sequence[float], max_loss_spike: float | None, names: list[str], step: int
) -> None:
    """Raise :class:`TrainingError` naming the first batch whose loss is not finite or far above the recent ones.

    The limit is ``max_loss_spike`` times the recent median, or as far above a negative median.
    """
    known = list(recent)[-RECENT:] if len(recent) >= _ENOUGH else [math.inf]
    median, size = statistics.median(known), statistics.median(map(abs, known))
    limit = math.inf if max_loss_spike is None else median + (max_loss_spike - 1) * size
    for value, name in zip(values, names, strict=True):
        if not math.isfinite(value):
            raise TrainingError(f"The loss is {value} at step {step + 1}, in {name}. {ADVICE}")
        if value > limit:
            raise TrainingError(
                f"The loss is {value:.4g} at step {step + 1}, in {name}: over the limit of {limit:.4g}, which "
                f"run.max_loss_spike {max_loss_spike:g} sets from the recent median {median:.4g}. {ADVICE} To accept "
                "the loss, raise run.max_loss_spike."
            )
