"""The files in a run's folder: checkpoints, best weights, log. Each is complete or absent.

``state.safetensors``         the last checkpoint: weights, optimiser state and, in its metadata, the steps done,
                              the length of the run and the recent losses
``before-decay.safetensors``  the checkpoint where the learning rate began to fall, if the schedule has a decay
                              phase: a longer run continues from it
``best.safetensors``          the weights of the best evaluation, with its results
``best-before-decay...``      those of the best one until then, if a later one was better: a longer run has them again
``log.jsonl``                 a line for each report. When a run continues, the lines after its checkpoint are
                              dropped, because those steps are repeated
``recipe.json``               what the run was started with (:mod:`dflash.training.identity`)
"""

import json
import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash.core.errors import CheckpointError, one_line
from dflash.core.files import atomic_write, flat, nested, read_arrays, write_arrays

from .optimizer import Optimizer

logger = logging.getLogger(__name__)

STATE, BEFORE_DECAY, BEST = "state.safetensors", "before-decay.safetensors", "best.safetensors"
BEST_BEFORE_DECAY = "best-before-decay.safetensors"
LOG, RECIPE = "log.jsonl", "recipe.json"


@dataclass(frozen=True)
class Progress:
    """A run's progress: ``step`` of ``steps`` steps (0 in older files), and the recent losses."""

    step: int = 0
    steps: int = 0
    losses: list[float] = field(default_factory=list)


def save_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, progress: Progress) -> None:
    """Write weights, optimiser state and progress to one file.

    Raises ``CheckpointError`` if a value is not finite: such a run could not continue.
    """
    arrays = {f"model.{name}": value for name, value in flat(model.trainable_parameters()).items()}
    arrays |= {f"optimizer.{name}": value for name, value in optimizer.state.items()}
    _require_finite(arrays, path)
    in_order = dict(sorted(arrays.items()))  # so that equal states make equal files
    metadata = {"step": progress.step, "steps": progress.steps, "losses": json.dumps(progress.losses)}
    write_arrays(path, in_order, {name: str(value) for name, value in metadata.items()})


def read_progress(path: Path) -> Progress:
    """The progress of the checkpoint at ``path``; none without the file."""
    return _progress(path, _read(path)[1]) if path.exists() else Progress()


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
    """Restore what :func:`save_checkpoint` wrote; without the file nothing changes.

    Raises ``CheckpointError`` for a damaged file, or one of another model or optimiser.
    """
    if not path.exists():
        return Progress()
    arrays, metadata = _read(path)
    progress = _progress(path, metadata)
    parts: dict[str, dict[str, mx.array]] = {"model": {}, "optimizer": {}}
    for name, value in arrays.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = value
    _require_alike(path, "weight", parts["model"], flat(model.trainable_parameters()))
    _require_alike(path, "optimiser state", parts["optimizer"], optimizer.state)
    _require_finite(arrays, path)
    model.update(nested(parts["model"]))
    optimizer.state = parts["optimizer"]
    return progress


class Best:
    """The weights of the best evaluation so far, by the highest ``score``; those of before the decay are kept."""

    def __init__(self, folder: Path, score: str, decay_begins: int):
        self.path, self.score, self.decay_begins = folder / BEST, score, decay_begins
        before = read_results(self.path) if self.path.exists() else {}
        self.value: float | None = before.get(score)
        self.step: int = before.get("step", 0)

    def offer(self, step: int, model: nn.Module, results: dict[str, Any]) -> None:
        """Keep the weights if ``results`` have a score that beats the best so far."""
        value = results[self.score]
        if value is not None and (self.value is None or value > self.value):
            metadata = {"results": json.dumps({"step": step} | results)}
            if self.value is not None and self.step <= self.decay_begins < step:
                atomic_write(self.path.with_name(BEST_BEFORE_DECAY), lambda file: shutil.copyfile(self.path, file))
            write_arrays(self.path, flat(model.trainable_parameters()), metadata)
            self.value, self.step = value, step


def drop_best_after(folder: Path, step: int) -> None:
    """Go back to the best weights until ``step``: later ones are of steps that will be repeated differently."""
    best, kept = folder / BEST, folder / BEST_BEFORE_DECAY
    if best.exists() and read_results(best).get("step", 0) > step:
        if kept.exists() and read_results(kept).get("step", 0) <= step:
            kept.replace(best)
        else:
            best.unlink()


def read_weights(folder: Path, best: bool) -> dict[str, mx.array]:
    """The weights of a run's best or last checkpoint, by name. Raises :class:`CheckpointError` without one."""
    arrays = _read(folder / (BEST if best else STATE))[0]
    if best:
        return arrays
    return {name.removeprefix("model."): w for name, w in arrays.items() if name.startswith("model.")}


def read_results(path: Path) -> dict[str, Any]:
    """The evaluation results stored with a best checkpoint. Raises :class:`CheckpointError` without them."""
    try:
        results: dict[str, Any] = json.loads(_read(path)[1]["results"])
    except (KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} does not say what its evaluation found. Remove it; the next evaluation writes it again."
        ) from error
    return results


# --- the log ------------------------------------------------------------------------------------------------


def write_log(folder: Path, step: int, **values: Any) -> dict[str, Any]:
    """Append one line to ``log.jsonl``, its numbers rounded to five digits; returns the line."""
    rounded = {"step": step} | {name: _rounded(value) for name, value in values.items()}
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(rounded) + "\n")
    return rounded


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``log.jsonl``, without foreign ones (a user's notes, a line that a kill cut short)."""
    path = folder / LOG
    lines = path.read_bytes().splitlines() if path.exists() else []
    parsed = [_parsed(line) for line in lines]
    if None in parsed:
        logger.info("Left out %d line(s) of %s that no run wrote.", parsed.count(None), path)
    return [line for line in parsed if line is not None]


def truncate_log(folder: Path, step: int) -> None:
    """Drop the lines of ``log.jsonl`` for steps after ``step``, and a line that a kill cut short.

    Complete foreign lines stay where they are.
    """
    path = folder / LOG
    if not path.exists():
        return
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    kept = [line for line in lines if (parsed := _parsed(line)) is None or parsed["step"] <= step]
    atomic_write(path, lambda file: file.write_bytes(b"".join(kept)))


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line of the log, or ``None`` for a foreign one."""
    try:
        value = json.loads(line)
    except ValueError:  # no JSON, or no UTF-8
        return None
    return value if isinstance(value, dict) and isinstance(value.get("step"), int) else None


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# --- checks -------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing: the run has not written it yet, or {path.parent} holds no run.")
    try:
        return read_arrays(path)
    except RuntimeError as error:
        raise CheckpointError(f"{path} is damaged: {one_line(error)} {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    if path.name == STATE:
        return "Restore it from a copy, or remove it: the run then starts again from step 0."
    return "Remove it to continue without it."


def _progress(path: Path, metadata: dict[str, str]) -> Progress:
    try:
        losses = [float(loss) for loss in json.loads(metadata.get("losses", "[]"))]
        return Progress(int(metadata["step"]), int(metadata.get("steps", 0)), losses)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not say how many steps are done. {_remedy(path)}") from error


def _require_alike(path: Path, what: str, found: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    """Raise :class:`CheckpointError` unless the arrays have the names and shapes of the expected ones."""
    for name in [*expected, *found]:
        shapes = [list(arrays[name].shape) if name in arrays else None for arrays in (found, expected)]
        if shapes[0] != shapes[1]:
            has, needs = (f"shape {shape}" if shape is not None else "none" for shape in shapes)
            raise CheckpointError(f"{path}: of the {what} {name!r} it has {has}, this run {needs}. {_remedy(path)}")


def _require_finite(arrays: dict[str, mx.array], path: Path) -> None:
    finite = np.array(mx.stack([mx.isfinite(value).all() for value in arrays.values()]))
    for name, ok in zip(arrays, finite, strict=True):
        if not ok:
            raise CheckpointError(f"{path}: {name} holds values that are not finite.")
