"""Drafters that choose a block's tokens one after another, each token given the one before it.

Shapes: N drafts, V vocabulary, or the candidates of one position.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .protocol import Proposal

if TYPE_CHECKING:
    from ..decoding.sampling import DrawingSampler

Choose = Callable[[mx.array], tuple[mx.array, mx.array | None]]
"""From logits ``[1, V]``, a column ``[1]`` and, if it was sampled, the log-probabilities ``[1, V]`` of its choice."""


def best(logits_1V: mx.array) -> tuple[mx.array, None]:
    """The greedy choice."""
    return mx.argmax(logits_1V, axis=-1), None


def sampled(log_distribution: Callable[[mx.array], mx.array]) -> Choose:
    """A sample from ``log_distribution(logits)``."""

    def choose(logits_1V: mx.array) -> tuple[mx.array, mx.array]:
        log_q_1V = log_distribution(logits_1V)
        return mx.random.categorical(log_q_1V), log_q_1V

    return choose


class Walk:
    """The drafts of one block, as they are chosen from left to right."""

    def __init__(self, choose: Choose):
        self._choose = choose
        self.tokens: list[mx.array] = []
        self.logits: list[mx.array] = []
        self.log_q: list[mx.array] = []

    def step(self, logits_1V: mx.array, token_of: Callable[[mx.array], mx.array] = lambda column: column) -> mx.array:
        """Choose the next draft from its logits; returns its id ``[1]``, which ``token_of`` gives for a column."""
        column, log_q_1V = self._choose(logits_1V)
        self.tokens.append(token_of(column).astype(mx.int32))
        self.logits.append(logits_1V)
        if log_q_1V is not None:
            self.log_q.append(log_q_1V)
        return self.tokens[-1]

    def proposal(self, candidates: mx.array | None = None, confidence: mx.array | None = None) -> Proposal:
        """The drafts so far, with ``candidates [1, N, V]`` and ``confidence [1, N]``."""
        log_q_1NV = mx.stack(self.log_q, axis=1) if self.log_q else None
        return Proposal(mx.stack(self.tokens, axis=1), mx.stack(self.logits, axis=1), candidates, log_q_1NV, confidence)


class SequentialDrafter:
    """A base that makes a :class:`~dflash.drafters.protocol.DrawingDrafter` of a class with :meth:`walk`."""

    def walk(self, anchor: mx.array, length: int, cache: Any, choose: Choose) -> Proposal:
        """Draft up to ``length`` tokens after ``anchor [1, 1]``, each as ``choose`` says."""
        raise NotImplementedError

    def propose(self, anchor: mx.array, length: int, cache: Any) -> Proposal:
        """Draft up to ``length`` tokens after ``anchor [1, 1]``, each the best given the one before it."""
        return self.walk(anchor, length, cache, best)

    def draw(self, anchor: mx.array, length: int, cache: Any, sampler: "DrawingSampler") -> Proposal:
        """As :meth:`propose`, with each token sampled by ``sampler`` given those before it."""
        return self.walk(anchor, length, cache, sampled(sampler.log_distribution))
