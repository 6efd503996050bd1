"""Many prompts at once: the texts of each alone, options of their own, errors that leave the decoder as it was."""

import logging
from contextlib import contextmanager
from itertools import count, product

import mlx.core as mx
import pytest
from support.errors import refused
from support.models import TEXT_VOCAB, llama_model, qwen3_model, random_drafter, wrapped_tokenizer
from support.rows import Script

from dflash import DFlashError, DFlashSpeculativeDecoder, LoadedTargetModel, Proposal, read_conversations
from dflash.batches import tapped
from dflash.bench import HELDOUT
from dflash.decoding.admission import SpeculativeGenerator
from dflash.decoding.batch import FEW_ROWS
from dflash.decoding.sampling import DrawingSampler
from dflash.drafters.autoregressive import AutoregressiveDrafter
from dflash.drafters.combined import CombinedDrafter
from dflash.drafters.ngram import NgramDrafter
from dflash.policies.adaptive import Adaptive
from dflash.policies.base import BlockRecord, Drafts, Fixed

PROMPTS = ["a", "Two words", "abcabcabcabcabcabcabcabcabcabc", "What?", "b b b b"]


@pytest.fixture(scope="module")
def decoder():
    model = qwen3_model(3, TEXT_VOCAB)
    return DFlashSpeculativeDecoder(model, random_drafter(1, TEXT_VOCAB), wrapped_tokenizer(), max_tokens=24)


@pytest.fixture(scope="module")
def texts(decoder):
    return [decoder.generate(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(("policy", "batch_size"), [("full", 1), ("full", 2), (2, 5), (0, 5), ("adaptive", 3)])
def test_texts_are_those_of_each_prompt_alone(decoder, texts, policy, batch_size):
    assert decoder.batch_generate(PROMPTS, batch_size=batch_size, policy=policy) == texts


def test_each_prompt_may_have_options_of_its_own(decoder, texts):
    each = [
        {"max_tokens": 5},
        {"stop_strings": [texts[1][6:8]]},
        {"logit_bias": {65: 4.0}},
        {"stop_token_ids": [decoder.tokenizer.encode(texts[3][4])[0]]},
        {"max_tokens": 0},
    ]
    expected = [decoder.generate(prompt, **own) for prompt, own in zip(PROMPTS, each, strict=True)]
    assert expected[4] == ""
    assert all(len(short) < len(text) for short, text in zip(expected[:2], texts, strict=False))
    assert decoder.batch_generate(PROMPTS, batch_size=3, each=each) == expected
    assert decoder.batch_generate(PROMPTS, temp=1.0, each=[{"temperature": 0.0}] * len(PROMPTS)) == texts


def test_a_response_is_a_token_of_the_targets_and_the_accepted_drafts(decoder):
    tokens = {i: [] for i in range(len(PROMPTS))}
    for number, response in decoder.stream_batch(PROMPTS, policy="full"):
        if response.finish_reason is None:
            assert response.tokens[1:] == response.drafted[: response.accepted]
        tokens[number] += response.tokens
        assert response.generation_tokens == len(tokens[number])
        assert response.prompt_tps > 0
    for prompt, written in zip(PROMPTS, tokens.values(), strict=True):
        assert written == [token for response in decoder.stream_generate(prompt) for token in response.tokens]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({name: value}, (name, "one prompt at a time")) for name, value in {
            "tree": 4, "kv_bits": 8, "max_kv_size": 32, "profile": True, "trace": list,
            "verify": "speculative_sampling",
        }.items()),
        ({"seed": 1, "temperature": 0.5}, ("seed", "one prompt at a time")),
        ({"each": [{"policy": "full"}] * len(PROMPTS)}, ("policy", "whole batch")),
        ({"each": [{}]}, ("as many options as prompts, got 5 and 1",)),
        ({"each": {"temp": 1.0}}, ("each is a list of dicts",)),
        ({"each": ["temp"] * 5}, ("each is a list of dicts",)),
        ({"batch_size": 0}, ("batch_size", "at least 1")),
        ({"max_tokens": 10**6}, ("exceeds the limit",)),
    ],
)  # fmt: skip
def test_what_works_with_one_text_only_is_refused_at_once(decoder, options, words):
    with pytest.raises(DFlashError) as error:
        decoder.stream_batch(PROMPTS, **options)
    refused(error, *words)


@pytest.mark.parametrize(("prompts", "kind"), [("a", "str"), (iter("ab"), "iterator"), (None, "NoneType")])
def test_prompts_that_are_no_list_are_refused(decoder, prompts, kind):
    with pytest.raises(DFlashError, match=f"list of prompts, got .*{kind}"):
        decoder.batch_generate(prompts)


class Told(Fixed):
    def __init__(self, length):
        super().__init__(length)
        self.begun, self.rows = 0, []

    def begin(self):
        self.begun += 1

    def observe(self, block):
        self.rows.append(block.rows)


@pytest.mark.parametrize("length", [0, 2])
def test_a_policy_is_told_of_every_step_and_how_many_rows_it_had(decoder, length):
    policy = Told(length)
    each = [{"max_tokens": limit} for limit in (2, 5, 9, 14, 20)]
    decoder.batch_generate(PROMPTS, each=each, policy=policy)
    assert policy.begun == 1
    assert sorted({*policy.rows}, reverse=True) == [5, 4, 3, 2, 1] == sorted({*policy.rows}, key=policy.rows.index)


def test_steps_of_few_rows_run_with_the_decoders_threads(decoder, monkeypatch):
    used, forward = [], LoadedTargetModel.forward_rows

    @contextmanager
    def in_use():
        inside.append(True)
        yield
        inside.pop()

    def noted(self, tokens, *given):
        used.append((len(tokens) <= FEW_ROWS, bool(inside)))
        return forward(self, tokens, *given)

    inside: list[bool] = []
    monkeypatch.setattr(decoder.threads, "in_use", in_use)
    monkeypatch.setattr(LoadedTargetModel, "forward_rows", noted)
    decoder.batch_generate(PROMPTS[:2] * 3, policy="full", each=[{"max_tokens": 4 + 4 * i} for i in range(6)])
    assert {(True, True), (False, False)} == set(used)


def test_nothing_comes_after_a_stop_string(decoder, texts):
    *ends, last = (response for _, response in decoder.stream_batch(PROMPTS[1:2], stop_strings=[texts[1][6:8]]))
    assert [response.finish_reason for response in ends] == [None] * len(ends)
    assert last.finish_reason == "stop"


class Trouble(Exception):
    pass


def failing(after: int, error: type[BaseException]):
    calls = count()

    def process(tokens, logits):
        if next(calls) >= after:
            raise error("here")
        return logits

    return process


def failing_sampler(after: int):
    process = failing(after, Trouble)
    return lambda logprobs: mx.argmax(process(None, logprobs), axis=-1)


@pytest.mark.parametrize("policy", ["full", 0])
@pytest.mark.parametrize(
    ("after", "failure"),
    [
        (0, lambda: {"logits_processors": [failing(0, Trouble)]}),
        (7, lambda: {"logits_processors": [failing(7, Trouble)]}),
        (7, lambda: {"sampler": failing_sampler(7)}),
        (0, lambda: {"sampler": lambda logprobs: mx.zeros(2, mx.int32)}),
        (0, lambda: {"sampler": lambda logprobs: mx.full(len(logprobs), -1, mx.int32)}),
        (0, lambda: {"sampler": lambda logprobs: mx.full(len(logprobs), TEXT_VOCAB, mx.int32)}),
        (0, lambda: {"logits_processors": [lambda tokens, logits: None]}),
    ],
    ids=["first token", "processor", "sampler", "two tokens", "a negative id", "an id too large", "no answer"],
)
def test_a_row_that_fails_ends_alone(decoder, texts, failure, after, policy):
    each, tokens = [{}, failure(), {}, {}, {}], []
    written, ends = [""] * len(PROMPTS), [None] * len(PROMPTS)
    for number, response in decoder.stream_batch(PROMPTS, batch_size=3, each=each, policy=policy):
        assert ends[number] is None
        assert (response.error is None) == (response.finish_reason != "error")
        written[number], ends[number] = written[number] + response.text, response.finish_reason
        tokens += response.tokens if number == 1 else []
    assert [number for number, end in enumerate(ends) if end in (None, "error")] == [1]
    assert written[:1] + written[2:] == texts[:1] + texts[2:]
    assert tokens == [token for r in decoder.stream_generate(PROMPTS[1]) for token in r.tokens][: len(tokens)]
    assert (len(tokens) == after) if policy == 0 else (len(tokens) <= after)


def test_an_error_behind_the_last_token_is_none(decoder, texts):
    each = [{"max_tokens": 4, "logits_processors": [failing(4, Trouble)]}, {}]
    written = decoder.batch_generate(PROMPTS[:2], each=each, policy=0)
    assert written == [decoder.generate(PROMPTS[0], max_tokens=4), texts[1]]


@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt])
@pytest.mark.parametrize("after", [0, 20])
def test_after_an_error_the_decoder_is_as_it_was(decoder, texts, error, after):
    """Of the row that :meth:`batch_generate` raises, and of the keyboard."""
    each = [{}, {"logits_processors": [failing(after, error)]}, {}, {}, {}]
    with pytest.raises(error, match="here"):
        decoder.batch_generate(PROMPTS, each=each)
    assert decoder.batch_generate(PROMPTS[:2]) == texts[:2]
    assert decoder.generate(PROMPTS[2]) == texts[2]


@pytest.mark.parametrize("policy", ["full", 0])
def test_a_caller_may_stop_anywhere(decoder, texts, policy):
    for steps in (1, 4, 9):
        responses = decoder.stream_batch(PROMPTS, policy=policy)
        for _ in range(steps):
            next(responses)
        responses.close()
    assert decoder.batch_generate(PROMPTS, policy=policy) == texts


OF_ONE_TEXT = {
    "NgramDrafter": NgramDrafter,
    "AutoregressiveDrafter": lambda: AutoregressiveDrafter(
        LoadedTargetModel(llama_model(0, TEXT_VOCAB, window=6), wrapped_tokenizer())
    ),
    "CombinedDrafter": lambda: CombinedDrafter(random_drafter(1, TEXT_VOCAB)),
}


@pytest.mark.parametrize("name", OF_ONE_TEXT)
def test_a_drafter_for_one_text_is_asked_for_each_and_that_is_said(name, texts, caplog):
    model, drafter = qwen3_model(3, TEXT_VOCAB), OF_ONE_TEXT[name]()
    decoder = DFlashSpeculativeDecoder(model, drafter, wrapped_tokenizer(), max_tokens=24)
    with caplog.at_level(logging.INFO, "dflash"):
        assert decoder.batch_generate(PROMPTS, batch_size=3, policy="full") == texts
    assert f"{name} drafts for one text after another" in caplog.text


def test_a_policy_is_told_what_was_proposed_where_that_is_less_than_it_asked_for(decoder):
    class Short(Script):
        def propose(self, anchor, length, cache):
            return Proposal(mx.zeros((1, 2 * (cache.offset % 2)), mx.int32))

    told, policy = set(), Fixed(5)
    policy.observe = lambda block: told.add((block.drafted, block.verified))
    drafter = Short([], [], TEXT_VOCAB)
    decoder = DFlashSpeculativeDecoder(decoder.target_model, drafter, wrapped_tokenizer(), max_tokens=24)
    decoder.batch_generate(PROMPTS[:1], policy=policy)
    assert told - {(1, 1)} == {(0, 0), (2, 2)}  # one draft is all that the last token has room for


@pytest.mark.parametrize("wrong", [-1, 9999])
def test_ids_outside_the_vocabulary_are_refused_as_alone(wrong):
    class Wrong(Script):
        def propose(self, anchor, length, cache):
            return Proposal(mx.array([[1, wrong, 1]]))

    decoder = DFlashSpeculativeDecoder(qwen3_model(3, TEXT_VOCAB), Wrong([], [], TEXT_VOCAB), wrapped_tokenizer())
    for decode in (decoder.generate, decoder.batch_generate):
        with pytest.raises(DFlashError, match=f"Wrong proposed the token id {wrong}"):
            decode("a" if decode == decoder.generate else PROMPTS, policy="full")


@pytest.mark.parametrize("policy", ["full", 0])
@pytest.mark.parametrize("rows", [[2], range(len(PROMPTS))], ids=["one row", "all"])
def test_logits_that_stop_being_numbers_are_told_of(monkeypatch, policy, rows):
    options = {"policy": policy, "stop_token_ids": []}
    model = qwen3_model(3, TEXT_VOCAB)
    decoder = DFlashSpeculativeDecoder(model, random_drafter(1, TEXT_VOCAB), wrapped_tokenizer(), max_tokens=24)
    texts = decoder.batch_generate(PROMPTS, **options)
    head, broken = LoadedTargetModel.head, mx.array([row in rows for row in range(len(PROMPTS))])[:, None, None]
    monkeypatch.setattr(
        LoadedTargetModel, "head", lambda self, h: head(self, mx.where(broken, mx.nan, h) if len(h) == 5 else h)
    )
    with pytest.raises(DFlashError, match="logits are not a number"):
        decoder.batch_generate(PROMPTS, **options)
    ends, written = {}, [""] * len(PROMPTS)
    for number, response in decoder.stream_batch(PROMPTS, **options):
        ends[number], written[number] = response.finish_reason, written[number] + response.text
    assert [number for number in sorted(ends) if ends[number] == "error"] == list(rows)
    assert [written[n] for n in ends if n not in rows] == [texts[n] for n in ends if n not in rows]


class Sampler:
    """A sampler without a hash."""

    __hash__ = None

    def __call__(self, logprobs):
        assert logprobs.shape[0] == 1
        return mx.argsort(logprobs, axis=-1)[:, -2]


def test_a_sampler_of_ones_own_gets_one_position_at_a_time(decoder):
    expected = [decoder.generate(prompt, sampler=Sampler()) for prompt in PROMPTS]
    assert decoder.batch_generate(PROMPTS, sampler=Sampler()) == expected
    best = lambda logprobs: mx.argmax(logprobs, -1).astype(mx.float32)  # noqa: E731 (ids of another type)
    assert decoder.batch_generate(PROMPTS, sampler=best, policy=0) == [decoder.generate(p) for p in PROMPTS]


def test_rows_that_draw_alike_are_drawn_in_one_call(decoder, monkeypatch):
    """mlx-lm asks whether their samplers are the same object."""
    draw, calls = DrawingSampler.__call__, []

    def counted(self, logprobs):
        calls.append(len(logprobs))
        return draw(self, logprobs)

    monkeypatch.setattr(DrawingSampler, "__call__", counted)
    decoder.batch_generate(PROMPTS, temperature=0.7, policy=0, stop_token_ids=[])
    assert {*calls} == {len(PROMPTS)}


# --- the default policy: costs of so many rows decide ------------------------------------------------------


@pytest.mark.parametrize(("cost_of_a_token", "pays"), [(0.001, True), (0.3, False)], ids=["memory bound", "busy"])
def test_where_no_length_pays_for_so_many_rows_the_steps_are_mlx_lms_own(monkeypatch, cost_of_a_token, pays):
    target, drafter = LoadedTargetModel(qwen3_model(3, TEXT_VOCAB), wrapped_tokenizer()), Script([], [], TEXT_VOCAB)
    decoder = DFlashSpeculativeDecoder(target, drafter, max_tokens=48)
    prompts = [target.build_prompt(prompt) for prompt in PROMPTS]
    drafter.texts = [decoder.spec_generate(prompt, policy=0, stop_token_ids=[]).tolist()[0] for prompt in prompts]
    drafter.chances = [0.3] * len(prompts)
    now, passes = [0.0], []

    def timed(forward):
        def pass_(self, tokens, *rest):
            passes.append(tokens.shape)
            now[0] += 1 + cost_of_a_token * tokens.size
            return forward(self, tokens, *rest)

        return pass_

    decoder.clock = lambda: now[0]
    for name in ("forward_rows", "forward_hidden"):
        monkeypatch.setattr(LoadedTargetModel, name, timed(getattr(LoadedTargetModel, name)))
    for number, response in decoder.stream_batch(PROMPTS, stop_token_ids=[]):
        prompts[number] += response.tokens
    assert prompts == drafter.texts
    steps = [length for rows, length in passes[20:] if rows == len(PROMPTS)]
    assert (sum(length > 1 for length in steps) > len(steps) / 2) == pays


def test_rows_that_come_and_go_keep_no_one_from_drafting():
    policy, plain = Adaptive(), 0
    for step in range(600):
        rows = 5 if step % 12 < 2 else 4  # too few steps to know what so many rows cost
        length = 0 if policy.sleep() else policy.verify_length(Drafts(policy.draft_length(7)))
        plain += not length and rows == 4
        right = dict.fromkeys(range(length), 0.8)
        block = BlockRecord(length, length, length, 0, None, 1 + 0.05 * length, outcomes=right, rows=rows)
        policy.observe(block if length else BlockRecord(0, 0, 0, 0, None, 1.0, asleep=True, rows=rows))
    assert plain < 75  # one after each, and those that are timed


def test_a_plain_step_is_timed_whole_where_the_next_part_of_a_prompt_follows(decoder, monkeypatch):
    events, evaluate, forward = [], mx.eval, LoadedTargetModel.forward_hidden
    model = tapped(decoder, decoder._request_options({"policy": 0}))
    generator = SpeculativeGenerator(model, 2, step_size=4)

    def noted(self, tokens, *given):
        events.append("part" if tokens.shape[1] > 1 else "step")
        return forward(self, tokens, *given)

    def waits(*arrays):
        if arrays[0] is generator._generation_batch._next_tokens:
            events.append("waits")
        return evaluate(*arrays)

    monkeypatch.setattr(LoadedTargetModel, "forward_hidden", noted)
    monkeypatch.setattr(mx, "eval", waits)
    generator.insert([[1, 2], list(range(1, 18))], [30, 2])
    while generator.next_generated():
        pass
    told = " ".join(events)
    assert told.count("step waits part") == 2
    assert "step part" not in told
    assert told.endswith(" step" * 20)  # without prompts none waits


# --- the bundled pair ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "widths", "policies"),
    [
        (3, (2,), ("full",)),
        pytest.param(None, (1, 2, 4, 8, 16), ("full", "adaptive"), marks=pytest.mark.slow),
    ],
    ids=["few", "all"],
)
def test_the_bundled_pairs_texts_are_the_same_at_every_width(count, widths, policies):
    decoder = DFlashSpeculativeDecoder.from_pretrained(max_tokens=24 if count else 96)
    prompts = [conversation.messages for conversation in read_conversations(HELDOUT)][:count]
    expected = [decoder.generate(prompt, policy="full") for prompt in prompts]
    for width, policy in product(widths, policies):
        assert decoder.batch_generate(prompts, batch_size=width, policy=policy) == expected, (width, policy)
