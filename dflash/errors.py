"""The public name of :mod:`dflash.core.errors`: ``from dflash.errors import DFlashError``."""

from .core.errors import *  # noqa: F403
