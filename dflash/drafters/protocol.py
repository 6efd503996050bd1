"""The drafter protocol: what the decode loop asks of a drafter, and what a drafter returns.

Shapes: n drafts, V vocabulary, K candidates, S committed tokens, F feature size.
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

_CERTAIN = 1e30  # stands for a logit of +inf, with which probabilities would not be numbers


@dataclass(frozen=True)
class Proposal:
    """The drafts of one block, greedy or sampled.

    Args:
        tokens: Drafts ``[1, n]``, integers.
        logits: ``[1, n, V]``, or ``[1, n, K]`` for the ids in ``candidates``; ``None`` if the drafter has none.
        candidates: ``[1, n, K]`` token ids that ``logits`` and ``log_q`` belong to; ``None``: all ``V`` in order.
        log_q: Log-probabilities, shaped like ``logits``, of the distribution that each token was sampled from, given
            the drafts before it; ``None`` for greedy drafts.
        confidence: ``[1, n]`` probability that each draft is accepted if all before it are, from a head of its own;
            ``None``: the softmax of ``logits`` at the token. For sampled drafts it must not depend on the samples, and
            ``None`` means no confidence: a policy that preferred some samples would change the output distribution.
        source: Name of the drafter that made the block, if several are combined.
        parents: For a tree, the index of the draft that each draft follows, always a smaller one, or -1 for the
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
        """The parent of each draft, -1 for the anchor; a chain's are filled in."""
        return chain(self.tokens.shape[1]) if self.parents is None else self.parents

    def first(self, count: int) -> "Proposal":
        """The first ``count`` drafts."""
        parents = None if self.parents is None else self.parents[:count]
        return replace(self, parents=parents, **{name: array[:, :count] for name, array in self._arrays().items()})

    def row(self, number: int) -> "Proposal":
        """One block of several."""
        return replace(self, **{name: array[number : number + 1] for name, array in self._arrays().items()})

    def _arrays(self) -> dict[str, Any]:
        arrays = ("tokens", "logits", "candidates", "log_q", "confidence")
        return {name: array for name in arrays if (array := getattr(self, name)) is not None}

    def acceptance_chances(self) -> mx.array | None:
        """The drafter's acceptance probability of each draft ``[n]`` in float32; ``None`` if there is none to use."""
        if self.confidence is not None:
            return self.confidence[0].astype(mx.float32)
        if self.logits is None or self.log_q is not None:
            return None
        logits_NV = mx.minimum(self.logits[0].astype(mx.float32), _CERTAIN)
        tokens_N1 = self.tokens[0, :, None]
        if self.candidates is None:
            known_N1 = mx.clip(tokens_N1, 0, logits_NV.shape[-1] - 1)  # ids are checked by the decode loop
            own_N1 = mx.take_along_axis(logits_NV, known_N1, axis=-1)
        else:
            own_N1 = mx.max(mx.where(self.candidates[0] == tokens_N1, logits_NV, -mx.inf), axis=-1, keepdims=True)
        return mx.exp(own_N1[:, 0] - logsumexp(logits_NV))


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes tokens: a block-diffusion model, n-gram lookup, a script in a test.

    ``block_size`` is at least 1 and counts the anchor, so at most ``block_size - 1`` drafts are requested. A decoder
    uses the drafter's own block size unless a smaller one is set. If ``target_layer_ids`` is empty, features have a
    last axis of size 0. :func:`~dflash.drafters.checks.check_drafter` reports the parts that an object lacks.
    """

    @property
    def block_size(self) -> int:
        """Most positions per block, the anchor included."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs are the features, 0-based."""

    def bind(self, target: "LoadedTargetModel") -> None:
        """Check that the target fits, and keep what the drafter shares with it (embedding, head).

        Raises ``IncompatibleModelsError`` if it does not fit.
        """

    def make_cache(self) -> Any:
        """A new, empty context cache; its ``offset`` counts the context tokens in it.

        If it has a ``state`` (arrays), prefill evaluates it after each chunk, so that features can be freed.
        """

    def extend_context(self, features: mx.array, cache: Any, tokens: mx.array) -> None:
        """Append newly committed ``tokens [1, S]`` with their ``features [1, S, F]``, in order."""

    def propose(self, anchor: mx.array, length: int, cache: Any) -> Proposal:
        """Draft up to ``length >= 1`` tokens after ``anchor [1, 1]``, the token at position ``cache.offset``.

        Fewer are allowed, also none: ``Proposal(mx.zeros((1, 0), mx.int32))``, as when an n-gram drafter finds no
        match; the target then verifies fewer positions, or decodes one token plainly. Ids are the target's. The
        committed context in the cache must stay the same.
        """


@runtime_checkable
class WakingDrafter(Drafter, Protocol):
    """A drafter with the optional method ``wakes``: it can end a fallback to plain decoding early.

    While a policy decodes plainly, the loop calls ``wakes`` before each step. It must be cheap: it gets token ids, no
    features.
    """

    def wakes(self, text: Sequence[int], cache: Any) -> bool:
        """Whether to resume drafting after the committed tokens ``text``.

        The newest tokens of ``text`` are not in ``cache`` yet; its context must stay the same.
        """


@runtime_checkable
class DrawingDrafter(Drafter, Protocol):
    """A drafter whose drafts depend on the drafts before them, so that only the drafter itself can sample them.

    Any other drafter's positions are independent given the block, and can be sampled from its logits.
    """

    def draw(self, anchor: mx.array, length: int, cache: Any, sampler: "DrawingSampler") -> Proposal:
        """As :meth:`Drafter.propose`, with tokens sampled by ``sampler`` and their distributions in ``log_q``."""


@runtime_checkable
class BatchDrafter(Protocol):
    """What a :class:`Drafter` has in addition if it drafts for several texts in one pass.

    Its context is further layers of mlx-lm's list of caches, which mlx-lm's batches merge, filter and extend with the
    target's. Any other drafter drafts for one text after another.
    """

    @property
    def block_size(self) -> int:
        """As in :class:`Drafter`."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """As in :class:`Drafter`."""

    def make_layers(self) -> list[Any]:
        """A new, empty context of one text: caches with a static ``merge``.

        What that returns for several texts has the methods of mlx-lm's batch caches ``prepare``, ``finalize``,
        ``filter``, ``extend`` and ``extract``, and ``state`` and ``nbytes``.
        """

    def extend_rows(
        self, features_BSF: mx.array, layers: list[Any], tokens_BS: mx.array, counts: Sequence[int] | None = None
    ) -> None:
        """Append ``counts[i]`` committed tokens to the context of each text ``i``, the first ones of its row.

        ``None``: all of them, but for the padding that ``prepare`` announced.
        """

    def propose_rows(self, anchors_B: mx.array, length: int, layers: list[Any]) -> Proposal:
        """Drafts ``[B, n]``, up to ``length`` a text, after ``anchors_B``; -1 where a text has fewer than others."""
