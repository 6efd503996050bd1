"""Speculative sampling: a verification rule that accepts drafts by the ratio of two distributions.

Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318). Drafts are drawn from the drafter's
own distribution ``q`` and accepted, at each position, with the probability ``sum(min(p, q))``. First mismatch takes
the drafter's best tokens and accepts each with the target's probability of it. So this rule pays where the target is
uncertain and the drafter knows how much. For the bundled models, whose target is nearly certain, it does not: 20
heldout requests at temperature 1 gave an acceptance length of 8.7 against 10.2. Accepting blocks as a whole
(arXiv:2403.10444) adds nothing for them: along the same drafts -0.01 to 0.01 tokens a block, within the error.

Knows arrays. Must not know models, caches or text.

Shapes: N drafts, L = N + 1 positions, V vocabulary.
"""

from dataclasses import replace
from typing import Any, cast

import mlx.core as mx

from ..core.errors import GenerationError
from ..drafters.protocol import Drafter, DrawingDrafter, Proposal
from .sampling import GREEDY, DrawingSampler, Sampler
from .verify import NO_TOKEN, Verified, first_mismatch, register_verify, token_ids


class SpeculativeSampling:
    """Accept draft ``d`` with probability ``min(1, p(d) / q(d))``, else draw from ``max(p - q, 0)``, normalised.

    ``p`` and ``q`` are the distributions of target and drafter under the same temperature, top-p, min-p and top-k, so
    the text is distributed exactly as the target's. Greedily, or for a drafter without logits, it accepts as often
    as first mismatch. Raises ``GenerationError`` for a sampler whose distribution is not known.
    """

    def check_sampler(self, sampler: Sampler) -> None:
        """Raise the error above before the first token; options call it."""
        if sampler is not GREEDY:
            _drawing(sampler)

    def propose(self, drafter: Drafter, anchor: mx.array, length: int, cache: Any, sampler: Sampler) -> Proposal:
        """Drafts drawn from ``q`` in place of the drafter's best tokens; the decode loop calls it."""
        if sampler is GREEDY:
            return drafter.propose(anchor, length, cache)
        if isinstance(drafter, DrawingDrafter):
            return drafter.draw(anchor, length, cache, _drawing(sampler))
        proposal = drafter.propose(anchor, length, cache)
        return drawn(proposal, _drawing(sampler))

    def __call__(self, proposal: Proposal, logits_LV: mx.array, sampler: Sampler) -> Verified:
        """The verification rule; see :data:`~dflash.decoding.verify.VerifyRule`."""
        if sampler is GREEDY:
            return first_mismatch(proposal, logits_LV, sampler)
        count, vocab = proposal.tokens.shape[1], logits_LV.shape[-1]
        p_LV = mx.exp(_drawing(sampler).log_distribution(logits_LV))
        drafts_N1 = mx.clip(proposal.tokens[0], 0, vocab - 1)[:, None]  # ids are checked by the decode loop
        q_NV = _dense_q(proposal, drafts_N1, vocab)
        p_N = mx.take_along_axis(p_LV[:count], drafts_N1, axis=-1)[:, 0]
        q_N = mx.take_along_axis(q_NV, drafts_N1, axis=-1)[:, 0]
        accepts = cast(list[bool], (mx.random.uniform(shape=(count,)) * q_N < p_N).tolist())
        accepted = next((i for i, accept in enumerate(accepts) if not accept), count)

        # One row is drawn from, once it is known which: on a CPU a draw from a whole vocabulary takes milliseconds.
        p_V = p_LV[accepted]
        rest_V = mx.maximum(p_V - q_NV[accepted], 0) if accepted < count else p_V  # after the last draft all of p
        rest_V = mx.where(mx.any(rest_V > 0), rest_V, p_V)  # p = q, rejected by rounding
        own = mx.where(mx.isnan(mx.sum(p_V)), NO_TOKEN, mx.random.categorical(mx.log(rest_V)).astype(mx.int32))
        return Verified([*token_ids(proposal.tokens)[:accepted], *token_ids(own[None])], accepted)


def drawn(proposal: Proposal, sampler: DrawingSampler) -> Proposal:
    """The proposal with each draft drawn from its own logits, as ``sampler`` says; as it is if it has no logits.

    The confidence is the drafter's probability of a draft before it is drawn, ``sum(q ** 2)``: it tells a policy what
    this row's drafts are like, and nothing of the draft itself.
    """
    if proposal.logits is None:
        return proposal
    log_q_NK = sampler.log_distribution(proposal.logits[0])
    tokens_N = mx.random.categorical(log_q_NK).astype(mx.int64)
    if proposal.candidates is not None:
        tokens_N = mx.take_along_axis(proposal.candidates[0], tokens_N[:, None], axis=-1)[:, 0].astype(mx.int64)
    confidence_N = mx.exp(2 * log_q_NK.astype(mx.float32)).sum(axis=-1)
    return replace(proposal, tokens=tokens_N[None], log_q=log_q_NK[None], confidence=confidence_N[None])


def _dense_q(proposal: Proposal, drafts_N1: mx.array, vocab: int) -> mx.array:
    """What each draft was drawn from, ``[N, V]``; without draws the drafter was certain of it."""
    if proposal.log_q is None:
        return (drafts_N1 == mx.arange(vocab)).astype(mx.float32)
    q_NK = mx.exp(proposal.log_q[0].astype(mx.float32))
    if proposal.candidates is None:
        return q_NK
    none_NV = mx.zeros((drafts_N1.shape[0], vocab))
    if not none_NV.size:  # MLX adds to no rows with an error
        return none_NV
    rows_N1 = mx.arange(drafts_N1.shape[0])[:, None]
    return none_NV.at[rows_N1, proposal.candidates[0]].add(q_NK)


def _drawing(sampler: Sampler) -> DrawingSampler:
    if not isinstance(sampler, DrawingSampler):
        raise GenerationError(
            "The rule 'speculative_sampling' must know the sampler's distribution; use temperature, top_p, min_p and "
            "top_k instead of a sampler of your own, or verify='first_mismatch'."
        )
    return sampler


speculative_sampling = register_verify("speculative_sampling")(SpeculativeSampling())
