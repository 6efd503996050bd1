"""What the decode loop asks of a drafter, so that any drafter plugs into the same loop.

Knows shapes only. Must not know how drafts are made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import mlx.core as mx

from ..core.cpu_math import logsumexp
from ..core.trees import chain

if TYPE_CHECKING:
    from ..decoding.sampling import DrawingSampler
    from ..target import LoadedTargetModel


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes, greedily or drawn.

    Args:
        tokens: Drafts ``[1, n]``, integers.
        logits: Where the drafter has them: ``[1, n, V]``, or ``[1, n, K]`` of the ids in ``candidates``.
        candidates: ``[1, n, K]`` token ids that ``logits`` and ``log_q`` belong to; ``None``: all ``V`` in order.
        log_q: Log-probabilities, shaped like ``logits``, of the distribution that each token was drawn from, given
            the drafts before it; ``None`` where the tokens are the drafter's best.
        confidence: ``[1, n]`` chance that each draft is accepted if all before it are, from a head of its own;
            ``None``: the softmax of ``logits`` at the token. Where drafts were drawn, it must not depend on what was
            drawn, and ``None`` is no confidence: a policy that prefers some draws changes what the text is drawn from.
        source: Which of several drafters made it, where one drafter is made of several.
        parents: Where the drafts are a tree, the draft that each follows, which stands before it, or -1 for the
            anchor; ``None``: each follows the one before it.
    """

    tokens: mx.array
    logits: mx.array | None = None
    candidates: mx.array | None = None
    log_q: mx.array | None = None
    confidence: mx.array | None = None
    source: str = ""
    parents: list[int] | None = None

    @property
    def lineage(self) -> list[int]:
        """The draft that each follows, -1 for the anchor, of a chain too."""
        return chain(self.tokens.shape[1]) if self.parents is None else self.parents

    def first(self, count: int) -> "Proposal":
        """The first ``count`` drafts."""
        arrays = ("tokens", "logits", "candidates", "log_q", "confidence")
        held = {name: array for name in arrays if (array := getattr(self, name)) is not None}
        parents = None if self.parents is None else self.parents[:count]
        return replace(self, parents=parents, **{name: array[:, :count] for name, array in held.items()})

    def acceptance_chances(self) -> mx.array | None:
        """What the drafter thinks of each draft ``[n]``, in float32; ``None`` where it does not say, or may not."""
        if self.confidence is not None:
            return self.confidence[0].astype(mx.float32)
        if self.logits is None or self.log_q is not None:
            return None
        logits_NV, tokens_N1 = self.logits[0].astype(mx.float32), self.tokens[0, :, None]
        if self.candidates is None:
            known_N1 = mx.clip(tokens_N1, 0, logits_NV.shape[-1] - 1)  # ids are checked by the decode loop
            own_N1 = mx.take_along_axis(logits_NV, known_N1, axis=-1)
        else:
            own_N1 = mx.max(mx.where(self.candidates[0] == tokens_N1, logits_NV, -mx.inf), axis=-1, keepdims=True)
        return mx.exp(own_N1[:, 0] - logsumexp(logits_NV))


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


@runtime_checkable
class WakingDrafter(Drafter, Protocol):
    """A drafter that sees cheaply, without features, where drafting pays: asked while a policy lets it sleep."""

    def wakes(self, text: Sequence[int], cache: Any) -> bool:
        """Whether to end the sleep, after the committed ``text``; ``cache`` lags behind, and its context stays."""


@runtime_checkable
class DrawingDrafter(Drafter, Protocol):
    """A drafter whose drafts depend on the drafts before them, so that only it can draw them.

    Any other drafter's positions are independent given the block; whoever wants draws takes them from its logits.
    """

    def draw(self, anchor: mx.array, length: int, cache: Any, sampler: "DrawingSampler") -> Proposal:
        """As :meth:`Drafter.propose`, each token drawn as ``sampler`` says; :attr:`Proposal.log_q` tells from what."""
