"""A run's speed and remaining time, and its progress bar."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from dflash.core.progress import draws_bars, duration

from .gradients import Batch


class Clock:
    """Speed between reports and time left; ``seconds_before`` were spent by earlier processes."""

    def __init__(self, seconds_before: float, steps_left: int, evaluations_left: int):
        self.begun = time.perf_counter() - seconds_before
        self.steps_left, self.evaluations_left = steps_left, evaluations_left
        self._step_seconds: float | None = None
        self._evaluation_seconds: float | None = None
        self._last_report = self._last_step = time.perf_counter()
        self._tokens = 0
        mx.reset_peak_memory()

    def counted(self, arrays: Batch) -> Batch:
        """Count the tokens of ``arrays``, which are in the first one; returns ``arrays``."""
        self._tokens += arrays[0].size
        return arrays

    def tokens_per_second(self) -> float:
        """Speed since the last call, without evaluations."""
        now = time.perf_counter()
        speed = self._tokens / (now - self._last_report)
        self._last_report, self._tokens = now, 0
        return speed

    def measure(self, try_out: Callable[[], float]) -> tuple[float, float]:
        """Seconds of a step and its peak memory in GB; ``try_out`` returns the fraction of a step that it did."""
        begin = time.perf_counter()
        part = try_out()
        self._step_seconds = (time.perf_counter() - begin) / part
        self._last_report = self._last_step = time.perf_counter()
        return self._step_seconds, mx.get_peak_memory() / 1e9

    def step_done(self) -> None:
        """Count one step; its time enters a decayed mean."""
        now = time.perf_counter()
        seconds, self._last_step = now - self._last_step, now
        known = self._step_seconds
        self._step_seconds = seconds if known is None else 0.9 * known + 0.1 * seconds
        self.steps_left -= 1

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Time an evaluation separately from the steps."""
        begin = time.perf_counter()
        yield
        self._evaluation_seconds = time.perf_counter() - begin
        self._last_report += self._evaluation_seconds
        self._last_step += self._evaluation_seconds
        self.evaluations_left -= 1

    def left(self) -> str:
        """The expected time of the remaining steps and evaluations."""
        if self._step_seconds is None:
            return "an unknown time"
        evaluations = max(0, self.evaluations_left) * (self._evaluation_seconds or 0.0)
        return duration(self.steps_left * self._step_seconds + evaluations)

    def stamps(self) -> dict[str, Any]:
        """Time and memory, for every line of the log."""
        return {
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "seconds": time.perf_counter() - self.begun,
            "peak_memory_gb": mx.get_peak_memory() / 1e9,
        }


def step_bar(begun: int, steps: int, name: str, *, show: bool, note: Callable[[], str]) -> Iterator[int]:
    """The step numbers, with a progress bar on a terminal."""
    if not show or not draws_bars():
        yield from range(begun, steps)
        return
    layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
    with tqdm(total=steps, initial=begun, desc=name, bar_format=layout) as bar:
        for step in range(begun, steps):
            yield step
            bar.set_postfix_str(note(), refresh=False)
            bar.update()
