"""Progress is told where nobody sees a bar, seldom, and with the time that is left."""

import logging

from dflash import progress as module
from dflash.progress import progress


def told(caplog, monkeypatch, **options) -> list[str]:
    """Log lines of 6 items of a second each, with a line at most every two seconds."""
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 2.0)
    with caplog.at_level(logging.INFO, "dflash.progress"):
        assert list(progress(range(6), "bench", **options)) == [0, 1, 2, 3, 4, 5]
    return caplog.messages


def test_lines_come_seldom_and_say_what_is_left(caplog, monkeypatch):
    assert told(caplog, monkeypatch) == [
        "bench: 2 of 6, about 4 s left",
        "bench: 4 of 6, about 2 s left",
        "bench: 6 of 6, about 0 s left",
    ]


def test_what_was_done_before_counts_in_the_total_and_not_in_the_speed(caplog, monkeypatch):
    assert told(caplog, monkeypatch, done=4)[0] == "bench: 6 of 10, about 4 s left"


def test_an_unknown_total_is_not_made_up(caplog, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 2.0)
    with caplog.at_level(logging.INFO, "dflash.progress"):
        assert list(progress(iter("abc"), "prepare")) == ["a", "b", "c"]
    assert caplog.messages == ["prepare: 2"]


def test_nothing_is_told_where_it_is_not_wanted(caplog, monkeypatch):
    assert told(caplog, monkeypatch, show=False) == []
