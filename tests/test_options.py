"""Prompts in their three forms and the options of decoding: what is taken, and what is refused in one line."""

import logging
import subprocess
import sys
from dataclasses import fields, replace

import mlx.core as mx
import pytest
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.sample_utils import greedy_sampler
from support.errors import refused
from support.models import (
    TEXT_VOCAB,
    ScriptedDrafter,
    byte_tokenizer,
    llama_model,
    plain_greedy,
    target,
    wrapped_tokenizer,
    writer,
)
from transformers import PreTrainedTokenizerFast

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel
from dflash.core.errors import DFlashError, GenerationError
from dflash.options import DecodeOptions, decode_options
from dflash.prompts.tokens import prompt_tokens

PROMPT = [65, 66]
USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "yes"}


def text_target() -> LoadedTargetModel:
    return LoadedTargetModel(target("llama", 0, TEXT_VOCAB).model, wrapped_tokenizer())


def templated(*messages: dict, **switches) -> list[int]:
    return wrapped_tokenizer().apply_chat_template(list(messages), add_generation_prompt=True, **switches)


def target_with_template(template: str | None) -> LoadedTargetModel:
    core = byte_tokenizer()._tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=template)
    return LoadedTargetModel(target("llama", 0, TEXT_VOCAB).model, tokenizer)


# --- prompts ----------------------------------------------------------------------------------------------


def test_text_messages_and_a_system_prompt_are_the_templates_tokens():
    loaded = text_target()
    assert prompt_tokens(loaded, "hi") == prompt_tokens(loaded, [USER]) == templated(USER)
    assert prompt_tokens(loaded, [USER, ANSWER, USER], system="Be brief.") == templated(SYSTEM, USER, ANSWER, USER)
    assert prompt_tokens(loaded, "hi", chat=False) == wrapped_tokenizer().encode("hi")
    assert prompt_tokens(loaded, "hi", prefill_response="Yes, ") == templated(USER) + byte_tokenizer().encode("Yes, ")
    assert prompt_tokens(loaded, mx.array([[1, 2]])) == prompt_tokens(loaded, (1, 2)) == [1, 2]
    loaded = target_with_template("{{ 'quick' if speed is defined and speed > 3 else 'slow' }}")
    assert prompt_tokens(loaded, "hi") == byte_tokenizer().encode("slow")
    quick = prompt_tokens(loaded, "hi", chat_template_config={"speed": 4})
    assert quick == byte_tokenizer().encode("quick")


def test_messages_system_and_switches_reach_the_decoder():
    prompt = templated(SYSTEM, USER, ANSWER, USER)
    decoder = writer("yes", prompt)
    assert decoder.generate([USER, ANSWER, USER], system="Be brief.") == "yes"
    (first, *_) = decoder.stream_generate([SYSTEM, USER, ANSWER, USER], chat_template_config={"unused": 1})
    assert first.prompt_tokens == len(prompt)


BAD_PROMPTS = {
    "nothing": (None, {}, ["text, a list of messages or token ids, got NoneType"]),
    "bytes": (b"abc", {}, ["got bytes"]),
    "one message": (USER, {}, ["got dict"]),
    "texts": (["a", "b"], {}, ["token ids, got list: ['a', 'b']"]),
    "a message without content": ([USER, {"role": "user"}], {}, ["Message 2", "'content'"]),
    "a message that is a text": ([USER, "more"], {}, ["Message 2", "'more'"]),
    "an answer last": ([USER, ANSWER], {}, ["last message is the assistant's"]),
    "two system prompts": ([SYSTEM, USER], {"system": "Be brief."}, ["give it once"]),
    "a system prompt of another type": ("hi", {"system": 3}, ["system", "text", "3"]),
    "system with token ids": (PROMPT, {"system": "Be brief."}, ["as they stand"]),
    "system without the template": ("hi", {"system": "Be brief.", "chat": False}, ["need the chat template"]),
    "messages without the template": ([USER], {"chat": False}, ["need the chat template"]),
    "no content": ([{"role": "user", "content": None}], {}, ["content of message 1 must be text, got None"]),
    "an image": ([USER, {"role": "user", "content": [{"type": "image"}]}], {}, ["message 2", "text, got [{'type'"]),
    "an image beside a text": (
        [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}]}],
        {},
        ["must be text"],
    ),
    "a number": ([{"role": "user", "content": 3}], {}, ["must be text, got 3"]),
    "an unknown role": ([USER, {"role": "alien", "content": "hi"}], {}, ["Message 2", "role 'alien'", "user"]),
    "truth values": ([True, 2], {}, ["True or False among [True, 2]"]),
    "a switch of the tokenizer": ("hi", {"chat_template_config": {"messages": 3}}, ["'messages' is no switch"]),
    "a switch without a name": ("hi", {"chat_template_config": {3: 3}}, ["3 is no switch"]),
    "a begun answer to token ids": (PROMPT, {"prefill_response": "Yes"}, ["as they stand"]),
    "a begun answer without the template": ("hi", {"prefill_response": "a", "chat": False}, ["need the chat template"]),
    "a begun answer that is no text": ("hi", {"prefill_response": 3}, ["prefill_response", "text", "3"]),
    "chat that is a text": ("hi", {"chat": "no"}, ["chat must be True or False, got 'no'"]),
    "switches that are a text": ("hi", {"chat_template_config": "fast"}, ["dict of switches", "'fast'"]),
    "half a surrogate pair": ("caf\udce9", {}, ["text of the user", "character 4", "UTF-8"]),
    "a surrogate in a system prompt": ("hi", {"system": "\ud800"}, ["text of the system", "character 1"]),
    "empty text": ("", {}, ["prompt is empty"]),
    "blank text": (" \n", {}, ["prompt is empty"]),
    "no tokens": ([], {}, ["prompt is empty"]),
    "batch of 2": (mx.array([[1, 2], [3, 4]]), {}, ["Batch size 2"]),
    "three axes": (mx.array([[[1, 2]]]), {}, ["[1, length]"]),
    "fractional tokens": (mx.array([1.5]), {}, ["token ids"]),
    "token outside the vocabulary": ([1, TEXT_VOCAB], {}, ["0 to 263"]),
    "negative token": ([-1], {}, ["0 to 263"]),
}


def test_texts_in_parts_are_one_text_and_a_role_of_the_template_is_known():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "text"}]
    loaded = target_with_template("{% for m in messages %}{{ m.content if m.role != 'guide' else '' }}{% endfor %}")
    guided = [{"role": "guide", "content": "x"}, {"role": "user", "content": parts}]
    assert prompt_tokens(loaded, guided) == byte_tokenizer().encode("one text")
    called = {"role": "assistant", "content": None, "tool_calls": []}  # another key says what the message holds
    assert prompt_tokens(loaded, [USER, called, USER])


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_at_once_in_one_telling_line(name):
    prompt, options, words = BAD_PROMPTS[name]
    with pytest.raises(GenerationError) as error:
        writer("abc").stream_generate(prompt, 5, **options)  # nothing has to be taken from the iterator
    refused(error, *words)


def test_a_template_that_refuses_the_messages_and_a_tokenizer_without_files_are_named_in_one_line():
    loaded = target_with_template("{{ raise_exception('Only\\nuser messages.') }}")
    with pytest.raises(GenerationError) as error:
        prompt_tokens(loaded, "hi")
    refused(error, "cannot take this prompt: Only user messages.")
    loaded = target_with_template(None)
    loaded.tokenizer.encode = lambda text: []
    with pytest.raises(GenerationError) as error:
        prompt_tokens(loaded, "hi")
    refused(error, "tokenizer.json")


def test_a_long_prompt_is_refused_without_transformers_warning(caplog, recwarn):
    decoder = writer("abc", max_seq_length=100)
    byte_tokenizer().model_max_length, before = 50, byte_tokenizer().model_max_length
    byte_tokenizer().deprecation_warnings.clear()
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(GenerationError) as error:
            decoder.generate("long " * 50)
    finally:
        byte_tokenizer().model_max_length = before
    refused(error, "leaves no room in the limit of 100 tokens")
    assert "indexing errors" not in caplog.text


# --- options ----------------------------------------------------------------------------------------------

BAD_OPTIONS = {
    "negative max_tokens": ({"max_tokens": -1}, ["max_tokens", "at least 0", "-1"]),
    "fractional max_tokens": ({"max_tokens": 2.5}, ["max_tokens", "2.5"]),
    "negative temperature": ({"temperature": -0.1}, ["temperature must be", "at least 0, got -0.1"]),
    "temperature that is no number": ({"temperature": float("nan")}, ["temperature", "nan"]),
    "infinite temperature": ({"temperature": float("inf")}, ["temperature", "finite", "inf"]),
    "temperature as a text": ({"temperature": "hot"}, ["temperature", "'hot'"]),
    "top_p above 1": ({"top_p": 1.5}, ["top_p", "from 0 to 1, got 1.5"]),
    "min_p below 0": ({"min_p": -0.5}, ["min_p", "-0.5"]),
    "negative top_k": ({"top_k": -3}, ["top_k", "-3"]),
    "top_k of the vocabulary": ({"top_k": TEXT_VOCAB}, ["top_k must be less than", "264 tokens, got 264; 0 is off"]),
    "XTC of half and more": ({"xtc_threshold": 0.6}, ["xtc_threshold", "from 0 to 0.5, got 0.6"]),
    "XTC and a rule that must know it": (
        {"xtc_probability": 0.5, "temp": 1.0, "verify": "speculative_sampling"},
        ["instead of xtc", "first_mismatch"],
    ),
    "XTC and a sampler": ({"sampler": greedy_sampler, "xtc_probability": 1}, ["either a sampler", "xtc"]),
    "more kept than there are": ({"min_tokens_to_keep": TEXT_VOCAB + 1}, ["min_tokens_to_keep", "264 tokens, got 265"]),
    "seed beyond 64 bits": ({"seed": 2**64}, ["seed", "from 0 to 18446744073709551615"]),
    "negative seed": ({"seed": -1}, ["seed", "-1"]),
    "one stop string": ({"stop_strings": "abc"}, ["stop_strings", "['abc']"]),
    "empty stop string": ({"stop_strings": ["a", ""]}, ["stop string", "non-empty"]),
    "one stop token": ({"stop_token_ids": 3}, ["stop_token_ids must be a list", "3"]),
    "stop tokens that are texts": ({"stop_token_ids": ["a"]}, ["stop_token_ids must be a list", "['a']"]),
    "a negative stop token": ({"stop_token_ids": [-1]}, ["stop_token_ids must be a list", "[-1]"]),
    "negative penalty": ({"repetition_penalty": -1.0}, ["repetition_penalty", "-1.0"]),
    "penalty as a text": ({"presence_penalty": "much"}, ["presence_penalty must be a finite number, got 'much'"]),
    "penalty of no tokens": ({"frequency_context_size": 0}, ["frequency_context_size", "from 1 to 2147483647, got 0"]),
    "biases in a list": ({"logit_bias": [1]}, ["logit_bias must be a dict"]),
    "bias of a text": ({"logit_bias": {"a": 1.0}}, ["logit_bias must name token ids, got 'a'"]),
    "bias that is no number": ({"logit_bias": {3: None}}, ["logit_bias of token 3", "None"]),
    "bias of an unknown token": ({"logit_bias": {999: 1.0}}, ["names token 999", "ids are 0 to 263"]),
    "a number for stop strings": ({"stop_strings": 0.5}, ["stop_strings must be a list of strings, got 0.5"]),
    "a number for processors": ({"logits_processors": 3}, ["logits_processors", "list"]),
    "zero for stop tokens": ({"stop_token_ids": 0}, ["stop_token_ids must be a list", "0"]),
    "one processor": ({"logits_processors": lambda tokens, logits: logits}, ["logits_processors", "list"]),
    "unknown sampler": ({"sampler": "no_such"}, ["Unknown sampler 'no_such'"]),
    "sampler that is none": ({"sampler": 3}, ["sampler", "function or a registered name", "3"]),
    "sampler and temperature": ({"sampler": greedy_sampler, "temperature": 1.0}, ["either a sampler"]),
    "unknown rule": ({"verify": "first_mismatc"}, ["Unknown verification rule", "did you mean 'first_mismatch'"]),
    "unknown option": ({"tempreature": 1.0}, ["Unknown option 'tempreature'", "did you mean 'temperature'"]),
    "kv_bits": ({"kv_bits": 5}, ["kv_bits"]),
    "a group size that is no number": ({"kv_group_size": mx.array([1, 2])}, ["kv_group_size", "got array"]),
    "a profile that is no switch": ({"profile": mx.array([1, 2])}, ["profile must be True or False, got array"]),
    "too long": ({"max_tokens": 99}, ["2 tokens", "max_tokens 99", "100 tokens", "to 98"]),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_bad_option_is_refused_at_once_in_one_line_that_names_it(name):
    options, words = BAD_OPTIONS[name]
    decoder = writer("abc", max_seq_length=100)
    calls = [decoder.stream_generate, decoder.generate]
    if "stop_strings" not in options:
        calls.append(decoder.spec_generate)
    for call in calls:
        with pytest.raises(DFlashError) as error:
            call(PROMPT, **options)
        refused(error, *words)


def test_token_level_decoding_refuses_stop_strings():
    with pytest.raises(GenerationError) as error:
        writer("abc").spec_generate(PROMPT, 5, stop_strings=["a"])
    refused(error, "stream_generate")


def test_max_tokens_gives_way_to_the_room_there_is_unless_asked_for():
    decoder = writer("x" * 300, max_seq_length=100)
    assert len(decoder.generate(PROMPT)) == 98
    with pytest.raises(GenerationError) as error:
        decoder.generate([65] * 100)
    refused(error, "100 tokens leaves no room in the limit of 100 tokens")
    assert decode_options({}).token_limit(100, 10**6) == 2048
    assert decode_options({"max_tokens": 0}).token_limit(100, 100) == 0


def test_a_temperature_that_float32_cannot_scale_by_is_greedy():
    loaded = LoadedTargetModel(llama_model(2, TEXT_VOCAB), wrapped_tokenizer())
    expected, _ = plain_greedy(loaded.model, PROMPT, 20)
    decoder = DFlashSpeculativeDecoder(loaded, ScriptedDrafter(PROMPT + expected, TEXT_VOCAB, 0.8))
    for temperature in (1e-40, 1e-6):
        assert decoder.spec_generate(PROMPT, 20, temperature, stop_token_ids=[]).tolist() == [PROMPT + expected]


def test_options_of_the_decoder_are_defaults_of_its_requests():
    decoder = writer("stop here", max_tokens=4, stop_strings=["here"])
    assert decoder.generate(PROMPT) == "stop"
    assert decoder.generate(PROMPT, 40) == "stop "
    assert decoder.generate(PROMPT, 40, stop_strings=["p"]) == "sto"
    with pytest.raises(GenerationError) as error:
        writer("abc", top_pp=0.5)
    refused(error, "'top_pp'", "did you mean 'top_p'")


def test_the_fields_are_known_without_mlx_and_keep_its_defaults():
    program = "import sys, dflash.cli.options; print('mlx.core' in sys.modules, 'yaml' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False False\n"
    assert DecodeOptions().quantized_kv_start == DEFAULT_QUANTIZED_KV_START


def test_none_is_the_default_of_every_option_and_temperature_is_mlx_lms_name_of_temp():
    assert DecodeOptions(**{field.name: None for field in fields(DecodeOptions)}) == DecodeOptions()
    assert DecodeOptions(repetition_penalty=None, seed=3).given() == {"seed": 3}
    assert decode_options({"temperature": 0.5, "top_k": None}) == DecodeOptions(temp=0.5)


def test_finished_texts_tell_what_is_right_unless_an_option_changes_texts_or_drafts():
    full = DecodeOptions(policy="full", seed=5, max_tokens=3, stop_token_ids=[3], prefill_step_size=4)
    assert full.on_texts
    changes = {"temp": 0.5, "policy": 2, "tree": 4, "stop_strings": ["x"], "repetition_penalty": 1.2, "max_kv_size": 64}
    for name, value in (changes | {"trace": print}).items():
        assert not replace(full, **{name: value}).on_texts, name
