"""Progress is told where nobody sees a bar, by the clock, and with the time that is left."""

import logging
import time
from collections.abc import Iterable, Iterator

import pytest

from dflash.core import progress as module
from dflash.core.progress import forecast, progress, progress_line


@pytest.fixture(autouse=True)
def _often(caplog, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_TO_FIRST_LINE", 0.005)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.005)
    caplog.set_level(logging.INFO, "dflash.core.progress")


def each_waiting_for_lines(items: Iterable[int], caplog) -> Iterator[int]:
    for item in items:
        told, begin = len(caplog.messages), time.monotonic()
        while len(caplog.messages) < told + 2 and time.monotonic() < begin + 10:  # the first may be of the item before
            time.sleep(0.001)
        yield item


def test_a_log_shows_that_work_goes_on_before_the_first_item_is_there_and_after(caplog):
    assert list(progress(each_waiting_for_lines(range(2), caplog), "bench", 2)) == [0, 1]
    assert caplog.messages[0] == "bench: 0 of 2, 0 s after the start"
    assert "bench: 1 of 2, about 0 s left" in caplog.messages


def test_no_line_comes_after_the_work_has_ended_or_failed(caplog):
    list(progress(range(3), "bench"))
    next(work := progress(range(3), "bench"))
    work.close()
    told = len(caplog.messages)
    time.sleep(0.05)
    assert len(caplog.messages) == told


def test_the_first_line_comes_long_before_the_second(caplog, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 60.0)
    list(progress((time.sleep(0.05) for _ in range(3)), "bench", 3))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("new", "done", "total", "seconds", "line"),
    [
        (2, 0, 6, 4.0, "bench: 2 of 6, about 8 s left"),
        (2, 4, 10, 4.0, "bench: 6 of 10, about 8 s left"),
        (1, 0, 101, 90.0, "bench: 1 of 101, about 2 h 30 min left"),
        (0, 4, 10, 61.0, "bench: 4 of 10, 61 s after the start"),
        (3, 0, None, 4.0, "bench: 3"),
    ],
)
def test_a_line_says_what_is_left_at_the_speed_of_this_run(new, done, total, seconds, line):
    assert progress_line("bench", new, done, total, seconds) == line


def test_a_forecast_is_told_before_the_work_begins(caplog):
    forecast("requests", 45.0)
    forecast("answers", 12_000.0, at_most=True)
    assert caplog.messages == ["requests: about 45 s", "answers: at most about 3 h 20 min"]


def test_nothing_is_told_where_it_is_not_wanted(caplog):
    assert list(progress((time.sleep(0.02) or i for i in range(2)), "bench", show=False)) == [0, 1]
    assert caplog.messages == []
