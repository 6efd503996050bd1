"""Speculative sampling: a verification rule that accepts drafts by the ratio of two distributions.

Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318). Drafts are sampled from the drafter's
own distribution ``q`` and accepted, at each position, with probability ``sum(min(p, q))``. First mismatch takes the
drafter's best tokens and accepts each with the target's probability of it. So this rule pays where the target is
uncertain and the drafter's probabilities are close to the target's.

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
    """Accept draft ``d`` with probability ``min(1, p(d) / q(d))``, else sample from ``max(p - q, 0)``, normalised.

    ``p`` and ``q`` are the distributions of target and drafter under the same temperature, top-p, min-p and top-k, so
    the text is distributed exactly as the target's. With greedy decoding or a drafter without logits, it accepts as
    often as first mismatch. Raises ``GenerationError`` for a sampler whose distribution is not known.
    """

    def check_sampler(self, sampler: Sampler) -> None:
        """Raise that error before the first token; called when options are checked."""
        if sampler is not GREEDY:
            _drawing(sampler)

    def propose(self, drafter: Drafter, anchor: mx.array, length: int, cache: Any, sampler: Sampler) -> Proposal:
        """Drafts sampled from ``q`` in place of the drafter's best tokens; called by the decode loop."""
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

        # Only the row that decides is sampled from: on a CPU, sampling from a large vocabulary is slow.
        p_V = p_LV[accepted]
        rest_V = mx.maximum(p_V - q_NV[accepted], 0) if accepted < count else p_V  # after the last draft all of p
        rest_V = mx.where(mx.any(rest_V > 0), rest_V, p_V)  # p = q, rejected by rounding
        own = mx.where(mx.isnan(mx.sum(p_V)), NO_TOKEN, mx.random.categorical(mx.log(rest_V)).astype(mx.int32))
        return Verified([*token_ids(proposal.tokens)[:accepted], *token_ids(own[None])], accepted)


def drawn(proposal: Proposal, sampler: DrawingSampler) -> Proposal:
    """The proposal with each draft sampled from its own logits by ``sampler``; unchanged if it has no logits.

    The confidence is the expected probability of a draft before it is sampled, ``sum(q ** 2)``. It tells a policy about
    the distribution and nothing about the sampled draft.
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
    """The distribution that each draft was sampled from, ``[N, V]``: one-hot if it was not sampled."""
    if proposal.log_q is None:
        return (drafts_N1 == mx.arange(vocab)).astype(mx.float32)
    q_NK = mx.exp(proposal.log_q[0].astype(mx.float32))
    if proposal.candidates is None:
        return q_NK
    none_NV = mx.zeros((drafts_N1.shape[0], vocab))
    if not none_NV.size:  # MLX raises an error for an update of no rows
        return none_NV
    rows_N1 = mx.arange(drafts_N1.shape[0])[:, None]
    return none_NV.at[rows_N1, proposal.candidates[0]].add(q_NK)


def _drawing(sampler: Sampler) -> DrawingSampler:
    if not isinstance(sampler, DrawingSampler):
        raise GenerationError(
            "The rule 'speculative_sampling' must know the sampler's distribution; use temperature, top_p, min_p and "
            "top_k instead of xtc or a sampler of your own, or verify='first_mismatch'."
        )
    return sampler


speculative_sampling = register_verify("speculative_sampling")(SpeculativeSampling())
