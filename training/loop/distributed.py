"""Data-parallel training: the batches of each process, and what the processes exchange through ``mx.distributed``.

A single process is a group of one and sends nothing.

When a process dies, the others end too. The ring backend raises an error when a connection closes; other backends, and
the ring if a machine falls silent, wait forever. So every exchange has a time limit. Since all processes do equal work,
it is ``timeout`` seconds, plus twice this process's own time since the previous exchange, plus the time that a slow
disk or link needs for rank 0's files and the data sent. After that the process ends itself, because nothing can wake a
thread that waits in MLX; the run continues from its last regular checkpoint.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash.core.errors import TrainingError, one_line
from dflash.core.files import flat

T = TypeVar("T")

_SLOW = 50e6
"""Bytes a second that a disk, or a link between machines, is expected to move at least."""

LOST = (
    "Another process of this run has died or cannot be reached. "
    "Give the same command again to continue from the last checkpoint."
)


class PeerLostError(TrainingError):
    """Another process of the run no longer answers."""


class Ranks:
    """The group of processes that train together; ``timeout`` is in seconds."""

    def __init__(self, group: mx.distributed.Group | None = None, timeout: float = 30.0):
        self.group = group
        self.rank, self.size = (group.rank(), group.size()) if group is not None else (0, 1)
        self.timeout = timeout
        self._last, self._allowed = time.monotonic(), 0.0

    @classmethod
    def of_this_run(cls, timeout: float) -> "Ranks":
        """The group that ``mlx.launch`` started this process in; a group of one without it."""
        group = mx.distributed.init()
        return cls(group if group.size() > 1 else None, timeout)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files: rank 0 alone."""
        return self.rank == 0

    def shard(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's items: of the batches of a step, or of the prompts of an evaluation."""
        return items[self.rank :: self.size]

    def allow(self, nbytes: int) -> None:
        """Wait longer in the next exchange: for ``nbytes`` that rank 0 reads or writes, or that are sent."""
        self._allowed += nbytes / _SLOW

    def all_reduce_mean(self, gradients: Any) -> Any:
        """The mean of all ranks' gradients. Raises :class:`PeerLostError`, as all exchanges do."""
        if self.group is None:
            return gradients
        self.allow(sum(a.nbytes for a in flat(gradients).values()))
        with self._exchange():
            averaged = nn.average_gradients(gradients, self.group)
            mx.eval(averaged)
            return averaged

    def all_gather(self, values: Sequence[float]) -> list[float]:
        """All ranks' ``values`` (to float32), as many from each, in the order of what :meth:`shard` dealt out."""
        if self.group is None:
            return list(values)
        table = np.zeros((len(values), self.size), dtype=np.float32)
        table[:, self.rank] = values
        return self._sum(table).reshape(-1).tolist()

    def require_same(self, number: int, message: str) -> None:
        """Raise :class:`TrainingError` on all ranks unless all give the same ``number`` (of 32 bits)."""
        halves = np.reshape(self.all_gather([number >> 16, number & 0xFFFF]), (2, self.size))
        if (halves != halves[:, :1]).any():
            raise TrainingError(message)

    def broadcast(self, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        """Rank 0's arrays, on every rank; all must have the same names, shapes and types."""
        if self.group is None:
            return arrays
        self.allow(sum(a.nbytes for a in arrays.values()))
        with self._exchange():
            sent = {}
            for name in sorted(arrays):  # in the same order everywhere; a file's is not a new optimiser's
                own = arrays[name] if self.rank == 0 else mx.zeros_like(arrays[name])
                sent[name] = mx.distributed.all_sum(own, group=self.group)
                mx.eval(sent[name])
            return sent

    def broadcast_flag(self, flag: bool) -> bool:
        """Rank 0's ``flag``, on every rank."""
        return bool(self.all_gather([float(flag)])[0])

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        """The sum of all ranks' ``values``, of which each gives as many; exact to 32 bits."""
        if self.group is None:
            return values
        return self._sum(values.astype(np.int32 if np.issubdtype(values.dtype, np.integer) else np.float32))

    def _sum(self, values: np.ndarray) -> np.ndarray:
        with self._exchange():
            return np.array(mx.distributed.all_sum(mx.array(values), group=self.group))

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Bound the time of what happens inside, and turn the backend's error into a :class:`PeerLostError`."""
        limit = self.timeout + 2 * (time.monotonic() - self._last) + self._allowed
        try:
            with time_limit(limit, lambda: _leave(limit)):
                yield
        except RuntimeError as error:
            raise PeerLostError(f"{LOST} ({one_line(error)})") from error
        finally:
            self._last, self._allowed = time.monotonic(), 0.0


@contextmanager
def time_limit(seconds: float, late: Callable[[], object]) -> Iterator[None]:
    """Call ``late`` from another thread if the block inside takes more than ``seconds``."""
    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave(waited: float) -> None:
    reason = f"There was no answer for {waited:.0f} seconds; run.peer_timeout allows more."
    print(f"error: {LOST} {reason}", file=sys.stderr, flush=True)
    os._exit(1)
