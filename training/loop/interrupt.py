"""Ctrl-C, SIGTERM and a callback's wish to stop, deferred to a moment that suits the program."""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from dflash.core.errors import StopTraining

logger = logging.getLogger(__name__)


class AtOnce(KeyboardInterrupt):
    """The second Ctrl-C."""


class Interrupt:
    """While entered, SIGTERM and the first Ctrl-C only set ``asked``; a second Ctrl-C interrupts at once.

    SIGTERM, however often, waits for the step: ``mlx.launch`` and schedulers end their processes with it. ``asked`` is
    what ends the run after the step, if anything; a callback sets it too.
    """

    def __init__(self) -> None:
        self.asked: KeyboardInterrupt | StopTraining | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._active = threading.current_thread() is threading.main_thread()  # only there can signals be handled

    def __enter__(self) -> "Interrupt":
        if self._active:
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if isinstance(self.asked, KeyboardInterrupt) and number == signal.SIGINT:
            raise AtOnce
        self.asked = KeyboardInterrupt()
        logger.warning("Finishing this step and saving; Ctrl-C again stops at once.")
