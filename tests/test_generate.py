"""``DFlashSpeculativeDecoder`` as its users meet it: text, streams, limits, errors and names.

Most targets here are scripted (``models.writer``): they write a known text whatever they read, so that what
should appear is known; the drafter is right as often as a test says.
"""

import json
from collections.abc import Iterator

import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.errors import refused
from support.models import (
    TEXT_VOCAB,
    ScriptedDrafter,
    byte_tokenizer,
    plain_greedy,
    qwen3_model,
    random_drafter,
    target,
    wrapped_tokenizer,
    writer,
)

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel
from dflash.core.errors import GenerationError, IncompatibleModelsError
from dflash.generate import PAIR

PROMPT = [65, 66]
TEXT = "naïve 日本 😀👩‍👩‍👧 text: stop here, and there"
EMOJI = "😀é日👩‍👩‍👧" * 4


def token_decoder(**options) -> tuple[DFlashSpeculativeDecoder, list[int], list[int]]:
    """Without tokenizer: a random LLaMA, its plain greedy text, a drafter that is right three times in four."""
    prompt = [3, 1, 4]
    expected, _ = plain_greedy(target("llama", 2).model, prompt, 40)
    drafter = ScriptedDrafter(prompt + expected, 32, 0.75)
    return DFlashSpeculativeDecoder(target("llama", 2).model, drafter, **options), prompt, expected


# --- text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fast", "p", "text"), [(True, 0.0, TEXT), (False, 0.5, TEXT), (True, 0.9, EMOJI), (False, 1.0, EMOJI)]
)
def test_generate_is_a_string_and_streams_the_same_string_in_whole_characters(fast, p, text):
    whole = writer(text, p=p, fast=fast).generate(PROMPT, max_tokens=300)
    assert type(whole) is str
    assert whole == text
    pieces = writer(text, p=p, fast=fast).generate(PROMPT, max_tokens=300, stream=True)
    assert isinstance(pieces, Iterator)
    pieces = list(pieces)
    assert len(pieces) > 1
    assert "".join(pieces) == text
    assert all(type(piece) is str and piece and "\ufffd" not in piece for piece in pieces)


@settings(max_examples=40)
@given(
    stops=st.lists(st.sampled_from(["stop", "stop here", "p h", "日", "😀", " te", "zzz", "e, and th"]), max_size=3),
    p=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    block_size=st.integers(1, 16),
)
def test_stop_strings_cut_the_text_and_are_never_shown(stops, p, block_size):
    expected = TEXT[: min([TEXT.find(s) for s in stops if s in TEXT], default=len(TEXT))]
    decoder = writer(TEXT, p=p, block_size=block_size)
    responses = list(decoder.stream_generate(PROMPT, 200, stop_strings=stops))
    assert "".join(r.text for r in responses) == expected
    assert [r.finish_reason for r in responses] == [None] * (len(responses) - 1) + ["stop"]


def test_the_stop_token_is_counted_and_not_shown():
    responses = list(writer("done", p=1.0, policy="full").stream_generate(PROMPT, 50))
    assert "".join(r.text for r in responses) == "done"
    assert [t for r in responses for t in r.tokens] == [*byte_tokenizer().encode("done"), byte_tokenizer().eos_token_id]
    assert responses[-1].finish_reason == "stop"


# --- the bundled models -----------------------------------------------------------------------------------


def test_the_bundled_models_write_what_plain_mlx_lm_writes_in_fewer_passes():
    bundled, passes, committed = DFlashSpeculativeDecoder.from_pretrained(), 0, 0
    lines = (PAIR / "heldout.jsonl").read_text().splitlines()
    for prompt in (json.loads(line)["prompt"] for line in lines[:: len(lines) // 2][:2]):
        tokens = bundled.loaded_target.build_prompt(prompt)
        plain = list(mlx_lm.stream_generate(bundled.target_model, bundled.tokenizer, tokens, max_tokens=48))
        ours = list(bundled.stream_generate(prompt, max_tokens=48))
        assert [t for r in ours for t in r.tokens] == [r.token for r in plain]
        assert "".join(r.text for r in ours) == "".join(r.text for r in plain)
        assert ours[-1].finish_reason == plain[-1].finish_reason
        passes += len(ours) - 1
        committed += len(plain) - 1
    assert committed / passes > 4, "the acceptance length of these models is 6 to 7"


# --- responses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "accepted", "committed"), [(1.0, [15, 15, 7], [16, 16, 7]), (0.0, [0] * 39, [1] * 39)])
def test_responses_account_for_every_token(p, accepted, committed):
    responses = list(writer("x" * 39, p=p, policy="full").stream_generate(PROMPT, 60))
    assert [r.accepted for r in responses] == [0, *accepted]
    assert [len(r.tokens) for r in responses] == [1, *committed]
    assert responses[0].drafted == []
    total = 0
    for response in responses:
        total += len(response.tokens)
        assert response.generation_tokens == total
        drafts = min(response.accepted, len(response.tokens))
        assert response.tokens[:drafts] == response.drafted[:drafts]
        assert response.prompt_tokens == 2
        assert response.prompt_tps > 0
        assert (response.generation_tps > 0) == (total > 1), "one token has no speed"
        assert response.peak_memory > 0
    assert total == 40


@pytest.mark.parametrize(
    ("p", "stop", "end"),
    [(0.7, "stop", "stop"), (0.0, "here,", "he"), (1.0, "here,", "he"), (0.7, "e, and th", "e"), (1.0, "日本", "日")],
)
def test_tokens_end_with_the_one_in_which_the_stop_string_begins(p, stop, end):
    """However far the block that completes it went on, and whether an earlier block began it."""
    begin = TEXT.index(stop)
    expected = byte_tokenizer().encode(TEXT[:begin]) + byte_tokenizer().encode(end)[: None if end == "日" else 1]
    responses = list(writer(TEXT, p=p).stream_generate(PROMPT, 200, stop_strings=[stop]))
    assert [t for r in responses for t in r.tokens] == expected
    assert responses[-1].generation_tokens == len(expected)
    assert "".join(r.text for r in responses) == TEXT[:begin]


# --- spec_generate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [lambda p: mx.array([p]), lambda p: mx.array(p), lambda p: p])
def test_spec_generate_gives_prompt_and_continuation(form):
    decoder, prompt, expected = token_decoder()
    steps: list[list[int]] = []
    ids = decoder.spec_generate(form(prompt), 40, stream_callback=steps.append)
    assert ids.shape == (1, 43)
    assert ids.tolist() == [prompt + expected]
    assert [t for step in steps for t in step] == expected
    assert len(steps[0]) == 1
    assert any(len(step) > 2 for step in steps)


def test_spec_generate_ends_with_a_stop_token_the_tokenizers_unless_told_otherwise():
    decoder, prompt, expected = token_decoder(policy="full")
    stop = expected[20]
    ids = decoder.spec_generate(mx.array([prompt]), 40, stop_token_ids=[stop])
    assert ids.tolist() == [prompt + expected[: expected.index(stop) + 1]]
    decoder = writer("ab")
    ids = decoder.spec_generate(mx.array([PROMPT]), 30)
    assert (ids[0, -1].item(), ids.size < 10) == (byte_tokenizer().eos_token_id, True)
    assert decoder.spec_generate(mx.array([PROMPT]), 30, stop_token_ids=[]).size == 32


# --- limits and errors --------------------------------------------------------------------------------------


def test_the_longest_request_that_fits_is_served_and_the_shortest():
    decoder, prompt, expected = token_decoder(max_seq_length=43)
    assert decoder.spec_generate(prompt, 40).tolist() == [prompt + expected]
    assert decoder.spec_generate(prompt, 0).tolist() == [prompt]
    assert list(writer("abc").stream_generate(PROMPT, 0)) == []
    own, _, _ = token_decoder(max_seq_length=8192)
    assert own.max_seq_length == 512
    for limited, count, words in ((decoder, 41, ["43 tokens"]), (own, 510, ["3 tokens", "510", "512 tokens"])):
        with pytest.raises(GenerationError) as error:
            limited.spec_generate(prompt, count)
        refused(error, *words)


def test_a_mistaken_option_fails_before_anything_is_loaded():
    with pytest.raises(GenerationError, match="did you mean 'temperature'"):
        DFlashSpeculativeDecoder.from_pretrained("no/such/folder", "none", temprature=1.0)


def test_without_a_tokenizer_text_is_refused():
    decoder, prompt, _ = token_decoder()
    assert decoder.tokenizer is None
    for request in ("text", prompt):
        with pytest.raises(GenerationError) as error:
            decoder.generate(request)
        refused(error, "tokenizer", "spec_generate")


@pytest.mark.parametrize("options", [{"block_size": 0}, {"block_size": -1}, {"max_seq_length": 0}, {"block_size": 2.0}])
def test_impossible_sizes_are_refused(options):
    with pytest.raises(GenerationError) as error:
        token_decoder(**options)
    refused(error, *options)


def test_the_block_size_is_at_most_the_drafters_own_for_which_the_target_must_have_room(caplog):
    model = target("llama", 2).model
    drafter = ScriptedDrafter([], 32, block_size=5)
    assert DFlashSpeculativeDecoder(model, drafter).block_size == 5
    assert not caplog.records
    assert DFlashSpeculativeDecoder(model, drafter, block_size=100_000).block_size == 5
    assert "block_size 100000 is more than the drafter's own 5" in caplog.text
    for size, words in ((100_000, ["block_size 100000", "512 positions"]), (0, ["at least 1, got 0"])):
        with pytest.raises(IncompatibleModelsError) as error:
            DFlashSpeculativeDecoder(model, ScriptedDrafter([], 32, block_size=size))
        refused(error, *words)


def test_a_target_whose_cache_cannot_be_rewound_and_a_drafter_of_another_target_are_refused():
    model = qwen3_model(0)
    model.make_cache = lambda: [BatchKVCache([0]) for _ in model.layers]
    for refusing, drafter, words in (
        (model, ScriptedDrafter([], 32), ["Layer 0", "BatchKVCache"]),
        (qwen3_model(0), random_drafter(0, vocab=40), ["vocab_size 40", "32"]),
    ):
        with pytest.raises(IncompatibleModelsError) as error:
            DFlashSpeculativeDecoder(refusing, drafter)
        refused(error, *words)


# --- names and parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, wrapped_tokenizer])
def test_a_decoder_has_its_parts_under_the_prototypes_names(tokenizer):
    """From a target with or without a tokenizer of its own; a tokenizer is wrapped once however it comes."""
    model, drafter = qwen3_model(0, TEXT_VOCAB), random_drafter(0, TEXT_VOCAB)
    loaded, other = LoadedTargetModel(model, tokenizer()), wrapped_tokenizer(fast=False)
    given = DFlashSpeculativeDecoder(model, drafter, tokenizer(), block_size=4, max_seq_length=300)
    kept, replaced = DFlashSpeculativeDecoder(loaded, drafter), DFlashSpeculativeDecoder(loaded, drafter, other)
    assert (given.block_size, given.max_seq_length, given.draft_model) == (4, 300, drafter)
    expected = byte_tokenizer().decode(plain_greedy(model, PROMPT, 3)[0])
    for decoder in (given, kept):
        assert decoder.target_model is decoder.loaded_target.model is model
        assert type(decoder.tokenizer) is TokenizerWrapper
        assert decoder.generate(PROMPT, 3) == expected
    assert kept.tokenizer is loaded.tokenizer is not other
    assert kept.loaded_target.adapter is loaded.adapter
    assert replaced.tokenizer is other
