"""Speculative sampling is exact at every position, and accepts as often as the theory says."""

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from support.errors import refused
from support.models import ScriptedDrafter, plain_greedy, random_drafter, target

from dflash import DFlashError, DFlashSpeculativeDecoder, Proposal
from dflash.decoding.sampling import GREEDY, DrawingSampler
from dflash.decoding.speculative import drawn, speculative_sampling
from dflash.decoding.verify import first_mismatch

V, DRAWS = 6, 600


def rows(seed: int, count: int) -> mx.array:
    return mx.random.normal((count, V), key=mx.random.key(seed)) * 1.5


def probabilities(sampler: DrawingSampler, logits: mx.array) -> np.ndarray:
    return np.exp(np.array(sampler.log_distribution(logits), np.float64))


@pytest.mark.parametrize("sampler", [DrawingSampler(1.0), DrawingSampler(0.7, top_k=4)], ids=["hot", "top_k"])
def test_the_first_token_is_distributed_as_the_targets_and_accepted_as_often_as_can_be(sampler):
    mx.random.seed(3)
    target_logits, draft_logits = rows(0, 2), rows(1, 1)
    p, q = (probabilities(sampler, x)[0] for x in (target_logits, draft_logits))
    counts, accepted = Counter(), 0
    for _ in range(DRAWS):
        raw = Proposal(mx.argmax(draft_logits, axis=-1)[None], draft_logits[None])
        verified = speculative_sampling(drawn(raw, sampler), target_logits, sampler)
        counts[verified.tokens[0]] += 1
        accepted += verified.accepted
    best = np.minimum(p, q).sum()
    assert best > p[q.argmax()] + 0.05, "else it would be no better than first mismatch"
    # 4 standard deviations of a share of DRAWS
    assert abs(accepted / DRAWS - best) < 4 * (best * (1 - best) / DRAWS) ** 0.5
    for token in range(V):
        assert abs(counts[token] / DRAWS - p[token]) <= 4 * (p[token] * (1 - p[token]) / DRAWS) ** 0.5


def test_a_drafter_with_the_targets_own_distribution_is_always_right():
    sampler, logits = DrawingSampler(1.0), rows(2, 5)
    for _ in range(20):
        drafted = drawn(Proposal(mx.zeros((1, 4), mx.int64), logits[None, :4]), sampler)
        verified = speculative_sampling(drafted, logits, sampler)
        assert verified.accepted == 4
        assert verified.tokens[:4] == drafted.tokens[0].tolist()


@pytest.mark.parametrize("candidates", [None, 3])
def test_a_policy_may_verify_none_of_the_drafts_that_were_drawn(candidates):
    sampler, logits, ids = DrawingSampler(1.0), rows(2, 5), None
    if candidates is not None:
        ids = mx.broadcast_to(mx.arange(candidates), (1, 4, candidates))
    drafted = drawn(Proposal(mx.zeros((1, 4), mx.int64), logits[None, :4, :candidates], ids), sampler)
    verified = speculative_sampling(drafted.first(0), logits[:1], sampler)
    assert verified.accepted == 0
    assert len(verified.tokens) == 1


def test_greedily_it_is_first_mismatch():
    proposal, logits = Proposal(mx.array([[1, 2]], mx.int64), rows(7, 2)[None]), rows(6, 3)
    assert speculative_sampling(proposal, logits, GREEDY) == first_mismatch(proposal, logits, GREEDY)
    prompt, model = [3, 1, 4], target("llama", 2).model
    expected, _ = plain_greedy(model, prompt, 30)
    decoder = DFlashSpeculativeDecoder(model, ScriptedDrafter(prompt + expected, 32, 0.8))
    assert decoder.spec_generate(prompt, 30, verify="speculative_sampling").tolist() == [prompt + expected]


@pytest.mark.parametrize("real", [True, False], ids=["with logits", "without logits"])
def test_it_decodes_by_name_with_drafters_that_have_logits_and_that_have_none(real):
    prompt = [3, 1, 4]
    drafter = random_drafter(0) if real else ScriptedDrafter([], 32)
    model, options = target("llama", 2).model, {"verify": "speculative_sampling", "policy": "full"}
    decoder = DFlashSpeculativeDecoder(model, drafter, **options)
    first, again, other = (decoder.spec_generate(prompt, 12, 1.0, seed=seed).tolist() for seed in (1, 1, 2))
    if real:  # the scripted drafter rolls dice of its own
        assert first == again != other
    assert len(first[0]) == 15


def test_damaged_logits_and_unknown_distributions_are_refused():
    decoder = DFlashSpeculativeDecoder(target("llama", 2).model, ScriptedDrafter([], 32), policy="full")
    with pytest.raises(DFlashError) as error:
        decoder.spec_generate([1], 1, sampler=lambda x: mx.argmax(x, axis=-1), verify="speculative_sampling")
    refused(error, "must know the sampler's distribution", "verify='first_mismatch'")
    processors = [lambda tokens, logits: logits * float("nan") if tokens.size > 3 else logits]
    with pytest.raises(DFlashError, match="not a number"):
        decoder.spec_generate([1], 8, 1.0, logits_processors=processors, verify="speculative_sampling")
