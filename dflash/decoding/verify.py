"""Verification: which tokens one target pass commits. A rule is a function, and rules are known by name.

Knows arrays, the record that a rule returns, and whether a CPU draws. Must not know models, caches or text.

Shapes: L positions of a block, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from ..core.backend import on_cpu
from ..core.registry import Registry
from ..core.trees import chain, walk
from ..drafters.protocol import Proposal
from .sampling import GREEDY, Sampler, sample_rows, set_random_state

NO_TOKEN = -1
"""Stands where a target's logits are not a number, so that no token can be chosen."""

COSTLY_VOCABULARY = 8192
"""Tokens of a vocabulary from which, on a CPU, a draw costs more than a wait for the device.

To draw a token and wait for it took 0.2 ms with 1,024 tokens and 2.3 ms with 49,152 on a server.
"""


@dataclass(frozen=True)
class Verified:
    """What a rule decided: the committed ``tokens``, of which the first ``accepted`` are drafts.

    The last committed token is always the target's own, so ``len(tokens) == accepted + 1``. A rule that draws as plain
    decoding does says what MLX's random state was after each token, so that a text can end within a block. Of a tree it
    says which drafts it accepted, from the anchor on: the ``path``.
    """

    tokens: list[int]
    accepted: int
    random_states: list[list[int]] = field(default_factory=list)
    path: list[int] | None = None

    @property
    def accepted_drafts(self) -> list[int]:
        """Which drafts were accepted, in the order of their depths."""
        return list(range(self.accepted)) if self.path is None else self.path

    def accepted_first(self, count: int) -> list[int]:
        """The numbers of ``count`` drafts, the accepted ones first."""
        rest = set(range(count)).difference(self.accepted_drafts)
        return [*self.accepted_drafts, *sorted(rest)]


VerifyRule = Callable[[Proposal, mx.array, Sampler], Verified]
"""``rule(proposal, logits_LV, sampler) -> Verified``.

``proposal.tokens`` is ``[1, L - 1]`` (``L`` may be 1); row ``i`` of ``logits_LV`` holds the target's logits after
the anchor and ``i`` drafts, with the logits processors already applied. The arrays are lazy: a rule should evaluate
what it needs at once, because each evaluation is one wait for the device. Where ``proposal.parents`` makes the drafts a
tree, row ``i + 1`` holds the logits after draft ``i`` and what it follows. A rule that has an attribute
``propose(drafter, anchor, length, cache, sampler) -> Proposal`` says how the drafter is asked.
"""

VERIFY_RULES: Registry[VerifyRule] = Registry("verification rule", "dflash.verify")


def register_verify(name: str) -> Callable[[VerifyRule], VerifyRule]:
    """Decorator: make a :data:`VerifyRule` known as ``name``, for ``decoder.generate(..., verify=name)``.

    A rule of one's own decides what text comes out; the rules of this package keep the target's.
    """
    return VERIFY_RULES.register(name)


def sample_target(logits_LV: mx.array, sampler: Sampler) -> mx.array:
    """The target's own choice at each position, ``[L]``: what plain ``mlx_lm`` decoding would take there.

    ``NO_TOKEN`` where the logits are not a number (damaged weights, or an overflow).
    """
    return sample_with_states(logits_LV, sampler)[0]


def sample_with_states(logits_LV: mx.array, sampler: Sampler) -> tuple[mx.array, mx.array | None]:
    """:func:`sample_target`, and MLX's random state after each position, ``[L, 2]``; ``None`` for the greedy sampler.

    Plain decoding has the same states there. Whoever commits only some of the positions goes back to the last one's.
    """
    # Normalising costs a pass over the vocabulary and moves no maximum, but in half precision it can round
    # two logits to a tie, which plain decoding breaks by index.
    states_L2 = None
    if sampler is GREEDY and logits_LV.dtype == mx.float32:
        tokens_L = mx.argmax(logits_LV, axis=-1)
        decisive_L1 = mx.take_along_axis(logits_LV, tokens_L[:, None], axis=-1)
    else:
        decisive_L1 = mx.logsumexp(logits_LV, axis=-1, keepdims=True)
        tokens_L, states_L2 = sample_rows(sampler, logits_LV - decisive_L1)
    return mx.where(mx.isnan(decisive_L1[:, 0]), NO_TOKEN, tokens_L.astype(mx.int32)), states_L2


def accepted_length(drafted: Sequence[int], target_tokens: Sequence[int]) -> int:
    """Number of leading drafts that equal the target's choices."""
    n = 0
    while n < len(drafted) and drafted[n] == target_tokens[n]:
        n += 1
    return n


@register_verify("first_mismatch")
def first_mismatch(proposal: Proposal, logits_LV: mx.array, sampler: Sampler) -> Verified:
    """Accept drafts up to the first that the target itself would not have chosen.

    Every committed token is the target's choice, drawn with the random numbers that plain decoding would use for it:
    the same seed gives the text of plain ``mlx_lm``, whatever is drafted and however many drafts a block verifies.
    Of a tree, it accepts the path on which the target's choices lead. Where draws are costly, none is made beyond the
    first mismatch.
    """
    if proposal.parents is not None:
        return _walk(proposal, proposal.parents, logits_LV, sampler)
    if draws_only_reached(sampler, logits_LV.shape[-1]):
        return _walk(proposal, chain(proposal.tokens.shape[1]), logits_LV, sampler)
    target_tokens_L, states_L2 = sample_with_states(logits_LV, sampler)
    mx.eval(proposal.tokens, target_tokens_L, states_L2)
    drafted, target_tokens = token_ids(proposal.tokens), token_ids(target_tokens_L)
    accepted = accepted_length(drafted, target_tokens)
    states = random_states(states_L2)[: accepted + 1]
    if states:
        set_random_state(states[-1])
    return Verified(target_tokens[: accepted + 1], accepted, states)


def draws_only_reached(sampler: Sampler, vocab_size: int) -> bool:
    """Whether :func:`first_mismatch` draws one token after another, as far as the drafts agree, or all at once.

    One after another where a draw costs more than a wait for the device.
    """
    return sampler is not GREEDY and vocab_size >= COSTLY_VOCABULARY and on_cpu()


def _walk(proposal: Proposal, parents: list[int], logits_LV: mx.array, sampler: Sampler) -> Verified:
    """Draw along the path only, one token after another: so each is drawn with plain decoding's random numbers."""
    states: list[list[int]] = []

    def choose(node: int) -> int:
        token, state = sample_with_states(logits_LV[node + 1 : node + 2], sampler)
        mx.eval(token, state)
        states.extend(random_states(state))
        return token_ids(token)[0]

    if sampler is GREEDY:  # nothing is drawn, so all at once
        best = token_ids(sample_target(logits_LV, sampler))
        path, tokens = walk(token_ids(proposal.tokens), parents, lambda node: best[node + 1])
    else:
        path, tokens = walk(token_ids(proposal.tokens), parents, choose)
    return Verified(tokens, len(path), states, None if proposal.parents is None else path)


def token_ids(tokens: mx.array) -> list[int]:
    """An array ``[N]`` or ``[1, N]`` of token ids as a list."""
    ids = tokens.tolist()  # not of tokens[0], which would be one more operation to wait for
    return cast(list[int], ids if tokens.ndim == 1 else cast(list[Any], ids)[0])


def random_states(states_L2: mx.array | None) -> list[list[int]]:
    """What :func:`sample_with_states` says of MLX's random state, as numbers."""
    return [] if states_L2 is None else cast(list[list[int]], states_L2.tolist())
