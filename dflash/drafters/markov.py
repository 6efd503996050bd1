"""DSpark's two heads: a bias on the logits from the token before, and the acceptance probability of a draft.

Weight names and formulas are published (DSpark, arXiv:2607.05147; the reference is DeepSpec).

Shapes: N rows (one block's, or predictions of many), E hidden size, R rank, D drafted vocabulary.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..core.errors import CheckpointError, did_you_mean
from .trainable import states_of_blocks


class MarkovHead(nn.Module):
    """``vanilla``: the bias depends only on the token before, by two tables of low rank; 0 in a new head."""

    def __init__(self, vocab_size: int, drafted: int, rank: int, hidden_size: int):
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        self.markov_w2.weight = mx.zeros((drafted, rank))

    def step(self, before_NR: mx.array, hidden_NE: mx.array, state_NR: mx.array) -> tuple[mx.array, mx.array]:
        """The latent vector ``[N, R]`` for :meth:`bias` and the next state, from the embedding of the token before."""
        return before_NR, state_NR

    def walk(self, before_NR: mx.array, hidden_NE: mx.array, positions_N: mx.array, most: int) -> mx.array:
        """The latents ``[N, R]`` of whole blocks whose tokens are known.

        A block's rows are consecutive, with positions from 1 to at most ``most``.
        """
        return self.step(before_NR, hidden_NE, mx.zeros_like(before_NR))[0]

    def bias(self, latent_NR: mx.array) -> mx.array:
        """The bias ``[N, D]`` of the logits."""
        return self.markov_w2(latent_NR)


class GatedMarkovHead(MarkovHead):
    """``gated``: each of the ``R`` numbers is scaled by a sigmoid of hidden state and token."""

    def __init__(self, vocab_size: int, drafted: int, rank: int, hidden_size: int):
        super().__init__(vocab_size, drafted, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, before_NR: mx.array, hidden_NE: mx.array, state_NR: mx.array) -> tuple[mx.array, mx.array]:
        gate_NR = mx.sigmoid(self.gate_proj(mx.concatenate([hidden_NE, before_NR], axis=-1)))
        return gate_NR * before_NR, state_NR


class RecurrentMarkovHead(MarkovHead):
    """``rnn``: a recurrent state, zero at the start of each block, remembers the block's tokens."""

    def __init__(self, vocab_size: int, drafted: int, rank: int, hidden_size: int):
        super().__init__(vocab_size, drafted, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, before_NR: mx.array, hidden_NE: mx.array, state_NR: mx.array) -> tuple[mx.array, mx.array]:
        joint = self.joint_proj(mx.concatenate([state_NR, before_NR, hidden_NE], axis=-1))
        gate_NR, new_NR, out_NR = mx.split(joint, 3, axis=-1)
        gate_NR = mx.sigmoid(gate_NR)
        return mx.tanh(out_NR), gate_NR * state_NR + (1 - gate_NR) * mx.tanh(new_NR)

    def walk(self, before_NR: mx.array, hidden_NE: mx.array, positions_N: mx.array, most: int) -> mx.array:
        def step(rows: mx.array, states: mx.array) -> mx.array:
            return mx.concatenate([*self.step(before_NR[rows], hidden_NE[rows], states[:, self.rank :])], axis=-1)

        both_N2R = mx.zeros((before_NR.shape[0], 2 * self.rank), before_NR.dtype)
        return states_of_blocks(step, both_N2R, positions_N, most)[:, : self.rank]


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}
"""The heads by their names in published configs."""


def markov_head_class(name: str) -> type[MarkovHead]:
    """The head of that name. Raises ``CheckpointError`` for an unknown one."""
    if name not in MARKOV_HEADS:
        raise CheckpointError(f"markov_head_type {name!r} is not supported; {did_you_mean(name, MARKOV_HEADS)}")
    return MARKOV_HEADS[name]


class ConfidenceHead(nn.Module):
    """The logit of the probability that a draft is accepted if all before it are."""

    def __init__(self, hidden_size: int, rank: int):
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)

    def __call__(self, parts: Sequence[mx.array]) -> mx.array:
        """Logits ``[N]`` from final hidden states ``[N, E]`` and, if the head reads tokens, embeddings ``[N, R]``."""
        return self.proj(mx.concatenate(list(parts), axis=-1))[..., 0]
