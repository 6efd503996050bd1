"""The state of a run around its steps: checkpoints, evaluations, the log."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash.core.errors import CheckpointError, StopTraining, TrainingError
from dflash.core.files import flat, nested, read_json
from dflash.core.progress import duration

from ..identity import check_same_run, require_same
from .clock import Clock
from .distributed import Ranks
from .interrupt import AtOnce, Interrupt
from .optimizer import Optimizer
from .run_folder import (
    BEFORE_DECAY,
    RECIPE,
    STATE,
    Best,
    Progress,
    drop_best_after,
    load_checkpoint,
    read_log,
    read_progress,
    save_checkpoint,
    truncate_log,
    write_log,
)
from .settings import FitSettings

logger = logging.getLogger(__name__)

Evaluate = Callable[[], dict[str, Any]]
OnLog = Callable[[dict[str, Any]], object]
"""Called with every line of ``log.jsonl`` when it is written."""

RECENT = 64
"""How many losses the median is taken over."""

CHECKPOINT_SECONDS, CHECKPOINT_COSTS = 60.0, 30.0
"""A checkpoint of a run on one machine gets no older than this many seconds, and than so many times what one takes."""

ADVICE = (
    "The last checkpoint is from before this step. "
    "Start again with a lower learning rate, or remove these sequences from the data."
)


class Run:
    """A run's checkpoints, metrics and evaluations. Only rank 0 writes them."""

    def __init__(
        self,
        model: nn.Module,
        settings: FitSettings,
        folder: Path,
        evaluate: Evaluate | None,
        score: str | None,
        ranks: Ranks,
        on_log: Sequence[OnLog],
        optimizer: Optimizer,
        interrupt: Interrupt,
    ):
        self.model, self.settings, self.folder, self.ranks = model, settings, folder, ranks
        self.optimizer, self.interrupt = optimizer, interrupt
        if ranks.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            begun = load_checkpoint(checkpoint_to_continue(folder, settings), model, self.optimizer)
            truncate_log(folder, begun.step)
        else:
            begun = Progress()
        self._evaluate = evaluate
        self._on_log = list(on_log)
        decay = settings.optimizer.decay_begins(settings.steps)
        self._best = Best(folder, score, decay) if score is not None and ranks.is_main else None
        weights = flat(model.trainable_parameters()).values()
        self._saved_at, self._save_seconds = time.perf_counter(), 0.0
        self._checkpoint_bytes = 4 * sum(w.nbytes for w in weights)  # the weights, two moments, and the best weights
        ranks.allow(self._checkpoint_bytes)
        self.begun, losses = _all_start_alike(ranks, model, self.optimizer, begun)
        self.recent = deque(losses, maxlen=max(RECENT, settings.log_every))
        self.clock = Clock(self._seconds_before())
        if self.begun == settings.steps:
            logger.info("%s is finished: all %d steps are done.", folder, self.begun)
        elif self.begun:
            logger.info("Continuing %s at step %d of %d.", folder, self.begun, settings.steps)

    def numbers(self, step: int) -> range:
        """The numbers of a step's batches, over all ranks."""
        size = self.settings.batches_per_step
        return range(step * size, (step + 1) * size)

    def due(self, done: int, every: int) -> bool:
        """Whether something done ``every`` so many steps is due after ``done``; at the end everything is."""
        return done % every == 0 or done == self.settings.steps

    def evaluates(self, done: int) -> bool:
        """Whether an evaluation is due after ``done`` steps."""
        return self._evaluate is not None and self.due(done, self.settings.evaluate_every)

    def saves(self, done: int) -> bool:
        """Whether a checkpoint is due after ``done`` steps.

        There is one before every evaluation, so that a failing evaluation loses nothing else.
        """
        due = self.due(done, self.settings.checkpoint_every) or self.evaluates(done) or self._decay_begins(done)
        old = time.perf_counter() - self._saved_at > max(CHECKPOINT_SECONDS, CHECKPOINT_COSTS * self._save_seconds)
        return due or (old and self.ranks.size == 1)  # several machines would not agree on the time

    def _decay_begins(self, done: int) -> bool:
        return done == self.settings.optimizer.decay_begins(self.settings.steps)

    def forecast(self, done: int, seconds: float) -> None:
        """Log what is left after ``done`` steps, the last of which took ``seconds``, and the memory of one."""
        every, steps = self.settings.evaluate_every, self.settings.steps
        evaluations = 0 if self._evaluate is None else math.ceil(steps / every) - (done - 1) // every
        left, gigabytes = steps - done, mx.get_peak_memory() / 1e9
        logger.info(
            "%d steps left of about %.2g s: %s, and %d evaluation(s). Memory of a step: %.1f GB at its peak.",
            *(left, seconds, duration(left * seconds), evaluations, gigabytes),
        )

    def report(self, done: int, norm: float) -> None:
        """Log the steps since the last report, if one is due."""
        if not (self.ranks.is_main and self.due(done, self.settings.log_every)):
            return
        window = list(self.recent)[-(((done - 1) % self.settings.log_every) + 1) :]
        speed = self.clock.tokens_per_second() * self.ranks.size
        rates = self.optimizer.learning_rates()
        self._log(done, loss=sum(window) / len(window), grad_norm=norm, **rates, tokens_per_s=speed)

    def save(self, done: int) -> None:
        """Write the checkpoint that a run continues from, and a second one where the learning rate begins to fall."""
        if self.ranks.is_main:
            progress = Progress(done, self.settings.steps, list(self.recent))
            names = (BEFORE_DECAY, STATE) if self._decay_begins(done) else (STATE,)  # a kill between repeats both
            begin = time.perf_counter()
            try:
                for name in names:
                    save_checkpoint(self.folder / name, self.model, self.optimizer, progress)
            except CheckpointError as error:
                raise TrainingError(f"After step {done}: {error} {ADVICE}") from error
            self._saved_at = time.perf_counter()
            self._save_seconds = self._saved_at - begin
        self.ranks.allow(self._checkpoint_bytes)

    def evaluate(self, done: int) -> None:
        """Evaluate, log the results, and keep the weights if they are the best so far."""
        assert self._evaluate is not None
        with self.clock.paused():
            results = self._evaluate()
        if self._best is not None:
            self._best.offer(done, self.model, results)
        if self.ranks.is_main:
            self._log(done, **results)
        self.ranks.allow(self._checkpoint_bytes)

    def make_up_for_an_evaluation(self) -> None:
        """Repeat an evaluation in which the run was interrupted."""
        if self.begun and self.evaluates(self.begun):
            lines = read_log(self.folder) if self.ranks.is_main else []
            there = any(line["step"] == self.begun and "tokens_per_s" not in line for line in lines)
            if self.ranks.broadcast_flag(not there):
                self.evaluate(self.begun)

    def _log(self, step: int, **values: Any) -> None:
        """Write a line of the log and pass it to all listeners, which may stop the run; one that fails is removed."""
        line = write_log(self.folder, step, **values, **self.clock.stamps())
        logger.info("%s", " ".join(f"{name} {value}" for name, value in line.items() if name != "time"))
        for listener in list(self._on_log):
            try:
                listener(line)
            except AtOnce:
                raise
            except (StopTraining, KeyboardInterrupt) as stop:
                self.interrupt.asked = stop
            except Exception:  # other people's code: the run matters more than its reports
                logger.exception("A callback failed at step %d; the run continues without it.", step)
                self._on_log.remove(listener)

    def _seconds_before(self) -> float:
        """Seconds that earlier processes spent on this run."""
        lines = read_log(self.folder) if self.ranks.is_main and self.begun else []
        return max((float(line["seconds"]) for line in lines if isinstance(line.get("seconds"), float)), default=0.0)


def check_identity(
    folder: Path, identity: dict[str, Any] | None, may_change: Collection[str], settings: FitSettings
) -> None:
    """Refuse another run's folder and an impossible length; warn if nothing identifies the run in the folder."""
    if identity is not None:
        if (folder / RECIPE).exists():
            require_same(folder, read_json(folder / RECIPE), identity, may_change)
            checkpoint_to_continue(folder, settings)  # before the new identity is written
        check_same_run(folder / RECIPE, identity, may_change)
    elif (folder / STATE).exists() and not (folder / RECIPE).exists():
        logger.warning(
            "%s holds a checkpoint, and the run continues from it. Nothing tells whether model, loss and data are the "
            "same: pass identity= to fit(), or choose a new folder.",
            folder,
        )


def checkpoint_to_continue(folder: Path, settings: FitSettings) -> Path:
    """The checkpoint to continue from: the last, or the one before the decay if the run's length has changed.

    Raises ``TrainingError`` if the steps done depend on the length that the run had.
    """
    last = read_progress(folder / STATE)
    if last.steps in (0, settings.steps):
        return folder / STATE
    common = min(settings.optimizer.decay_begins(last.steps), settings.optimizer.decay_begins(settings.steps))
    for path in (folder / STATE, folder / BEFORE_DECAY):
        if path.exists() and read_progress(path).step <= common:
            drop_best_after(folder, read_progress(path).step)
            return path
    raise TrainingError(
        f"{folder} was trained for {last.steps} steps and cannot become a run of {settings.steps}: the learning rate "
        f"of the {last.step} steps done depended on that length. Set another folder for the new run; with "
        "drafter.from it starts from these weights. (With optimizer.kind muon, a run can be made longer.)"
    )


def _all_start_alike(ranks: Ranks, model: nn.Module, optimizer: Optimizer, begun: Progress) -> tuple[int, list[float]]:
    """Give every rank the state of rank 0, which alone may have the run's folder; returns its steps and losses."""
    if ranks.size == 1:
        return begun.step, begun.losses
    done, count = (int(n) for n in ranks.all_gather([begun.step, len(begun.losses)])[:: ranks.size])
    model.update(nested(ranks.broadcast(flat(model.trainable_parameters()))))
    optimizer.state = ranks.broadcast(optimizer.state)
    return done, ranks.all_gather(begun.losses if ranks.rank == 0 else [0.0] * count)[:: ranks.size]
