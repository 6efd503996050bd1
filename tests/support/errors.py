"""Errors as users should see them."""

import pytest

from dflash import DFlashError


def refused(error: pytest.ExceptionInfo, *words: str) -> None:
    """It is ours, one line, and has all of ``words``."""
    message = str(error.value)
    assert isinstance(error.value, DFlashError)
    assert "\n" not in message
    for word in words:
        assert word in message, message
