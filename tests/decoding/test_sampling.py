"""Samplers and logits processors act as in plain mlx_lm, and a failing one leaves nothing broken."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import apply_top_k, make_logits_processors, make_sampler
from support.models import ScriptedDrafter, plain_greedy, target

from dflash import DFlashSpeculativeDecoder
from dflash.core.errors import GenerationError
from dflash.decoding.sampling import LOGITS_PROCESSORS, SAMPLERS, DrawingSampler

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


PENALTIES = [
    {"repetition_penalty": 1.5, "repetition_context_size": 7},
    {"presence_penalty": 2.0, "presence_context_size": 9},
    {"frequency_penalty": 1.5, "frequency_context_size": 30},
    {"logit_bias": {3: -20.0, 5: 4.0}},
    {"logit_bias": {5: 3.0}, "repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5},
]
FUNCTIONS = [[no_repeat], make_logits_processors(**PENALTIES[0])]


@pytest.mark.parametrize(
    ("processors", "options"),
    [
        *((make_logits_processors(**options), options) for options in PENALTIES),
        *((functions, {"logits_processors": functions}) for functions in FUNCTIONS),
    ],
    ids=["repetition", "presence", "frequency", "bias", "all", "of one's own", "mlx-lm's functions"],
)
def test_processors_see_the_tokens_that_plain_decoding_would_show_them(processors, options):
    expected = plain(processors, 40)
    assert expected != plain([], 40)
    assert decoder(expected).spec_generate(PROMPT, 40, **options).tolist() == [PROMPT + expected]


def test_a_bias_of_minus_infinity_forbids_a_token():
    best = plain([], 1)[0]
    ids = decoder([]).spec_generate(PROMPT, 40, temperature=2.0, seed=1, logit_bias={best: -float("inf")})
    assert best not in ids.tolist()[0][len(PROMPT) :]


def second_best(logprobs: mx.array) -> mx.array:
    return mx.argsort(logprobs, axis=-1)[:, -2]


def test_registered_processors_and_samplers_go_by_name():
    with LOGITS_PROCESSORS.temporary("no_repeat", no_repeat), SAMPLERS.temporary("second_best", second_best):
        expected = plain([no_repeat], 30)
        ids = decoder(expected).spec_generate(PROMPT, 30, logits_processors=["no_repeat"])
        assert ids.tolist() == [PROMPT + expected]
        expected = plain([], 30, sampler=second_best)
        assert decoder(expected, sampler="second_best").spec_generate(PROMPT, 30).tolist() == [PROMPT + expected]


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


@pytest.mark.parametrize("kind", ["sampler", "logits_processors"])
def test_a_sampler_or_processor_that_fails_leaves_the_random_state_as_it_was(kind):
    """mlx-lm's filters are compiled over the global state; one that raises leaves a placeholder in it."""
    bad_sampler = make_sampler(1.0, top_k=32)  # as large as the vocabulary: refused by mlx-lm while it is traced

    def bad_processor(tokens: mx.array, logits: mx.array) -> mx.array:
        return apply_top_k(logits, 32)

    mx.random.seed(7)
    expected = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(7)
    with pytest.raises(ValueError, match="top_k"):
        decoder([], policy="full").spec_generate(
            PROMPT, 5, **({"sampler": bad_sampler} if kind == "sampler" else {kind: [bad_processor]})
        )
    assert mx.random.uniform(shape=(3,)).tolist() == expected
    assert decoder([], policy="full").spec_generate(PROMPT, 5, 1.0).shape == (1, 8)
