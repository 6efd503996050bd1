"""Speculative sampling: a verification rule that accepts drafts by the ratio of two distributions.

Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318). Drafts are drawn from the drafter's
own distribution ``q`` and accepted, at each position, with the probability ``sum(min(p, q))``. First mismatch takes
the drafter's best tokens and accepts each with the target's probability of it. So this rule pays where the target is
uncertain and the drafter knows how much. For the bundled models, whose target is nearly certain, it does not: 20
heldout requests at temperature 1 gave an acceptance length of 8.7 against 10.2.

Knows arrays. Must not know models, caches or text.

Shapes: N drafts, L = N + 1 positions, V vocabulary.
"""

import mlx.core as mx

from .drafters.protocol import Proposal
from .errors import GenerationError
from .sampling import GREEDY, DrawingSampler, Sampler
from .verify import NO_TOKEN, Verified, first_mismatch, register_verify, token_ids


class SpeculativeSampling:
    """Accept draft ``d`` with probability ``min(1, p(d) / q(d))``, else draw from ``max(p - q, 0)``, normalised.

    ``p`` and ``q`` are the distributions of target and drafter under the same temperature, top-p, min-p and top-k, so
    the text is distributed exactly as the target's. Greedily, or for a drafter without logits, it accepts as often
    as first mismatch. Raises :class:`~dflash.errors.GenerationError` for a sampler whose distribution is not known.
    """

    def draft(self, proposal: Proposal, sampler: Sampler) -> Proposal:
        """Drafts drawn from ``q`` in place of the drafter's best tokens; the decode loop calls it before its pass."""
        if sampler is GREEDY or proposal.logits is None:
            return proposal
        log_q_NV = _drawing(sampler).log_distribution(proposal.logits[0])
        return Proposal(mx.random.categorical(log_q_NV).astype(mx.int64)[None], proposal.logits)

    def __call__(self, proposal: Proposal, logits_LV: mx.array, sampler: Sampler) -> Verified:
        """The verification rule; see :data:`~dflash.verify.VerifyRule`."""
        if sampler is GREEDY:
            return first_mismatch(proposal, logits_LV, sampler)
        count, vocab = proposal.tokens.shape[1], logits_LV.shape[-1]
        p_LV = mx.exp(_drawing(sampler).log_distribution(logits_LV))
        drafts_N1 = mx.clip(proposal.tokens[0], 0, vocab - 1)[:, None]  # ids are checked by the decode loop
        if proposal.logits is None:
            q_NV = (drafts_N1 == mx.arange(vocab)).astype(mx.float32)  # certain of its draft
        else:
            q_NV = mx.exp(_drawing(sampler).log_distribution(proposal.logits[0]))
        p_N = mx.take_along_axis(p_LV[:count], drafts_N1, axis=-1)[:, 0]
        q_N = mx.take_along_axis(q_NV, drafts_N1, axis=-1)[:, 0]
        accept_N = mx.random.uniform(shape=(count,)) * q_N < p_N

        # After the last draft nothing was proposed: there the rest is all of p.
        rest_LV = mx.maximum(p_LV - mx.pad(q_NV, [(0, 1), (0, 0)]), 0)
        rest_LV = mx.where(mx.any(rest_LV > 0, axis=-1, keepdims=True), rest_LV, p_LV)  # p = q, rejected by rounding
        own_L = mx.random.categorical(mx.log(rest_LV)).astype(mx.int32)
        own_L = mx.where(mx.isnan(mx.sum(p_LV, axis=-1)), NO_TOKEN, own_L)

        mx.eval(proposal.tokens, accept_N, own_L)
        drafted, own = token_ids(proposal.tokens[0]), token_ids(own_L)
        accepted = next((i for i, accept in enumerate(accept_N.tolist()) if not accept), count)  # type: ignore[arg-type]
        return Verified([*drafted[:accepted], own[accepted]], accepted)


def _drawing(sampler: Sampler) -> DrawingSampler:
    if not isinstance(sampler, DrawingSampler):
        raise GenerationError(
            "The rule 'speculative_sampling' must know the sampler's distribution; use temperature, top_p, min_p and "
            "top_k instead of a sampler of your own, or verify='first_mismatch'."
        )
    return sampler


speculative_sampling = register_verify("speculative_sampling")(SpeculativeSampling())
