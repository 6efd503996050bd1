"""Progress: a bar on a terminal, elsewhere a line now and then in the log; and how long something will take."""

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

logger = logging.getLogger(__name__)

SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES = 5.0, 30.0


def progress(
    items: Iterable[T], what: str, total: int | None = None, *, show: bool = True, done: int = 0
) -> Iterator[T]:
    """Yield ``items``, counting from ``done``: with a bar named ``what`` on a terminal, else with log lines.

    There is a line of level INFO after :data:`SECONDS_TO_FIRST_LINE` and then every :data:`SECONDS_BETWEEN_LINES`
    seconds, whether an item is ready or not, with the expected time left.
    """
    if total is None and hasattr(items, "__len__"):
        total = done + len(items)  # type: ignore[arg-type]
    if not show:
        yield from items
    elif draws_bars():
        yield from tqdm(items, what, total=total, initial=done, leave=False)
    else:
        yield from _with_lines(items, what, total, done)


def draws_bars() -> bool:
    """Whether standard error is a terminal. A notebook is none: it would keep every state of the bar."""
    return sys.stderr.isatty()


def _with_lines(items: Iterable[T], what: str, total: int | None, done: int) -> Iterator[T]:
    """A thread logs the count by the clock: where items take minutes, the log shows that the work continues."""
    begin, new, over = time.monotonic(), 0, threading.Event()

    def tell() -> None:
        wait = SECONDS_TO_FIRST_LINE
        while not over.wait(wait):
            logger.info(progress_line(what, new, done, total, time.monotonic() - begin))
            wait = SECONDS_BETWEEN_LINES

    threading.Thread(target=tell, daemon=True).start()
    try:
        for item in items:
            yield item
            new += 1
    finally:
        over.set()


def progress_line(what: str, new: int, done: int, total: int | None, seconds: float) -> str:
    """Progress after ``new`` items in ``seconds``, and the time left where it can be estimated."""
    count = f"{what}: {done + new}" + ("" if total is None else f" of {total}")
    if not new:
        return f"{count}, {duration(seconds)} after the start"
    return count if total is None else f"{count}, about {duration(seconds / new * (total - done - new))} left"


def forecast(what: str, seconds: float, at_most: bool = False) -> None:
    """Log how many ``seconds`` the work called ``what`` will take, before it begins."""
    logger.info("%s: %sabout %s", what, "at most " if at_most else "", duration(seconds))


def duration(seconds: float) -> str:
    """``seconds`` in readable units: ``45 s``, ``12 min``, ``3 h 20 min``."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
