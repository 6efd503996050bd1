"""Samplers and logits processors act as in plain mlx_lm, and a failing one leaves nothing broken."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import apply_top_k, make_logits_processors, make_sampler
from support.models import ScriptedDrafter, plain_greedy, target

from dflash import DFlashSpeculativeDecoder, register_logits_processor, register_sampler
from dflash.core.errors import GenerationError
from dflash.decoding.sampling import LOGITS_PROCESSORS, SAMPLERS, DrawingSampler, RandomState, process_logits

PROMPT = [3, 1, 4]


def plain(processors: list, count: int, sampler=None) -> list[int]:
    steps = generate_step(
        mx.array(PROMPT), target("llama", 2).model, max_tokens=count, logits_processors=processors, sampler=sampler
    )
    return [int(token) for token, _ in steps]


def decoder(text: list[int], p: float = 0.7, **options) -> DFlashSpeculativeDecoder:
    return DFlashSpeculativeDecoder(target("llama", 2).model, ScriptedDrafter(PROMPT + text, 32, p), **options)


def no_repeat(tokens: mx.array, logits: mx.array) -> mx.array:
    """Forbids the last six tokens."""
    logits[:, tokens[-6:]] = -float("inf")
    return logits


@pytest.mark.parametrize(
    "processors",
    [
        [no_repeat],
        make_logits_processors(repetition_penalty=1.5, repetition_context_size=7),
        make_logits_processors({3: -20.0}, presence_penalty=2.0, frequency_penalty=1.0),
    ],
    ids=["own", "repetition", "bias and penalties"],
)
@pytest.mark.parametrize("p", [0.0, 0.7, 1.0])
def test_processors_see_the_tokens_that_plain_decoding_would_show_them(processors, p):
    expected = plain(processors, 40)
    assert expected != plain_greedy(target("llama", 2).model, PROMPT, 40)[0]
    ids = decoder(expected, p).spec_generate(PROMPT, 40, logits_processors=processors)
    assert ids.tolist() == [PROMPT + expected]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5, "repetition_context_size": 7},
        {"presence_penalty": 2.0, "presence_context_size": 9},
        {"frequency_penalty": 1.5, "frequency_context_size": 30},
        {"logit_bias": {3: -20.0, 5: 4.0}},
        {"logit_bias": {5: 3.0}, "repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    ],
    ids=lambda options: "+".join(name for name in options if not name.endswith("size")),
)
def test_what_mlx_lm_does_to_logits_are_options_by_its_names(options):
    expected = plain(make_logits_processors(**options), 40)
    assert expected != plain([], 40)
    assert decoder(expected).spec_generate(PROMPT, 40, **options).tolist() == [PROMPT + expected]


def test_a_bias_of_minus_infinity_forbids_a_token():
    best = plain([], 1)[0]
    ids = decoder([]).spec_generate(PROMPT, 40, temperature=2.0, seed=1, logit_bias={best: -float("inf")})
    assert best not in ids.tolist()[0][len(PROMPT) :]


def test_registered_processors_and_samplers_go_by_name():
    register_logits_processor("no_repeat")(no_repeat)
    register_sampler("second_best")(lambda logprobs: mx.argsort(logprobs, axis=-1)[:, -2])
    try:
        expected = plain([no_repeat], 30)
        ids = decoder(expected).spec_generate(PROMPT, 30, logits_processors=["no_repeat"])
        assert ids.tolist() == [PROMPT + expected]
        expected = plain([], 30, sampler=lambda logprobs: mx.argsort(logprobs, axis=-1)[:, -2])
        assert decoder(expected, sampler="second_best").spec_generate(PROMPT, 30).tolist() == [PROMPT + expected]
    finally:
        LOGITS_PROCESSORS._known.pop("no_repeat")
        SAMPLERS._known.pop("second_best")


def test_a_sampler_of_ones_own_sees_one_position_at_a_time():
    """One that mixes rows would be exact in plain decoding and wrong over a block."""
    shapes = []

    def most_probable_of_all(logprobs: mx.array) -> mx.array:
        shapes.append(logprobs.shape)
        return mx.argmax(logprobs.reshape(-1)).reshape(1)

    expected, _ = plain_greedy(target("llama", 2).model, PROMPT, 40)
    ids = decoder(expected).spec_generate(PROMPT, 40, sampler=most_probable_of_all)
    assert ids.tolist() == [PROMPT + expected]
    assert set(shapes) == {(1, 32)}


def test_process_logits_applies_every_processor_in_order_at_every_position():
    calls = []

    def note(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(tokens.tolist())
        return logits + tokens.size

    def double(tokens: mx.array, logits: mx.array) -> mx.array:
        return 2 * logits

    out = process_logits([note, double], mx.array([7, 8, 9, 10]), mx.zeros((2, 5)))
    assert calls == [[7, 8, 9], [7, 8, 9, 10]]
    np.testing.assert_array_equal(np.array(out), [[6.0] * 5, [8.0] * 5])


def test_min_p_drops_what_is_less_probable_than_its_share_of_the_best():
    expected, _ = plain_greedy(target("llama", 2).model, PROMPT, 33)
    ids = decoder(expected, p=1.0).spec_generate(PROMPT, 33, temperature=3.0, seed=1, min_p=1.0)
    assert ids.tolist() == [PROMPT + expected], "hot, but one candidate is left"


def test_the_k_most_probable_of_fewer_tokens_are_all_of_them():
    """As of a drafter that knows a part of the vocabulary."""
    logits = mx.array([[1.0, 3.0, 2.0]])
    whole = DrawingSampler(0.7).log_distribution(logits)
    for k in (3, 5):
        assert mx.array_equal(DrawingSampler(0.7, top_k=k).log_distribution(logits), whole).item()
    assert mx.isinf(DrawingSampler(0.7, top_k=2).log_distribution(logits)).tolist() == [[True, False, False]]


def test_samplers_and_processors_that_return_something_else_are_told_so():
    for sampler in (lambda logprobs: logprobs, lambda logprobs: 3):
        with pytest.raises(GenerationError, match=r"The sampler returned .*; expected one token"):
            decoder([]).spec_generate(PROMPT, 5, sampler=sampler)
    for processor in (lambda tokens, logits: None, lambda tokens, logits: logits[0]):
        with pytest.raises(GenerationError, match=r"A logits processor returned .*; expected logits of shape"):
            decoder([]).spec_generate(PROMPT, 5, logits_processors=[processor])


# --- MLX's random state -----------------------------------------------------------------------------------


def test_a_sampled_call_that_fails_leaves_the_random_state_as_it_was():
    """mlx-lm's filters are compiled over the global state; one that raises leaves a tracer in it."""
    mx.random.seed(7)
    expected = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(7)
    logprobs = mx.zeros((1, 11))
    with pytest.raises(ValueError, match="top_k"), RandomState.restored_on_error():
        apply_top_k(logprobs, 11)
    assert mx.random.uniform(shape=(3,)).tolist() == expected


@pytest.mark.parametrize("kind", ["sampler", "logits_processors"])
def test_a_failing_sampler_or_processor_does_not_spoil_later_requests(kind):
    bad_sampler = make_sampler(1.0, top_k=32)  # as large as the vocabulary: refused by mlx-lm while it is traced

    def bad_processor(tokens: mx.array, logits: mx.array) -> mx.array:
        return apply_top_k(logits, 32)

    with pytest.raises(ValueError, match="top_k"):
        decoder([], policy="full").spec_generate(
            PROMPT, 5, **({"sampler": bad_sampler} if kind == "sampler" else {kind: [bad_processor]})
        )
    assert 0 <= mx.random.uniform().item() < 1
    assert decoder([], policy="full").spec_generate(PROMPT, 5, 1.0).shape == (1, 8)
