"""Callbacks that receive every line of a run's log as it is written."""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.core.registry import Registry

from .loop.run import OnLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInfo:
    """The run that a callback listens to: its folder, and its recipe as plain data."""

    folder: Path
    recipe: dict[str, Any]


Callback = Callable[[RunInfo], OnLog]
"""Called once when a run starts or continues; returns a function that gets every line of the log."""

CALLBACKS: Registry[Callback] = Registry("callback", "dflash.callbacks", ours=["dflash.training.reporting"])


def register_callback(name: str) -> Callable[[Callback], Callback]:
    """Decorator: recipes name the decorated function in ``run.callbacks``.

    The function takes a :class:`RunInfo` and returns a function of one log line: a dict with ``step``, ``time``,
    ``seconds``, ``peak_memory_gb`` and, for a report, ``loss``, ``grad_norm``, ``learning_rate`` and
    ``tokens_per_s``; for an evaluation, its results. If it raises, the run continues without it. Only rank 0 calls it.
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
