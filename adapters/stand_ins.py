"""For one call, something else stands in the place of a module; the model is the same before and after."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn


class StandIn:
    """Has the attributes of the module in whose place it stands; a subclass says what a call does."""

    def __init__(self, module: nn.Module):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def standing_in(places: Sequence[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Put something in each place, a module and the name of one of its parts; undone whatever happens."""
    originals = [owner[name] for owner, name, _ in places]
    for owner, name, stand_in in places:
        owner[name] = stand_in
    try:
        yield
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            owner[name] = original
