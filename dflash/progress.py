"""Progress: a bar on a terminal and in notebooks, now and then a line in a log file.

Knows tqdm. Must not know what is counted.
"""

import logging
import sys
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
    """``items``, counted from ``done`` on: a bar named ``what`` where one can be drawn, else log lines.

    Lines come at level INFO, at most one every :data:`SECONDS_BETWEEN_LINES` seconds, with the expected time left.
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
    start = told = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - told >= SECONDS_BETWEEN_LINES:
            told = now
            left = (
                ""
                if total is None
                else f" of {total}, about {(now - start) / count * (total - done - count):.0f} s left"
            )
            logger.info("%s: %d%s", what, done + count, left)
