"""What the decode loop asks of a drafter, so that any drafter plugs into the same loop.

Knows shapes only. Must not know how drafts are made.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import mlx.core as mx

if TYPE_CHECKING:
    from ..target import LoadedTargetModel


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens ``[1, length]`` and, where the drafter has them, their logits ``[1, length, V]``."""

    tokens: mx.array
    logits: mx.array | None = None


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes tokens: a block-diffusion model, n-gram lookup, a scripted one in tests.

    ``block_size`` counts the anchor, so at most ``block_size - 1`` tokens are asked for.
    ``target_layer_ids`` may be empty; features then have a last axis of size 0.
    """

    @property
    def block_size(self) -> int:
        """Most positions per block, the anchor included."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs are the features, 0-based."""

    def bind(self, target: "LoadedTargetModel") -> None:
        """Check that the target fits and take what is shared with it (embedding, head)."""

    def make_cache(self) -> Any:
        """A new, empty context cache; its ``offset`` counts the context tokens that it holds.

        If it has a ``state`` (arrays), prefill evaluates it chunk by chunk, so that features can be dropped.
        """

    def extend_context(self, features: mx.array, cache: Any, tokens: mx.array) -> None:
        """Append newly committed ``tokens [1, S]`` with their ``features [1, S, F]``, in order."""

    def propose(self, anchor: mx.array, length: int, cache: Any) -> Proposal:
        """Draft ``length >= 1`` tokens to follow ``anchor [1, 1]``, the token at ``cache.offset``."""
