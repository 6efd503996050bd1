"""Data parallel training: which share of a step is this process's, and what the processes tell each other.

Knows ``mx.distributed`` (started by ``mlx.launch``). Must not know models or losses. One process alone is a
group of one, and nothing is sent.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Ranks:
    """The group of processes that train together."""

    def __init__(self, group: mx.distributed.Group | None = None):
        self.group = group
        self.rank, self.size = (group.rank(), group.size()) if group is not None else (0, 1)

    @property
    def writes(self) -> bool:
        """Whether this process writes files: rank 0 alone."""
        return self.rank == 0

    def share(self, numbers: Sequence[int]) -> Sequence[int]:
        """This rank's part of the batches of a step."""
        return numbers[self.rank :: self.size]

    def average(self, gradients: Any) -> Any:
        """The mean of all ranks' gradients."""
        return gradients if self.group is None else nn.average_gradients(gradients, self.group)

    def joined(self, values: Sequence[float]) -> list[float]:
        """All ranks' ``values``, as many from each, in the order of the numbers that :meth:`share` dealt out."""
        if self.group is None:
            return list(values)
        table = mx.zeros((len(values), self.size))
        table[:, self.rank] = mx.array(list(values))
        return mx.distributed.all_sum(table, group=self.group).reshape(-1).tolist()  # type: ignore[return-value]

    def any(self, value: bool) -> bool:
        """Whether ``value`` is true on some rank."""
        return any(self.joined([float(value)]))
