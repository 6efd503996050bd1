"""Drafters that choose a block's tokens one after another, each token given the one before it.

Shapes: B blocks, N drafts of each, E hidden size, V vocabulary, or the candidates of one position.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx

from .context import ContextCache
from .dflash import DFlashDraftModel
from .protocol import Proposal

if TYPE_CHECKING:
    from ..decoding.sampling import DrawingSampler

Choose = Callable[[mx.array], tuple[mx.array, mx.array | None]]
"""From logits ``[B, V]``, columns ``[B]`` and, if they were sampled, the log-probabilities ``[B, V]`` of the choice."""


def best(logits_BV: mx.array) -> tuple[mx.array, None]:
    """The greedy choice."""
    return mx.argmax(logits_BV, axis=-1), None


def sampled(log_distribution: Callable[[mx.array], mx.array]) -> Choose:
    """A sample from ``log_distribution(logits)``."""

    def choose(logits_BV: mx.array) -> tuple[mx.array, mx.array]:
        log_q_BV = log_distribution(logits_BV)
        return mx.random.categorical(log_q_BV), log_q_BV

    return choose


class Walk:
    """The drafts of blocks, as they are chosen from left to right."""

    def __init__(self, choose: Choose):
        self._choose = choose
        self.tokens: list[mx.array] = []
        self.logits: list[mx.array] = []
        self.log_q: list[mx.array] = []

    def step(self, logits_BV: mx.array, tokens_of: Callable[[mx.array], mx.array] | None = None) -> mx.array:
        """Choose the next drafts from their logits; returns their ids ``[B]``, by ``tokens_of`` from columns."""
        columns_B, log_q_BV = self._choose(logits_BV)
        self.tokens.append((columns_B if tokens_of is None else tokens_of(columns_B)).astype(mx.int32))
        self.logits.append(logits_BV)
        if log_q_BV is not None:
            self.log_q.append(log_q_BV)
        return self.tokens[-1]

    def proposal(self, candidates: mx.array | None = None, confidence: mx.array | None = None) -> Proposal:
        """The drafts so far, with ``candidates [B, N, V]`` and ``confidence [B, N]``."""
        log_q_BNV = mx.stack(self.log_q, axis=1) if self.log_q else None
        return Proposal(mx.stack(self.tokens, axis=1), mx.stack(self.logits, axis=1), candidates, log_q_BNV, confidence)


class SequentialDraftModel(DFlashDraftModel):
    """A base of block drafters whose head walks over the hidden states.

    Follows :class:`~dflash.drafters.protocol.DrawingDrafter`.
    """

    def walk(self, anchors_B: mx.array, hidden_BNE: mx.array, choose: Choose) -> Proposal:
        """The drafts ``[B, N]`` after ``anchors_B``, each as ``choose`` says, from the states that predict them."""
        raise NotImplementedError

    def distribution(self, sampler: "DrawingSampler") -> Callable[[mx.array], mx.array]:
        """What tokens are sampled from: log-probabilities ``[B, V]`` of logits ``[B, V]``."""
        return sampler.log_distribution

    def proposal(self, anchors_B: mx.array, hidden_BNE: mx.array) -> Proposal:
        """As in DFlash, each token the best given the one before it."""
        return self.walk(anchors_B, hidden_BNE, best)

    def draw(self, anchor: mx.array, length: int, cache: ContextCache, sampler: "DrawingSampler") -> Proposal:
        """Draft ``length`` tokens after ``anchor [1, 1]``, each sampled by ``sampler`` given those before it."""
        hidden_1NE = self.draft_hidden(anchor, length, cache)
        return self.walk(anchor.reshape(1), hidden_1NE, sampled(self.distribution(sampler)))
