"""What a rule commits, what the target's own choice is in every precision, and rules of one's own."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler
from support.errors import refused
from support.models import ScriptedDrafter, plain_greedy, qwen3_model, target

from dflash import DFlashError, DFlashSpeculativeDecoder, Proposal, Verified
from dflash.decoding import verify
from dflash.decoding.sampling import GREEDY
from dflash.decoding.verify import NO_TOKEN, VERIFY_RULES, accepted_length, first_mismatch, sample_target

NAN = float("nan")
TOKENS = st.lists(st.integers(0, 3), max_size=8)


def one_hot(tokens: list[int], vocab: int = 4) -> mx.array:
    """Logits whose best token is each of ``tokens``."""
    return 10.0 * mx.eye(vocab)[mx.array(tokens)]


@given(TOKENS, st.data())
def test_first_mismatch_commits_the_agreeing_drafts_and_the_targets_next_token(drafted, data):
    n = len(drafted) + 1
    target_tokens = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    verified = first_mismatch(Proposal(mx.array([drafted], mx.int64).reshape(1, -1)), one_hot(target_tokens), GREEDY)
    agree = next((i for i, d in enumerate(drafted) if d != target_tokens[i]), len(drafted))
    assert verified == Verified(target_tokens[: agree + 1], agree)
    assert accepted_length(drafted, target_tokens) == agree


def best_of_rows(sampled: list[int]):
    """A sampler that is not known to be greedy, and notes how many rows it is asked about."""

    def sampler(logprobs: mx.array) -> mx.array:
        sampled.append(logprobs.shape[0])
        return mx.argmax(logprobs, axis=-1)

    return sampler


@pytest.mark.parametrize(("cpu", "calls"), [(True, 2), (False, 4)])
def test_where_draws_cost_more_than_waits_none_is_made_beyond_the_first_mismatch(cpu, calls, monkeypatch):
    monkeypatch.setattr(verify, "on_cpu", lambda: cpu)
    sampled: list[int] = []
    verified = first_mismatch(Proposal(mx.array([[1, 2, 3]])), one_hot([1, 0, 3, 2]), best_of_rows(sampled))
    assert (verified.tokens, verified.accepted, verified.path) == ([1, 0], 1, None)
    assert len(verified.random_states) == 2
    assert sampled == [1] * calls


@pytest.mark.parametrize(("row", "tokens"), [(1, [1, NO_TOKEN]), (2, [1, 0])])
def test_logits_that_are_not_a_number_matter_where_they_are_reached(row, tokens, monkeypatch):
    monkeypatch.setattr(verify, "on_cpu", lambda: True)
    logits = one_hot([1, 0, 3, 2])
    logits[row] = NAN
    assert first_mismatch(Proposal(mx.array([[1, 2, 3]])), logits, best_of_rows([])).tokens == tokens


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_the_targets_choice_is_plain_mlx_lms_in_every_precision(dtype):
    """In half precision normalising rounds: two logits may become a tie, which goes to the lower index."""
    logits = (0.5 + 0.05 * mx.random.normal((64, 500), key=mx.random.key(0))).astype(dtype)
    plain = [GREEDY((row - mx.logsumexp(row, keepdims=True))[None]).item() for row in logits]
    assert sample_target(logits, GREEDY).tolist() == plain
    ties = sum(a != b for a, b in zip(plain, mx.argmax(logits, axis=-1).tolist(), strict=True))
    assert (ties > 0) == (dtype != mx.float32), "the shortcut of float32 would be wrong in half precision"


@pytest.mark.parametrize(
    ("sampler", "dtype"), [(GREEDY, mx.float32), (GREEDY, mx.bfloat16), (make_sampler(1.0), mx.float32)]
)
def test_logits_that_are_not_a_number_choose_nothing(sampler, dtype):
    logits = one_hot([1, 2, 3]).astype(dtype)
    logits[1] = NAN
    tokens = sample_target(logits, sampler).tolist()
    assert tokens[1] == NO_TOKEN
    assert tokens[0] != NO_TOKEN != tokens[2]


def test_nan_in_the_targets_weights_ends_decoding_with_a_reason():
    model = qwen3_model(0)
    norm = model.model.layers[2].input_layernorm
    norm.weight = mx.where(mx.arange(32) == 3, NAN, norm.weight)
    for temperature in (0.0, 1.0):
        with pytest.raises(DFlashError) as error:
            DFlashSpeculativeDecoder(model, ScriptedDrafter([], 32)).spec_generate([1, 2], 5, temperature)
        refused(error, "logits are not a number (NaN)", "weights")


def test_nan_that_comes_in_the_middle_of_an_answer_is_not_committed():
    prompt, model = [3, 1, 4], target("llama", 2).model
    expected, _ = plain_greedy(model, prompt, 20)

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * NAN if tokens.size >= 12 else logits

    decoder = DFlashSpeculativeDecoder(model, ScriptedDrafter(prompt + expected, 32, block_size=4), policy="full")
    steps: list[list[int]] = []
    with pytest.raises(DFlashError, match="not a number"):
        decoder.spec_generate(prompt, 20, logits_processors=[spoil], stream_callback=steps.append)
    got = [t for step in steps for t in step]
    assert got == expected[: len(got)]
    assert 5 <= len(got) <= 9


# --- rules of one's own -----------------------------------------------------------------------------------


def top3(proposal: Proposal, logits_LV: mx.array, sampler) -> Verified:
    """Accepts a draft that is among the target's three best."""
    best = mx.argsort(-logits_LV, axis=-1)[:, :3].tolist()
    drafted = proposal.tokens[0].tolist()
    n = next((i for i, token in enumerate(drafted) if token not in best[i]), len(drafted))
    return Verified([*drafted[:n], best[n][0]], n)


class SecondBestDrafter(ScriptedDrafter):
    """Drafts one token: the target's own second choice."""

    def propose(self, anchor: mx.array, length: int, cache) -> Proposal:
        logits = self.bound.model(mx.array([[*cache.tokens, anchor.item()]]))[0, -1]
        return Proposal(mx.argsort(logits)[-2].reshape(1, 1))


@pytest.fixture
def registered():
    with VERIFY_RULES.temporary("top3", top3):
        yield "top3"


def test_a_rule_of_ones_own_decides_what_is_committed(registered):
    prompt, model = [3, 1, 4], target("llama", 2).model
    expected, _ = plain_greedy(model, prompt, 21)
    exact = DFlashSpeculativeDecoder(model, SecondBestDrafter([], 32), policy="full")
    assert exact.spec_generate(prompt, 21).tolist() == [prompt + expected]
    for rule in (registered, top3):
        steps: list[list[int]] = []
        decoder = DFlashSpeculativeDecoder(model, SecondBestDrafter([], 32), verify=rule, policy="full")
        ids = decoder.spec_generate(prompt, 21, stream_callback=steps.append)
        assert [len(step) for step in steps] == [1] + [2] * 10
        logits = model(ids)[0]
        ranks = [int((logits[i - 1] > logits[i - 1, ids[0, i]]).sum()) for i in range(3, ids.shape[1])]
        assert ranks == [0] + [1, 0] * 10, "an accepted second choice, then the target's first"


@pytest.mark.parametrize(
    ("verified", "words"),
    [
        (Verified([5], 1), "rule 'broken' committed"),
        (Verified([5, 6], 1), "rule 'broken' committed"),
        (None, "rule 'broken' returned NoneType; expected a dflash.Verified"),
        (Verified([32], 0), "chose [32]; this target's ids are 0 to 31"),
    ],
)
def test_a_rule_that_commits_what_was_not_verified_is_refused(verified, words):
    def broken(proposal, logits_LV, sampler):
        return verified

    decoder = DFlashSpeculativeDecoder(target("llama", 2).model, ScriptedDrafter([0] * 20, 32))
    with pytest.raises(DFlashError) as error:
        decoder.spec_generate([3, 1, 4], 10, verify=broken)
    refused(error, words)
