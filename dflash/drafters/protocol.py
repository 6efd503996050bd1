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
    """Drafted tokens ``[1, n]`` (integers) and, where the drafter has them, their logits ``[1, n, V]``."""

    tokens: mx.array
    logits: mx.array | None = None

    def first(self, count: int) -> "Proposal":
        """The first ``count`` drafts."""
        return Proposal(self.tokens[:, :count], None if self.logits is None else self.logits[:, :count])


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes tokens: a block-diffusion model, n-gram lookup, a scripted one in tests.

    ``block_size`` is at least 1 and counts the anchor, so at most ``block_size - 1`` tokens are asked for. A decoder
    uses the drafter's own block size unless it is told a smaller one. ``target_layer_ids`` may be empty; features
    then have a last axis of size 0. What :func:`~dflash.drafters.checks.check_drafter` says of an object without
    these parts is one line.
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
        """Draft up to ``length >= 1`` tokens to follow ``anchor [1, 1]``, the token at ``cache.offset``.

        Fewer are welcome, none too: ``Proposal(mx.zeros((1, 0), mx.int32))``. The target then verifies fewer
        positions, or writes one token plainly, as when an n-gram drafter finds no match. Ids are those of the
        target's vocabulary. The cache must hold afterwards what it held before.
        """
