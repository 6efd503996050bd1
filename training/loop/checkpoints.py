"""What a run leaves behind: where to continue, its best weights, its metrics.

Knows file names and formats, each file whole or not there. Must not know how a step is made.

``state.safetensors`` is the last checkpoint: weights, optimiser state and, in its metadata, the steps done and
the recent losses. ``best.safetensors`` holds the weights of the best evaluation with its results.
``log.jsonl`` has a line for each report; lines after the checkpoint that a run continues from are dropped,
because those steps are made again.
"""

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash.errors import CheckpointError
from dflash.files import atomic_write, flat, nested, read_arrays, write_arrays

from .optimizer import Optimizer

logger = logging.getLogger(__name__)

STATE, BEST, LOG = "state.safetensors", "best.safetensors", "log.jsonl"


def save_checkpoint(path: Path, step: int, model: nn.Module, optimizer: Optimizer, losses: list[float]) -> None:
    """Write weights, optimiser state, the number of steps done and recent losses to one file."""
    arrays = {f"model.{k}": v for k, v in flat(model.trainable_parameters()).items()}
    arrays |= {f"optimizer.{k}": v for k, v in optimizer.state.items()}
    in_order = dict(sorted(arrays.items()))  # the file's layout follows it, and a restored optimiser has another
    write_arrays(path, in_order, {"step": str(step), "losses": json.dumps(losses)})


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> tuple[int, list[float]]:
    """Restore what :func:`save_checkpoint` wrote; returns steps done and recent losses, 0 and none without a file."""
    if not path.exists():
        return 0, []
    arrays, metadata = _read(path)
    parts: dict[str, dict[str, mx.array]] = {"model": {}, "optimizer": {}}
    for name, value in arrays.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = value
    model.update(nested(parts["model"]))
    optimizer.state = parts["optimizer"]
    return int(metadata["step"]), json.loads(metadata.get("losses", "[]"))


class Best:
    """The weights of the best evaluation so far, by the greatest ``score``."""

    def __init__(self, folder: Path, score: str):
        self.path, self.score = folder / BEST, score
        self.value: float | None = read_results(self.path)[score] if self.path.exists() else None

    def offer(self, step: int, model: nn.Module, results: dict[str, Any]) -> None:
        """Keep the weights if ``results`` have a score, and it beats the best before them."""
        value = results[self.score]
        if value is not None and (self.value is None or value > self.value):
            metadata = {"results": json.dumps({"step": step} | results)}
            write_arrays(self.path, flat(model.trainable_parameters()), metadata)
            self.value = value


def read_weights(folder: Path, best: bool) -> dict[str, mx.array]:
    """The weights of a run's best or last checkpoint, by name. Raises :class:`CheckpointError` without one."""
    arrays = _read(folder / (BEST if best else STATE))[0]
    if best:
        return arrays
    return {name.removeprefix("model."): w for name, w in arrays.items() if name.startswith("model.")}


def read_results(path: Path) -> dict[str, Any]:
    """What the evaluation found that made a best checkpoint."""
    results: dict[str, Any] = json.loads(_read(path)[1]["results"])
    return results


def write_log(folder: Path, step: int, **values: Any) -> None:
    """One line to the log and to ``log.jsonl``; numbers with five digits."""
    rounded = {"step": step} | {k: _rounded(v) for k, v in values.items()}
    logger.info("%s", " ".join(f"{k} {v}" for k, v in rounded.items()))
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(rounded) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``log.jsonl``; one that a kill cut short is left out."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    values = []
    for line in lines:
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError:
            logger.info("Left out a broken line of %s.", path)
    return values


def truncate_log(folder: Path, step: int) -> None:
    """Drop what ``log.jsonl`` says about steps after ``step``."""
    if (folder / LOG).exists():
        lines = [json.dumps(line) + "\n" for line in read_log(folder) if line["step"] <= step]
        atomic_write(folder / LOG, lambda file: file.write_text("".join(lines), encoding="utf-8"))


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing: this run has not come to it, or the folder is no run's.")
    try:
        return read_arrays(path)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} is damaged: {str(error).splitlines()[0]} Remove it to go on without it."
        ) from error


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
