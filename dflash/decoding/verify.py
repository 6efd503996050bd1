"""Verification: which tokens one target pass commits. A rule is a function, registered by name.

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
from .sampling import GREEDY, RandomState, Sampler, sample_rows

NO_TOKEN = -1
"""Returned in place of a token where the target's logits are not a number."""


@dataclass(frozen=True)
class Verified:
    """What a rule decided: the committed ``tokens``, of which the first ``accepted`` are drafts.

    The last committed token is the target's own, so ``len(tokens) == accepted + 1``. A rule that samples in the order
    of plain decoding gives MLX's random state after each token, so that a request can end within a block. For a tree,
    ``path`` lists the accepted drafts from the anchor on.
    """

    tokens: list[int]
    accepted: int
    random_states: list[RandomState] = field(default_factory=list)
    path: list[int] | None = None

    @property
    def accepted_drafts(self) -> list[int]:
        """The numbers of the accepted drafts in the proposal, from the anchor on."""
        return list(range(self.accepted)) if self.path is None else self.path

    def accepted_first(self, count: int) -> list[int]:
        """The numbers of ``count`` drafts, the accepted ones first."""
        rest = set(range(count)).difference(self.accepted_drafts)
        return [*self.accepted_drafts, *sorted(rest)]


VerifyRule = Callable[[Proposal, mx.array, Sampler], Verified]
"""``rule(proposal, logits_LV, sampler) -> Verified``.

``proposal.tokens`` is ``[1, L - 1]``, where ``L`` may be 1. Row ``i`` of ``logits_LV`` holds the target's logits after
the anchor and ``i`` drafts, with the logits processors already applied. If ``proposal.parents`` makes the drafts a
tree, row ``i + 1`` holds the logits after draft ``i`` and its ancestors. The arrays are lazy: a rule should evaluate
what it needs in one call, because each evaluation waits for the device. A rule with a method
``propose(drafter, anchor, length, cache, sampler) -> Proposal`` decides how the drafter is called.
"""

VERIFY_RULES: Registry[VerifyRule] = Registry(
    "verification rule", "dflash.verify", ours=["dflash.decoding.speculative"]
)


def register_verify(name: str) -> Callable[[VerifyRule], VerifyRule]:
    """Decorator: make a :data:`VerifyRule` known as ``name``, for ``decoder.generate(..., verify=name)``.

    A rule decides which text is written. The rules of this package write the target's own; yours need not.
    """
    return VERIFY_RULES.register(name)


def sample_target(logits_LV: mx.array, sampler: Sampler) -> mx.array:
    """The target's own token at each position, ``[L]``: what plain ``mlx_lm`` decoding would take there.

    ``NO_TOKEN`` where the logits are not a number (damaged weights, or an overflow).
    """
    return sample_with_states(logits_LV, sampler)[0]


def sample_with_states(logits_LV: mx.array, sampler: Sampler) -> tuple[mx.array, list[RandomState]]:
    """:func:`sample_target`, and MLX's random state after each position; no states from the greedy sampler.

    The states equal those of plain decoding. A caller that commits only some of the positions restores the state of
    the last committed one.
    """
    # Normalising costs a pass over the vocabulary and moves no maximum, but in half precision it can round
    # two logits to a tie, which plain decoding breaks by index.
    if sampler is GREEDY and logits_LV.dtype == mx.float32:
        tokens_L, states = mx.argmax(logits_LV, axis=-1), list[RandomState]()
        decisive_L1 = mx.take_along_axis(logits_LV, tokens_L[:, None], axis=-1)
    else:
        decisive_L1 = mx.logsumexp(logits_LV, axis=-1, keepdims=True)
        tokens_L, states = sample_rows(sampler, logits_LV - decisive_L1)
    return mx.where(mx.isnan(decisive_L1[:, 0]), NO_TOKEN, tokens_L.astype(mx.int32)), states


def accepted_length(drafted: Sequence[int], target_tokens: Sequence[int]) -> int:
    """Number of leading drafts that equal the target's choices."""
    n = 0
    while n < len(drafted) and drafted[n] == target_tokens[n]:
        n += 1
    return n


@register_verify("first_mismatch")
def first_mismatch(proposal: Proposal, logits_LV: mx.array, sampler: Sampler) -> Verified:
    """Accept drafts up to the first one that the target itself would not have chosen.

    Every committed token is the target's choice, sampled with the random numbers that plain decoding would use for it.
    So a seed gives the text of plain ``mlx_lm``, whatever is drafted and however many drafts a block verifies. In a
    tree, the path that follows the target's choices is accepted. Where sampling is costly, no position beyond the first
    mismatch is sampled.
    """
    if proposal.parents is not None:
        return _walk(proposal, proposal.parents, logits_LV, sampler)
    if samples_one_by_one(sampler):
        return _walk(proposal, chain(proposal.tokens.shape[1]), logits_LV, sampler)
    target_tokens_L, states = sample_with_states(logits_LV, sampler)
    mx.eval(proposal.tokens, target_tokens_L, [state.key for state in states])
    drafted, target_tokens = token_ids(proposal.tokens), token_ids(target_tokens_L)
    accepted = accepted_length(drafted, target_tokens)
    if states:
        states[accepted].restore()
    return Verified(target_tokens[: accepted + 1], accepted, states[: accepted + 1])


def samples_one_by_one(sampler: Sampler) -> bool:
    """Whether :func:`first_mismatch` samples position after position up to the mismatch, or all positions at once.

    One by one pays where sampling a token takes longer than waiting for the device: on a CPU.
    """
    return sampler is not GREEDY and on_cpu()


def _walk(proposal: Proposal, parents: list[int], logits_LV: mx.array, sampler: Sampler) -> Verified:
    """Sample only along the accepted path, token by token, so that each gets plain decoding's random numbers."""
    states: list[RandomState] = []

    def choose(node: int) -> int:
        token, after = sample_with_states(logits_LV[node + 1 : node + 2], sampler)
        mx.eval(token, [state.key for state in after])
        states.extend(after)
        return token_ids(token)[0]

    if sampler is GREEDY:  # needs no random numbers, so all positions at once
        best = token_ids(sample_target(logits_LV, sampler))
        path, tokens = walk(token_ids(proposal.tokens), parents, lambda node: best[node + 1])
    else:
        path, tokens = walk(token_ids(proposal.tokens), parents, choose)
    return Verified(tokens, len(path), states, None if proposal.parents is None else path)


def token_ids(tokens: mx.array) -> list[int]:
    """An array ``[N]`` or ``[1, N]`` of token ids as a list."""
    ids = tokens.tolist()  # tokens[0] would be one more operation to wait for
    return cast(list[int], ids if tokens.ndim == 1 else cast(list[Any], ids)[0])
