"""Data parallel training: which share of a step is this process's, and what the processes tell each other.

Knows ``mx.distributed`` (started by ``mlx.launch``). Must not know models or losses. One process alone is a
group of one, and nothing is sent.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .evaluate import Acceptance

T = TypeVar("T")


class Ranks:
    """The group of processes that train together."""

    def __init__(self, group: mx.distributed.Group | None = None):
        self.group = group
        self.rank, self.size = (group.rank(), group.size()) if group is not None else (0, 1)

    @classmethod
    def joined_run(cls) -> "Ranks":
        """The group that ``mlx.launch`` started this process in; a group of one without it."""
        group = mx.distributed.init()
        return cls(group if group.size() > 1 else None)

    @property
    def writes(self) -> bool:
        """Whether this process writes files: rank 0 alone."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of the batches of a step, or of the prompts of an evaluation."""
        return items[self.rank :: self.size]

    def average(self, gradients: Any) -> Any:
        """The mean of all ranks' gradients."""
        return gradients if self.group is None else nn.average_gradients(gradients, self.group)

    def joined(self, values: Sequence[float]) -> list[float]:
        """All ranks' ``values``, as many from each, in the order of what :meth:`share` dealt out."""
        if self.group is None:
            return list(values)
        table = np.zeros((len(values), self.size), dtype=np.float32)
        table[:, self.rank] = values
        return self._sum(table).reshape(-1).tolist()

    def any(self, value: bool) -> bool:
        """Whether ``value`` is true on some rank."""
        return any(self.joined([float(value)]))

    def added(self, part: Acceptance) -> Acceptance:
        """The acceptance over all ranks' prompts."""
        if self.group is None:
            return part
        counts = self._sum(np.array([part.blocks, part.committed, *part.verified, *part.accepted], dtype=np.int32))
        verified, accepted = np.split(counts[2:], 2)
        return Acceptance(int(counts[0]), int(counts[1]), verified, accepted)

    def wait(self) -> None:
        """Until all ranks are here."""
        self.any(False)

    def _sum(self, values: np.ndarray) -> np.ndarray:
        return np.array(mx.distributed.all_sum(mx.array(values), group=self.group))
