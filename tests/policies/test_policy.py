"""A policy decides how fast the text is written and never what is written, whatever it answers."""

import mlx.core as mx
import numpy as np
import pytest
from support.errors import refused
from support.models import bound_drafter, plain_greedy, target

from dflash import DFlashSpeculativeDecoder, Policy, Proposal
from dflash.core.errors import DFlashError, GenerationError
from dflash.decoding.block import Decoding
from dflash.decoding.loop import decode, prefill
from dflash.policies.adaptive import Adaptive
from dflash.policies.base import POLICIES, BlockRecord, Drafts, Fixed


def test_confidence_is_the_probability_of_each_draft():
    logits = mx.log(mx.array([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]]))
    tokens, candidates = mx.array([[0, 1]]), mx.array([[[2, 1, 0], [0, 1, 2]]])
    of_candidates = Proposal(tokens, mx.take_along_axis(logits, candidates, 2), candidates)
    own = Proposal(tokens, logits, confidence=mx.array([[0.3, 0.4]]))
    for proposal, chances in ((Proposal(tokens, logits), [0.5, 0.2]), (of_candidates, [0.5, 0.2]), (own, [0.3, 0.4])):
        assert proposal.acceptance_chances().tolist() == pytest.approx(chances)
    assert Proposal(tokens).acceptance_chances() is None


@pytest.mark.parametrize("candidates", [None, mx.array([[[0, 1, 2], [0, 1, 2]]])])
def test_a_logit_of_infinity_is_a_certain_draft_and_no_other_is_possible(candidates):
    logits = mx.array([[[mx.inf, 0.0, 1.0], [0.0, mx.inf, 1.0]]])
    assert Proposal(mx.array([[0, 0]]), logits, candidates).acceptance_chances().tolist() == [1.0, 0.0]


class Pausing(Policy):
    """Three plain tokens, then a block of which two drafts are verified, and so on."""

    reads_confidence = True

    def __init__(self):
        self.blocks, self.left = [], 3

    def sleep(self):
        return self.left

    def verify_length(self, drafts):
        assert not drafts.count or len(drafts.confidence) == drafts.count
        return min(2, drafts.count)

    def observe(self, block):
        self.blocks.append(block)
        self.left = self.left - 1 if block.asleep else 3


@pytest.mark.parametrize("tree", [None, 6])
def test_a_fixed_number_is_all_that_is_drafted(tree, monkeypatch):
    drafter, asked = bound_drafter("qwen3", 0), []
    propose = type(drafter).propose
    monkeypatch.setattr(
        type(drafter), "propose", lambda self, a, length, c: asked.append(length) or propose(self, a, length, c)
    )
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), drafter)
    tokens = decoder.spec_generate([3, 1, 4], 9, policy=3, tree=tree, stop_token_ids=[])
    assert tokens[0, 3:].tolist() == plain_greedy(target("qwen3", 1).model, [3, 1, 4], 9)[0]
    assert asked[0] == max(asked) == 3


@pytest.mark.parametrize("kind", ["qwen3", "llama", "sliding"])
@pytest.mark.parametrize("policy", [lambda: Fixed(0), lambda: Fixed(3), Adaptive, Pausing])
def test_no_policy_changes_the_text(kind, policy):
    expected, lead = plain_greedy(target(kind, 1).model, [3, 1, 4, 1, 5], 40)
    assert lead > 1e-4
    decoder = DFlashSpeculativeDecoder(target(kind, 1), bound_drafter(kind, 2))
    tokens = decoder.spec_generate([3, 1, 4, 1, 5], 40, policy=policy(), stop_token_ids=[])
    assert tokens[0, 5:].tolist() == expected


def test_logits_processors_see_every_token_before_theirs_in_pauses_too():
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2))
    options = {"repetition_penalty": 1.5, "stop_token_ids": []}
    full = decoder.spec_generate([3, 1, 4, 1, 5], 40, **options)
    assert full.tolist() != decoder.spec_generate([3, 1, 4, 1, 5], 40, stop_token_ids=[]).tolist()
    assert decoder.spec_generate([3, 1, 4, 1, 5], 40, policy=Pausing(), **options).tolist() == full.tolist()


@pytest.mark.parametrize("kind", ["qwen3", "sliding"])
def test_after_a_pause_both_caches_hold_what_was_committed(kind):
    models, policy = (target(kind, 1), bound_drafter(kind, 2)), Pausing()
    run = Decoding(*models, policy=policy)
    state = prefill(run, [3, 1, 4, 1, 5])
    for block in decode(run, state, 24, 16):
        if block.drafted:
            break
    fresh = prefill(Decoding(*models), state.tokens[:-1])
    assert fresh.tokens == state.tokens
    assert state.draft_cache.offset == fresh.draft_cache.offset == len(state.tokens) - 1
    for ours, theirs in zip(state.draft_cache.layers, fresh.draft_cache.layers, strict=True):
        for a, b in zip(ours.state, theirs.state, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
    assert [cache.offset for cache in state.target_cache] == [len(state.tokens) - 1] * len(state.target_cache)
    assert [block.drafted for block in policy.blocks] == [0, 0, 0, 15]


def test_the_steps_of_a_pause_take_all_of_its_time(monkeypatch):
    model, policy, clock = target("qwen3", 1), Pausing(), [0.0]
    forward = model.forward_with_hidden_states

    def slowly(*inputs):
        clock[0] += 0.1
        return forward(*inputs)

    monkeypatch.setattr(model, "forward_with_hidden_states", slowly)
    run = Decoding(model, bound_drafter("qwen3", 2), policy=policy, clock=lambda: clock[0])
    blocks = decode(run, prefill(run, [3, 1, 4, 1, 5]), 24, 16)
    for _ in range(3):
        next(blocks)
    assert sum(block.seconds for block in policy.blocks) == pytest.approx(3 * 0.1)


def test_a_policy_can_end_its_own_pause_after_any_step():
    class Impatient(Pausing):
        def sleep(self):
            return 0 if len(self.blocks) == 4 else 20

    policy = Impatient()
    run = Decoding(target("qwen3", 1), bound_drafter("qwen3", 2), policy=policy)
    list(decode(run, prefill(run, [3, 1, 4, 1, 5]), 12, 16))
    # One pass is under way when the policy is asked.
    assert [block.asleep for block in policy.blocks[:6]] == [True] * 6


def test_by_default_the_adaptive_policy_decides_and_says_why():
    decoder, records = DFlashSpeculativeDecoder.from_pretrained(), []
    decoder.generate("What is 7 * 8?", max_tokens=20, trace=records.append)
    blocks = records[2:]
    drafting = [not block["asleep"] for block in blocks]
    assert drafting == [False] * 5 + [True] * (len(blocks) - 5)
    assert [block["why"] for block in blocks[:5]] == [{"next_attempt": left} for left in (4, 3, 2, 1, 0)]
    assert all(block["why"].keys() == {"tokens", "seconds", "plain_seconds"} for block in blocks[5:] if block["drafts"])
    records.clear()
    decoder.generate("What is 7 * 8?", max_tokens=20, trace=records.append)
    assert not any(block["asleep"] for block in records[1:]), "what was measured serves the next request too"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_bundled_models_decode_losslessly_with_the_default_policy(temperature):
    decoder = DFlashSpeculativeDecoder.from_pretrained()
    prompt = "Write a function that keeps the even numbers, squares each and returns the sum."
    options = {"max_tokens": 60, "temperature": temperature, "seed": 3}
    assert decoder.generate(prompt, **options) == decoder.generate(prompt, policy=0, **options)


def test_a_policy_is_chosen_by_name_or_number_and_unknown_ones_are_named():
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2), policy="adaptive")
    with pytest.raises(DFlashError, match="Unknown policy 'adaptif'; did you mean 'adaptive'"):
        decoder.spec_generate([3, 1, 4], 8, policy="adaptif")

    with POLICIES.temporary("one-at-a-time", lambda: Fixed(1)):
        decoder.spec_generate([3, 1, 4], 12, policy="one-at-a-time", stream_callback=(blocks := []).append)
        assert max(map(len, blocks)) <= 2
    with POLICIES.temporary("no policy", dict), pytest.raises(DFlashError, match="is a dict; it must be a subclass"):
        decoder.spec_generate([3, 1, 4], 8, policy="no policy")
    with pytest.raises(DFlashError, match="a registered name or a dflash"):
        decoder.spec_generate([3, 1, 4], 8, policy=lambda drafts: 3)


@pytest.mark.parametrize(
    ("method", "returned"), [("verify_length", 2.5), ("verify_length", -3), ("draft_length", None), ("sleep", 1.5)]
)
@pytest.mark.parametrize("told", [False, True])
def test_what_a_policy_returns_is_checked(method, returned, told):
    class Emma(Policy):
        reads_confidence = told

        def answer(self, *_):
            return returned

    setattr(Emma, method, Emma.answer)
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2))
    with pytest.raises(GenerationError) as error:
        decoder.spec_generate([3, 1, 4], 40, policy=Emma(), stop_token_ids=[])
    refused(error, f"Emma.answer returned {returned}; expected a whole number of at least 0")


@pytest.mark.parametrize("number", [np.int64, mx.array, lambda n: 0, lambda n: 99])
def test_any_whole_number_is_one_and_one_beyond_the_most_means_all(number):
    class Two(Policy):
        def draft_length(self, most):
            return number(min(2, most))

        def verify_length(self, drafts):
            return number(drafts.count)

    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2))
    assert decoder.spec_generate([3, 1, 4], 5, policy=Two(), stop_token_ids=[]).size == 8


def test_of_drafts_that_were_drawn_a_policy_is_told_what_they_were_drawn_from():
    policy, told = Pausing(), []
    policy.verify_length = lambda drafts: told.append(drafts.confidence) or drafts.count
    decoder = DFlashSpeculativeDecoder(target("qwen3", 1), bound_drafter("qwen3", 2), policy=policy)
    decoder.spec_generate([3, 1, 4, 1, 5], 12, 1.0, verify="speculative_sampling", seed=1)
    expected = np.concatenate([confidence for confidence in told if confidence])
    assert (expected > 1 / 32).all()
    assert (expected < 1).all()


@pytest.mark.parametrize(("rows", "lengths"), [(1, [1, 2, 4, 8]), (8, [1, 1, 1, 2, 2, 2, 4])])
def test_a_batch_tries_a_longer_block_once_the_time_of_the_present_one_is_known(rows, lengths):
    policy = Adaptive()
    for _ in range(10):
        policy.observe(BlockRecord(0, 0, 0, 0, None, 1.0, asleep=True))
    tried = []
    while len(tried) < len(lengths):
        tried.append(policy.verify_length(Drafts(min(policy.draft_length(15), 15))))
        right = dict.fromkeys(range(tried[-1]), 1.0)
        policy.observe(BlockRecord(tried[-1], *[tried[-1]] * 3, None, 1.0, outcomes=right, rows=rows))
    assert tried == lengths
