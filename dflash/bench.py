"""The public name of :mod:`dflash.evaluation`'s benchmarks: ``from dflash.bench import compare``."""

from .evaluation import *  # noqa: F403
