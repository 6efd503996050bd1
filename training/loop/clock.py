"""A run's speed, time and memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import mlx.core as mx

from .gradients import Batch


class Clock:
    """Speed between reports, without evaluations; ``seconds_before`` were spent by earlier processes."""

    def __init__(self, seconds_before: float):
        self.begun = time.perf_counter() - seconds_before
        self._last_report = time.perf_counter()
        self._tokens = 0
        mx.reset_peak_memory()

    def counted(self, arrays: Batch) -> Batch:
        """Count the tokens of ``arrays``, which are in the first one; returns ``arrays``."""
        self._tokens += arrays[0].size
        return arrays

    def tokens_per_second(self) -> float:
        """Speed since the last call."""
        now = time.perf_counter()
        speed = self._tokens / (now - self._last_report)
        self._last_report, self._tokens = now, 0
        return speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that is spent inside."""
        begin = time.perf_counter()
        yield
        self._last_report += time.perf_counter() - begin

    def stamps(self) -> dict[str, Any]:
        """Time and memory, for every line of the log."""
        return {
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "seconds": time.perf_counter() - self.begun,
            "peak_memory_gb": mx.get_peak_memory() / 1e9,
        }
