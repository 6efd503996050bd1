"""Callbacks that send a run's log to Weights & Biases, SwanLab or TensorBoard, if the package is installed.

    run: {callbacks: [wandb, tensorboard, drafters]}

The last keeps the drafter of every evaluation.

Weights & Biases and SwanLab are called through mlx-lm's own callbacks (:mod:`mlx_lm.tuner.callbacks`) with mlx-lm's
metric names, so that runs of both can be compared; their environment variables set project and entity.
"""

import shutil
from pathlib import Path
from typing import Any

from mlx_lm.tuner.callbacks import TrainingCallback, get_reporting_callbacks

from dflash.core.errors import DFlashError

from .callbacks import Callback, RunInfo, register_callback
from .export import export, require_only_a_drafter
from .loop.run import OnLog
from .loop.run_folder import STATE, read_log, read_progress

PROJECT = "dflash"
_NAMES = {"tokens_per_s": "tokens_per_second", "peak_memory_gb": "peak_memory", "heldout_loss": "val_loss"}
"""mlx-lm's names for our metrics; a report's ``loss`` is its ``train_loss``."""


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a log line by mlx-lm's names; list items are numbered from 1."""
    found: dict[str, float] = {}
    for name, value in line.items():
        values = {f"{name}/{i}": v for i, v in enumerate(value, 1)} if isinstance(value, list) else {name: value}
        found |= {_NAMES.get(k, k): v for k, v in values.items() if isinstance(v, int | float)}
    found["iteration"] = found.pop("step")
    if "loss" in found:
        found["train_loss"] = found.pop("loss")
    return found


def tell(reporter: TrainingCallback) -> OnLog:
    """A listener that passes each line to the matching method of one of mlx-lm's callbacks."""

    def on_log(line: dict[str, Any]) -> None:
        report = reporter.on_train_loss_report if "loss" in line else reporter.on_val_loss_report
        report(numbers(line))

    return on_log


def _through_mlx_lm(name: str) -> Callback:
    def callback(run: RunInfo) -> OnLog:
        recipe: Any = run.recipe  # mlx-lm's annotation says str; what it calls takes a dict
        try:
            reporter = get_reporting_callbacks(name, PROJECT, str(run.folder), recipe)
        except ImportError as error:
            raise DFlashError(f"run.callbacks names {name}, which is not installed; pip install {name}.") from error
        return tell(reporter)

    return callback


for _name in ("wandb", "swanlab"):
    register_callback(_name)(_through_mlx_lm(_name))


@register_callback("tensorboard")
def tensorboard(run: RunInfo) -> OnLog:
    """Scalars into ``tensorboard/`` of the run folder; mlx-lm has no callback for it."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise DFlashError(
            "run.callbacks names tensorboard; its writer is missing: pip install tensorboardX."
        ) from error
    writer = SummaryWriter(str(run.folder / "tensorboard"))

    def on_log(line: dict[str, Any]) -> None:
        values = numbers(line)
        step = int(values.pop("iteration"))
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return on_log


@register_callback("drafters")
def drafters(run: RunInfo) -> OnLog:
    """The drafter of every evaluation into ``drafters/STEP`` of the run folder, for ``dflash eval RUN/drafters/*``.

    One that a kill left out is made when the run continues.
    """

    def folder(step: int) -> Path:
        return run.folder / "drafters" / f"{step:06}"

    def on_log(line: dict[str, Any]) -> None:
        if "loss" in line:
            return
        finished = folder(line["step"])  # of an evaluation, before which the run has saved
        unfinished = finished.with_name(f".{finished.name}")
        require_only_a_drafter(finished)
        for left in (unfinished, finished):  # by a kill, or by the decay of a shorter run
            shutil.rmtree(left, ignore_errors=True)
        export(run.folder, unfinished, best=False)
        unfinished.rename(finished)

    saved = read_progress(run.folder / STATE).step
    for line in read_log(run.folder):
        if line["step"] == saved and not (folder(saved) / "README.md").exists():  # its last file
            on_log(line)
    return on_log
