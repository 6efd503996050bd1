"""DSpark's two heads: a bias on the logits from the token before, and the chance that a draft is accepted.

Knows the published weight names and formulas (DSpark, arXiv:2607.05147; the reference is DeepSpec). Must not know the
layers before the heads, caches, or how a token is chosen.

Shapes: N rows (one block's, or predictions of many), E hidden size, R rank, D drafted tokens of the vocabulary.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..core.errors import CheckpointError, did_you_mean


class MarkovHead(nn.Module):
    """``vanilla``: the bias of a token depends on the token before alone, by two tables of low rank.

    A new head's bias is 0 for all, so that a DFlash drafter with one drafts as before.
    """

    def __init__(self, vocab_size: int, drafted: int, rank: int, hidden_size: int):
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        self.markov_w2.weight = mx.zeros((drafted, rank))

    def step(self, before_NR: mx.array, hidden_NE: mx.array, state_NR: mx.array) -> tuple[mx.array, mx.array]:
        """What :meth:`bias` reads, ``[N, R]``, and the next state, from the embedding of the token before."""
        return before_NR, state_NR

    def walk(self, before_NR: mx.array, hidden_NE: mx.array, positions_N: mx.array, most: int) -> mx.array:
        """:meth:`step` of whole blocks whose tokens are known: rows follow each other, a block begins at position 1.

        ``most`` is the largest position.
        """
        return self.step(before_NR, hidden_NE, mx.zeros_like(before_NR))[0]

    def bias(self, latent_NR: mx.array) -> mx.array:
        """What is added to the logits, ``[N, D]``."""
        return self.markov_w2(latent_NR)


class GatedMarkovHead(MarkovHead):
    """``gated``: a sigmoid of hidden state and token decides how much of each of the ``R`` numbers counts."""

    def __init__(self, vocab_size: int, drafted: int, rank: int, hidden_size: int):
        super().__init__(vocab_size, drafted, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, before_NR: mx.array, hidden_NE: mx.array, state_NR: mx.array) -> tuple[mx.array, mx.array]:
        gate_NR = mx.sigmoid(self.gate_proj(mx.concatenate([hidden_NE, before_NR], axis=-1)))
        return gate_NR * before_NR, state_NR


class RecurrentMarkovHead(MarkovHead):
    """``rnn``: a state that begins at zero in each block remembers all of the block's tokens."""

    def __init__(self, vocab_size: int, drafted: int, rank: int, hidden_size: int):
        super().__init__(vocab_size, drafted, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, before_NR: mx.array, hidden_NE: mx.array, state_NR: mx.array) -> tuple[mx.array, mx.array]:
        joint = self.joint_proj(mx.concatenate([state_NR, before_NR, hidden_NE], axis=-1))
        gate_NR, new_NR, out_NR = mx.split(joint, 3, axis=-1)
        gate_NR = mx.sigmoid(gate_NR)
        return mx.tanh(out_NR), gate_NR * state_NR + (1 - gate_NR) * mx.tanh(new_NR)

    def walk(self, before_NR: mx.array, hidden_NE: mx.array, positions_N: mx.array, most: int) -> mx.array:
        # All blocks move on together: round k computes every row and keeps those at position k, whose state is that
        # of the row before. Blocks of different lengths need no padding, and nothing waits for positions on the host.
        positions_N1 = positions_N[:, None]
        states_NR = latents_NR = mx.zeros_like(before_NR)
        for k in range(1, most + 1):
            earlier_NR = mx.concatenate([mx.zeros_like(states_NR[:1]), states_NR[:-1]])
            earlier_NR = mx.where(positions_N1 == 1, 0, earlier_NR)
            latent_NR, state_NR = self.step(before_NR, hidden_NE, earlier_NR)
            latents_NR = mx.where(positions_N1 == k, latent_NR, latents_NR)
            states_NR = mx.where(positions_N1 == k, state_NR, states_NR)
        return latents_NR


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}
"""By their names in published configs."""


def markov_head_class(name: str) -> type[MarkovHead]:
    """The head of that name. Raises ``CheckpointError`` where there is none."""
    if name not in MARKOV_HEADS:
        raise CheckpointError(f"markov_head_type {name!r} is not supported; {did_you_mean(name, MARKOV_HEADS)}")
    return MARKOV_HEADS[name]


class ConfidenceHead(nn.Module):
    """The logit of the chance that a draft is accepted when all before it were; drafts before it may be read too."""

    def __init__(self, hidden_size: int, rank: int):
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)

    def __call__(self, parts: Sequence[mx.array]) -> mx.array:
        """``[N]`` from ``[N, E]`` final hidden states and, where the head reads them, ``[N, R]`` token embeddings."""
        return self.proj(mx.concatenate(list(parts), axis=-1))[..., 0]
