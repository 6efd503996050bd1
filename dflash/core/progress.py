"""Progress: a bar on a terminal and in notebooks, a line now and then in a log file."""

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0


def progress(
    items: Iterable[T], what: str, total: int | None = None, *, show: bool = True, done: int = 0
) -> Iterator[T]:
    """Yield ``items``, counting from ``done``: with a bar named ``what`` where one can be drawn, else with log lines.

    There is a line of level INFO every :data:`SECONDS_BETWEEN_LINES` seconds, whether an item is ready or not, with
    the expected time left.
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
    """Whether standard error is a terminal, or this is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return sys.stderr.isatty() or hasattr(shell, "kernel")


def _with_lines(items: Iterable[T], what: str, total: int | None, done: int) -> Iterator[T]:
    """A thread logs the count by the clock: where items take minutes, the log shows that the work continues."""
    begin, new, over = time.monotonic(), 0, threading.Event()

    def tell() -> None:
        while not over.wait(SECONDS_BETWEEN_LINES):
            logger.info(progress_line(what, new, done, total, time.monotonic() - begin))

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
        return f"{count}, {seconds:.0f} s after the start"
    return count if total is None else f"{count}, about {seconds / new * (total - done - new):.0f} s left"
