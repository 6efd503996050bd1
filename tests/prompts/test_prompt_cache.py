"""A prompt that was read before changes no token, with every kind of cache, in memory and from a file."""

import copy
import logging
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from support.models import (
    ScriptedDrafter,
    bound_drafter,
    plain_greedy,
    qwen3_model,
    random_drafter,
    target,
    wrapped_tokenizer,
)

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel, Policy
from dflash.adapters.conformance import small_models as small
from dflash.core.errors import DFlashError, GenerationError, IncompatibleModelsError
from dflash.drafters.combined import CombinedDrafter

NEAR_TIE = 2e-4
FIRST, SECOND, THIRD = [3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5], [8, 9, 7, 9, 3]
NO_STOP = {"stop_token_ids": []}
QUANTISED = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
KINDS = {
    "KVCache": (lambda: small.build("qwen3"), {}),
    "QuantizedKVCache": (lambda: small.build("qwen3", seed=3, head_dim=32), QUANTISED),
    "RotatingKVCache": (lambda: small.build("llama"), {}),
    "KeptWindowCache": (lambda: small.build("qwen3", seed=3), {"max_kv_size": 13}),
    "ChunkedKVCache": (lambda: small.build("llama4"), {}),
    "ArraysCache": (lambda: small.build("qwen3_5", seed=5), {}),
    "CacheList(KVCache, KVCache)": (lambda: small.build("deepseek_v32"), {}),
    "CacheList(ArraysCache, KVCache)": (lambda: small.build("falcon_h1"), {}),
}
WITHOUT_A_WAY_BACK = {"RotatingKVCache", "KeptWindowCache", "ArraysCache", "CacheList(ArraysCache, KVCache)"}


@cache
def loaded(kind: str) -> LoadedTargetModel:
    return LoadedTargetModel(KINDS[kind][0]())


@pytest.fixture(autouse=True)
def recurrent_layers_start_alike() -> None:
    """Some of mlx-lm's recurrent layers begin with numbers of their own from the global random state."""
    mx.random.seed(0)


def with_tokenizer(kind: str, **options) -> DFlashSpeculativeDecoder:
    loaded = LoadedTargetModel(target(kind, 3).model, wrapped_tokenizer())
    return DFlashSpeculativeDecoder(loaded, bound_drafter(kind, 3), **options)


def read_by(decoder) -> list[int]:
    """How many tokens each prompt pass of ``decoder`` reads from now on."""
    lengths, forward = [], decoder.loaded_target.forward_hidden
    decoder.loaded_target.forward_hidden = lambda tokens, *rest: (
        lengths.append(tokens.shape[1]) or forward(tokens, *rest)
    )
    return lengths


def continued_plainly(model, pieces, count, **options) -> list[int]:
    """Plain mlx-lm over the same pieces with one cache, as its users do: its own answer is fed with the next piece."""
    cache, text, fed = make_prompt_cache(model, options.pop("max_kv_size", None)), [], 0
    for piece in pieces:
        text += piece
        answer = generate_step(mx.array(text[fed:]), model, max_tokens=count, prompt_cache=cache, **options)
        for token, logprobs in answer:
            best = mx.sort(logprobs)[-2:].tolist()
            assert best[1] - best[0] > NEAR_TIE
            text.append(int(token))
        fed = len(text)  # its last pass was that of the last token
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_turns_of_a_conversation_continue_each_other_in_memory_and_from_a_file(kind, tmp_path, caplog):
    options = KINDS[kind][1]
    expected = continued_plainly(loaded(kind).model, [FIRST, SECOND, THIRD], 12, **options)
    decoder = DFlashSpeculativeDecoder(loaded(kind), ScriptedDrafter(expected, 64, 0.8), **options)
    cache, text = decoder.make_prompt_cache(), []
    if kind == "KeptWindowCache":  # mlx-lm masks what is read in one pass otherwise, and we read the last token later
        expected = []
        for piece in (FIRST, SECOND, THIRD):
            expected = decoder.spec_generate(expected + piece, 12, prompt_cache=cache, **NO_STOP)[0].tolist()
        cache = decoder.make_prompt_cache()
    read = read_by(decoder)
    with caplog.at_level(logging.WARNING):
        for piece in (FIRST, SECOND, THIRD):
            text = decoder.spec_generate(text + piece, 12, prompt_cache=cache, **NO_STOP)[0].tolist()
            assert text == expected[: len(text)]
            assert len(text) - len(cache.tokens) in (0, 1)
            cache.save(tmp_path / "cache.safetensors")
            cache = decoder.load_prompt_cache(tmp_path / "cache.safetensors")
    assert "anew" not in caplog.text
    # With the last token of each answer, and the pass that tries each file.
    assert sum(read) <= len(FIRST) + len(SECOND) + len(THIRD) + 2 + 3, "what was held was read again"
    assert text == expected


@pytest.mark.parametrize("kind", ["qwen3", "llama", "sliding"])
def test_the_drafters_context_is_continued_too(kind, tmp_path):
    """Drafts are the same as those of a request without a cache."""
    decoder = with_tokenizer(kind, policy="full")
    cache = decoder.make_prompt_cache()
    answer = decoder.spec_generate(FIRST * 3, 16, prompt_cache=cache, **NO_STOP)[0].tolist()
    assert answer == decoder.spec_generate(FIRST * 3, 16, **NO_STOP)[0].tolist()
    cache.save(tmp_path / "cache.safetensors")
    assert cache.draft_cache.offset == cache.target_cache.offset == len(cache.tokens)

    def drafts(**options) -> list[list[int]]:
        return [step.drafted for step in decoder.stream_generate(answer + SECOND, 16, **NO_STOP, **options)]

    loaded = decoder.load_prompt_cache(tmp_path / "cache.safetensors")
    decoder.spec_generate(answer + THIRD, 16, prompt_cache=copy.deepcopy(cache), **NO_STOP)  # changes only the copy
    assert drafts(prompt_cache=cache) == drafts(prompt_cache=loaded) == (expected := drafts())
    assert len(expected) > 2


@pytest.mark.parametrize("kind", ["KVCache", "RotatingKVCache", "ArraysCache", "CacheList(ArraysCache, KVCache)"])
def test_an_answer_that_stops_in_a_block_is_continued_from_its_stop_token(kind, caplog):
    model = loaded(kind).model
    text, lead = plain_greedy(model, FIRST, 40)
    assert lead > NEAR_TIE
    stop = next(t for i, t in enumerate(text) if i > 6 and t not in text[:i])
    turn = [*FIRST, *text[: text.index(stop) + 1]]
    expected, _ = plain_greedy(model, turn + SECOND, 20)
    decoder = DFlashSpeculativeDecoder(loaded(kind), ScriptedDrafter(FIRST + text, 64, 1.0))
    cache = decoder.make_prompt_cache()
    with caplog.at_level(logging.WARNING):
        first = decoder.spec_generate(FIRST, 40, stop_token_ids=[stop], prompt_cache=cache)[0].tolist()
        assert first == turn
        assert cache.tokens == turn[: len(cache.tokens)]
        read = read_by(decoder)
        again = decoder.spec_generate(turn + SECOND, 20, prompt_cache=cache, **NO_STOP)[0].tolist()
    assert again == turn + SECOND + expected
    assert sum(read) <= len(SECOND) + 1
    assert caplog.text == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_goes_another_way_goes_back_or_is_read_anew(kind, caplog):
    drafter, options = ScriptedDrafter(FIRST, 64, 0.5), KINDS[kind][1]
    decoder = DFlashSpeculativeDecoder(loaded(kind), drafter, policy="full", **options)
    cache, other = decoder.make_prompt_cache(), [*FIRST[:5], 7, 7]
    decoder.spec_generate(FIRST, 16, prompt_cache=cache, **NO_STOP)
    read = read_by(decoder)
    with caplog.at_level(logging.WARNING):
        again = decoder.spec_generate(other, 16, prompt_cache=cache, **NO_STOP)[0].tolist()
    goes_back = kind in ("KVCache", "QuantizedKVCache", "CacheList(KVCache, KVCache)")
    assert sum(read) == len(other) - (5 if goes_back else 0)
    assert ("anew" in caplog.text) is not goes_back
    assert again == decoder.spec_generate(other, 16, **NO_STOP)[0].tolist()
    once_more = decoder.spec_generate(other, 16, prompt_cache=cache, **NO_STOP)[0].tolist()  # the very same prompt
    assert once_more == again


class Pausing(Policy):
    """Three plain steps, a block, three plain steps ..."""

    def begin(self) -> None:
        self.left = 3

    def sleep(self) -> int:
        return self.left

    def observe(self, block) -> None:
        self.left = self.left - 1 if block.asleep else 3


@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_a_request_that_ends_in_a_pause_leaves_both_caches_with_the_same_tokens(count):
    """The drafter gets the features of the plain steps, also where the caller has stopped."""
    decoder = with_tokenizer("llama")
    text = decoder.spec_generate(FIRST, 20, **NO_STOP)[0].tolist()
    cache = decoder.make_prompt_cache()
    steps = decoder.stream_generate(FIRST, prompt_cache=cache, policy=Pausing(), **NO_STOP)
    seen = [token for _, step in zip(range(count), steps, strict=False) for token in step.tokens]
    steps.close()
    assert seen == text[len(FIRST) :][: len(seen)]
    assert cache.draft_cache.offset == cache.target_cache.offset == len(cache.tokens)
    assert cache.tokens == text[: len(cache.tokens)]
    fresh = decoder.make_prompt_cache()
    decoder.cache_prompt(cache.tokens, fresh)
    for ours, theirs in zip(cache.draft_cache.state, fresh.draft_cache.state, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


# --- mlx-lm's own files -----------------------------------------------------------------------------------


def read_by_mlx_lm(model, prompt, file) -> list:
    cache = make_prompt_cache(model)
    list(generate_step(mx.array(prompt), model, max_tokens=0, prompt_cache=cache))
    save_prompt_cache(str(file), cache, {"model": "m", "tokenizer_config": "{}"})
    return cache


@pytest.mark.parametrize("kind", ["qwen3", "llama", "sliding"])
def test_a_file_of_mlx_lms_is_continued_by_a_drafter_that_sees_what_follows(kind, tmp_path, caplog):
    model, file = target(kind, 3).model, tmp_path / "theirs.safetensors"
    read_by_mlx_lm(model, FIRST * 2, file)
    expected = [
        t for t, _ in generate_step(mx.array(SECOND), model, max_tokens=30, prompt_cache=load_prompt_cache(file))
    ]
    decoder = DFlashSpeculativeDecoder(target(kind, 3), bound_drafter(kind, 3), policy="full")
    with caplog.at_level(logging.WARNING):
        cache = decoder.load_prompt_cache(file)
    assert "no context of this drafter" in caplog.text
    assert cache.tokens == [0] * 14
    assert (cache.draft_cache.offset, [layer.held for layer in cache.draft_cache.layers]) == (14, [0, 0])
    ours = decoder.spec_generate([*cache.tokens, *SECOND], 30, prompt_cache=cache, **NO_STOP)[0].tolist()
    assert ours[14 + len(SECOND) :] == expected


def test_processors_do_not_see_the_tokens_that_a_file_of_mlx_lms_does_not_store(tmp_path):
    decoder, file = DFlashSpeculativeDecoder(target("qwen3", 3), bound_drafter("qwen3", 3)), tmp_path / "c.safetensors"
    penalties = {"repetition_penalty": 3.0, "presence_penalty": 2.0}
    read_by_mlx_lm(decoder.target_model, FIRST * 2, file)
    given, theirs = [*([0] * 14), *SECOND], load_prompt_cache(str(file))
    answer = generate_step(
        mx.array(SECOND),
        decoder.target_model,
        max_tokens=12,
        prompt_cache=theirs,
        logits_processors=make_logits_processors(**penalties),
    )
    expected = [token for token, _ in answer]
    for _ in range(2):
        cache = decoder.load_prompt_cache(file)
        assert cache.unknown == 14
        cache.save(file)  # where they are not known either
        for policy in ("full", 0):
            ours = decoder.spec_generate(
                given, 12, prompt_cache=copy.deepcopy(cache), policy=policy, **penalties, **NO_STOP
            )
            assert ours[0].tolist()[len(given) :] == expected


def test_a_request_that_is_left_open_does_not_spoil_the_cache_of_the_next():
    decoder = with_tokenizer("qwen3", policy=0)
    cache = decoder.make_prompt_cache()
    for close in (True, False):
        left = decoder.stream_generate(FIRST, max_tokens=9, prompt_cache=cache, **NO_STOP)
        next(left)
        decoder.spec_generate(SECOND, 5, prompt_cache=cache, **NO_STOP)
        _ = left.close() if close else list(left)
        for prompt in (FIRST, SECOND):
            with_it = decoder.spec_generate(prompt, 9, prompt_cache=cache, **NO_STOP)
            assert mx.array_equal(with_it, decoder.spec_generate(prompt, 9, **NO_STOP))


def test_the_context_of_a_drafter_that_also_copies_goes_back_with_the_target():
    decoder = DFlashSpeculativeDecoder(target("qwen3", 3), CombinedDrafter(bound_drafter("qwen3", 3)), policy="full")
    cache, text = decoder.make_prompt_cache(), decoder.spec_generate(FIRST, 12, **NO_STOP)[0].tolist()
    decoder.spec_generate(FIRST, 12, prompt_cache=cache, **NO_STOP)
    assert cache.trim(5) == 5
    assert cache.tokens == text[: len(cache.tokens)]
    assert cache.draft_cache.offset == len(cache.tokens) == len(cache.draft_cache.copies.tokens)
    assert cache.is_trimmable()
    again = decoder.spec_generate([*cache.tokens, *SECOND], 9, prompt_cache=cache, **NO_STOP)
    assert cache.reused > 5
    assert mx.array_equal(again, decoder.spec_generate([*text[: cache.reused], *SECOND], 9, **NO_STOP))


@pytest.mark.parametrize("kind", ["qwen3", "sliding"])
def test_mlx_lm_continues_a_file_of_ours(kind, tmp_path):
    decoder = DFlashSpeculativeDecoder(target(kind, 3), bound_drafter(kind, 3))
    cache, file = decoder.make_prompt_cache(), tmp_path / "ours.safetensors"
    decoder.cache_prompt(FIRST * 2, cache)
    assert cache.tokens == FIRST * 2
    cache.save(file, {"model": "m"})
    theirs, metadata = load_prompt_cache(str(file), return_metadata=True)
    assert (metadata["model"], metadata["tokenizer_config"]) == ("m", "{}")
    continued = [
        t for t, _ in generate_step(mx.array(SECOND), decoder.target_model, max_tokens=20, prompt_cache=theirs)
    ]
    assert continued == plain_greedy(decoder.target_model, FIRST * 2 + SECOND, 20)[0]


def test_a_file_with_another_drafters_context_is_used_without_it(tmp_path, caplog):
    decoder = DFlashSpeculativeDecoder(target("qwen3", 3), bound_drafter("qwen3", 3))
    cache = decoder.make_prompt_cache()
    decoder.cache_prompt(FIRST, cache)
    cache.save(tmp_path / "a.safetensors")
    other = DFlashSpeculativeDecoder(target("qwen3", 3), random_drafter(9, 32))
    with caplog.at_level(logging.WARNING):
        again = other.load_prompt_cache(tmp_path / "a.safetensors")
    assert "no context of this drafter" in caplog.text
    assert (again.tokens, again.draft_cache.offset, again.draft_cache.layers[0].held) == (FIRST, len(FIRST), 0)


def test_what_is_no_prompt_cache_of_this_model_is_one_line(tmp_path):
    decoder = DFlashSpeculativeDecoder(target("qwen3", 3), bound_drafter("qwen3", 3))
    cache, file = decoder.make_prompt_cache(), tmp_path / "c.safetensors"
    with pytest.raises(GenerationError, match="is empty"):
        cache.save(file)
    decoder.cache_prompt(FIRST, cache)
    with pytest.raises(GenerationError, match=r"is a \.safetensors file"):
        cache.save(tmp_path / "c.npz")
    with pytest.raises(GenerationError, match="512 tokens leaves no room in the limit of 512"):
        decoder.cache_prompt([1] * 512, cache)
    assert cache.tokens == FIRST, "nothing was read"
    mx.save_safetensors(str(file), {"x": mx.zeros(3)})
    for unreadable in (file, tmp_path / "none.safetensors"):
        with pytest.raises(GenerationError, match=r"is no prompt cache; expected a file of dflash"):
            decoder.load_prompt_cache(unreadable)
    cache.save(file)
    twin = DFlashSpeculativeDecoder(target("qwen3", 5), bound_drafter("qwen3", 5))  # of the same shape
    with pytest.raises(IncompatibleModelsError, match="made for another target"):
        twin.load_prompt_cache(file)
    with pytest.raises(IncompatibleModelsError, match="belongs to another decoder"):
        twin.spec_generate(FIRST, 3, prompt_cache=cache)
    with pytest.raises(DFlashError, match="prompt_cache must be"):
        decoder.spec_generate(FIRST, 3, prompt_cache=[])
    for model in (target("sliding", 3).model, qwen3_model(3, head_dim=16), qwen3_model(3, layers=5)):
        read_by_mlx_lm(model, FIRST, file)
        with pytest.raises(IncompatibleModelsError, match="made for another target"):
            decoder.load_prompt_cache(file)


def test_a_cache_that_is_quantised_otherwise_is_refused():
    decoder = DFlashSpeculativeDecoder(loaded("QuantizedKVCache"), ScriptedDrafter([], 64), **QUANTISED)
    cache = decoder.make_prompt_cache()
    text = decoder.spec_generate(FIRST, 3, prompt_cache=cache, **NO_STOP)[0].tolist()
    with pytest.raises(GenerationError, match="quantised with kv_bits 8 and kv_group_size 32, the request asks for 4"):
        decoder.spec_generate([*text, 3], 3, prompt_cache=cache, kv_bits=4)


@pytest.mark.parametrize(
    ("kind", "options"), [("QuantizedKVCache", QUANTISED), ("KeptWindowCache", {"max_kv_size": 13})]
)
def test_a_cache_keeps_what_it_was_made_with(kind, options, tmp_path):
    """Where a request says nothing of it, and where it is read from a file and begun again."""
    decoder = DFlashSpeculativeDecoder(loaded(kind), ScriptedDrafter([], 64))
    cache, file = decoder.make_prompt_cache(**options), tmp_path / "c.safetensors"
    decoder.spec_generate(FIRST * 2, 3, prompt_cache=cache, **NO_STOP)
    assert {type(own).__name__ for own in cache.target_cache} == {kind}
    cache.save(file)
    for begun_again in (cache, decoder.load_prompt_cache(file)):
        begun_again.trim(99)
        decoder.spec_generate(SECOND, 3, prompt_cache=begun_again, **NO_STOP)
        assert {type(own).__name__ for own in begun_again.target_cache} == {kind}


def test_what_one_request_asks_of_a_cache_does_not_hold_for_the_next():
    decoder = DFlashSpeculativeDecoder(loaded("QuantizedKVCache"), ScriptedDrafter([], 64))
    cache = decoder.make_prompt_cache()
    later = QUANTISED | {"quantized_kv_start": 30}
    text = decoder.spec_generate(FIRST, 3, prompt_cache=cache, **later, **NO_STOP)[0].tolist()
    decoder.spec_generate([*text, *SECOND * 6], 9, prompt_cache=cache, **NO_STOP)
    assert cache.reused > 5
    assert {type(own).__name__ for own in cache.target_cache} == {"KVCache"}


def test_a_copy_of_a_cache_whose_request_is_open_begins_anew():
    """Of a recurrent target too, whose caches do not tell how much they hold."""
    decoder = DFlashSpeculativeDecoder(LoadedTargetModel(small.build("mamba")), ScriptedDrafter([], 64))
    decoder.tokenizer = wrapped_tokenizer()
    cache = decoder.make_prompt_cache()
    left = decoder.stream_generate(FIRST, max_tokens=9, prompt_cache=cache, **NO_STOP)
    next(left)
    other = copy.deepcopy(cache)
    expected = decoder.spec_generate(SECOND, 9, **NO_STOP)
    assert mx.array_equal(decoder.spec_generate(SECOND, 9, prompt_cache=other, **NO_STOP), expected)
    left.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_its_own_way_and_is_trimmed_like_mlx_lms_caches(kind, caplog):
    decoder = DFlashSpeculativeDecoder(loaded(kind), ScriptedDrafter([0], 64), **KINDS[kind][1])

    def continued(text, piece, **given):
        return decoder.spec_generate(text + piece, 8, **NO_STOP, **given)[0].tolist()

    cache = decoder.make_prompt_cache()
    text = continued([], FIRST, prompt_cache=cache)
    other, held = copy.deepcopy(cache), list(cache.tokens)
    assert other.nbytes == cache.nbytes > 0
    read = read_by(decoder)
    answers = [continued(text, piece, prompt_cache=it) for piece, it in ((SECOND, other), (THIRD, cache))]
    assert sum(read) <= len(SECOND) + len(THIRD) + 2, "what the copy held was read again"
    if kind != "KeptWindowCache":  # which masks what is read in one pass otherwise
        assert answers == [continued(text, piece) for piece in (SECOND, THIRD)]
    assert cache.is_trimmable() == (kind not in WITHOUT_A_WAY_BACK)
    if cache.is_trimmable():
        assert cache.trim(len(cache.tokens) - len(held)) > 0
        assert cache.tokens == ([] if kind == "ChunkedKVCache" else held)  # whose chunk has moved on
        assert continued(text, THIRD, prompt_cache=cache) == answers[1]
