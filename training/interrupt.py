"""Ctrl-C at a moment of the program's own choosing.

Knows signals. Must not know what is interrupted.
"""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class Interrupt:
    """While entered, the first Ctrl-C only sets ``asked``; a second one is a ``KeyboardInterrupt`` at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None
        self._active = threading.current_thread() is threading.main_thread()  # only there can signals be handled

    def __enter__(self) -> "Interrupt":
        if self._active:
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        logger.warning("Finishing this step and saving; Ctrl-C again stops at once.")
