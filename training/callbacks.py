"""Callbacks that receive every line of a run's log as it is written."""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from dflash.core.errors import StopTraining as StopTraining
from dflash.core.registry import Registry

from .loop.run import OnLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInfo:
    """The run that a callback listens to: its folder, its recipe as plain data, and what it trains.

    ``model`` is the drafter and ``optimizer`` the one of ``mlx.optimizers``, both as they are when a line comes. They
    are to be read: what a callback changes in them, a run that continues does not change again.
    """

    folder: Path
    recipe: dict[str, Any]
    model: nn.Module
    optimizer: Any


Callback = Callable[[RunInfo], OnLog]
"""Called once when a run starts or continues; returns a function that gets every line of the log."""

CALLBACKS: Registry[Callback] = Registry("callback", "dflash.callbacks", ours=["dflash.training.reporting"])


def register_callback(name: str) -> Callable[[Callback], Callback]:
    """Decorator: recipes name the decorated function in ``run.callbacks``.

    The function takes a :class:`RunInfo` and returns a function of one log line: a dict with ``step``, ``time``,
    ``seconds``, ``peak_memory_gb`` and, for a report, ``loss``, ``grad_norm``, ``learning_rate`` and
    ``tokens_per_s``; for an evaluation, its results. If it raises :class:`StopTraining`, the run makes one more step,
    saves and ends as after Ctrl-C, with exit code 0; the same command continues. If it raises anything else, the run
    continues without it. Only rank 0 calls it.
    Other packages announce theirs under the entry-point group ``dflash.callbacks``.
    """
    return CALLBACKS.register(name)


def listeners(names: Sequence[str], run: RunInfo, on_log: OnLog | None) -> list[OnLog]:
    """The callbacks of a recipe for this run, and ``on_log``.

    Without ``on_log`` lines are printed, unless logging shows them. Raises ``DFlashError`` for an unknown name.
    """
    made = [CALLBACKS.get(name)(run) for name in names]
    if on_log is not None:
        made.append(on_log)
    elif not logging.getLogger("dflash").isEnabledFor(logging.INFO):
        made.append(print_line)
    return made


def print_line(line: dict[str, Any]) -> None:
    """Print a log line to standard error, without its time."""
    print(" ".join(f"{name} {value}" for name, value in line.items() if name != "time"), file=sys.stderr, flush=True)
