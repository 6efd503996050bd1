"""What an option means, and what it may be, is the same in every command that has it."""

import json
import re
from dataclasses import fields

import pytest
from support.cli import COMMAND, assert_one_error, invoke
from support.models import byte_tokenizer, writer

from dflash.cli import loading
from dflash.cli.options import flag_of
from dflash.decoding.sampling import LOGITS_PROCESSORS, SAMPLERS
from dflash.decoding.trace import read_records
from dflash.options import DecodeOptions

DRAFTING = ("generate", "bench", "eval", "cache-prompt")
LEFT_OUT = {"generate": set(), "bench": {"trace", "profile", "prompt_cache"}, "eval": {"profile", "prompt_cache"}}

GIVEN = {
    "max_tokens": ("4", 4),
    "temp": ("0.5", 0.5),
    "top_p": ("0.9", 0.9),
    "min_p": ("0.1", 0.1),
    "min_tokens_to_keep": ("2", 2),
    "top_k": ("3", 3),
    "xtc_probability": ("0.25", 0.25),
    "xtc_threshold": ("0.2", 0.2),
    "seed": ("7", 7),
    "logits_processors": ("unchanged", ["unchanged"]),
    "logit_bias": ('{"7": -1}', {7: -1}),
    "repetition_penalty": ("1.5", 1.5),
    "repetition_context_size": ("8", 8),
    "presence_penalty": ("1", 1.0),
    "presence_context_size": ("9", 9),
    "frequency_penalty": ("0.5", 0.5),
    "frequency_context_size": ("10", 10),
    "policy": ("3", 3),
    "tree": ("5", 5),
    "stop_strings": ("zzz", ["zzz"]),
    "stop_token_ids": ("9", [9]),
    "max_kv_size": ("64", 64),
    "kv_bits": ("8", 8),
    "kv_group_size": ("32", 32),
    "quantized_kv_start": ("6", 6),
    "prefill_step_size": ("16", 16),
}
"""Options of which none excludes another: on the command line, and in Python."""

ALONE = {"sampler": ("greedy_of_a_plugin", "greedy_of_a_plugin"), "verify": ("speculative_sampling",) * 2}
WATCHING = {"trace", "profile", "prompt_cache"}


@pytest.fixture
def caught(monkeypatch):
    """What ``dflash generate``, called with options, hands to the decoder, which writes nothing."""
    decoder, found = writer("hello"), {}
    monkeypatch.setattr(loading, "load_decoder", lambda *_: decoder)
    monkeypatch.setattr(decoder, "stream_generate", lambda prompt, **options: found.update(options) or iter(()))
    flags = {field.name: flag_of(field) for field in fields(DecodeOptions)}

    def call(given):
        found.clear()
        result = invoke("generate", "Hi", "--raw", *(x for name in given for x in (flags[name], given[name][0])))
        assert result.exit_code == 0, result.output
        return found

    with (
        LOGITS_PROCESSORS.temporary("unchanged", lambda tokens, logits: logits),
        SAMPLERS.temporary("greedy_of_a_plugin", lambda logits: logits.argmax(-1)),
    ):
        yield call


@pytest.mark.parametrize("command", LEFT_OUT)
def test_every_option_of_decoding_is_on_the_command_line(command):
    known = {name for parameter in COMMAND.commands[command].params for name in parameter.opts}
    missing = {field.name for field in fields(DecodeOptions) if flag_of(field) not in known}
    assert missing == LEFT_OUT[command]


def test_every_option_of_decoding_reaches_the_decoder(caught):
    assert {*GIVEN, *ALONE, *WATCHING} == {field.name for field in fields(DecodeOptions)}
    for given in (GIVEN, {"sampler": ALONE["sampler"]}, {"temp": GIVEN["temp"], "verify": ALONE["verify"]}):
        assert caught(given) == {name: expected for name, (_, expected) in given.items()}


@pytest.fixture
def arguments(tmp_path, prompts):
    """The arguments of a command with a pair, short and in a form that can be read."""

    def of(name: str, pair: list[str], *more: object) -> list[object]:
        few = ["--prompts", prompts, "--limit", "1", "--max-tokens", "4", "--json"]
        return {
            "generate": ["generate", "Hi", *pair, "--max-tokens", "4", "--json", *more],
            "bench": ["bench", *pair, *few, *more],
            "eval": ["eval", *pair[3:4], *pair[:2], *few, *more],
            "cache-prompt": ["cache-prompt", "Hi", *pair, "--prompt-cache-file", tmp_path / "a.safetensors", *more],
            "demo": ["demo", *pair, *more],
            "doctor": ["doctor", *pair, *more],
            "prepare": ["prepare", prompts, tmp_path / "data", *pair[:2], "--max-tokens", "4", *more],
        }[name]

    return of


@pytest.mark.parametrize("command", DRAFTING)
def test_a_system_prompt_and_template_switches_reach_the_template(command, arguments, loud_pair, tmp_path):
    def length(*options: str) -> int:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.trace"
        result = invoke(*arguments(command, loud_pair, *options, *(["--trace", file] if command == "eval" else [])))
        assert result.exit_code == 0, result.output
        if command == "cache-prompt":
            return int(re.search(r": (\d+) tokens?, ", result.stdout)[1])
        if command == "eval":
            return len(next(iter(read_records(file)))["prompt_tokens"])
        found = json.loads(result.stdout)
        return (found["prompts"][0] if command == "bench" else found)["prompt_tokens"]

    def templated(*messages: dict) -> int:
        return len(byte_tokenizer().apply_chat_template(list(messages))["input_ids"])

    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be"}
    alone = length()
    assert length("--system", "Be") - alone == templated(system, user) - templated(user)
    if command != "cache-prompt":  # there the switch comes after what is kept
        assert length("--chat-template-config", '{"loud": true}') == alone + 4
    assert length("--raw") < alone


@pytest.mark.parametrize(
    ("commands", "options", "message"),
    [
        (["generate"], ["--chat-template-config", "[1]"], "--chat-template-config must be a JSON object"),
        (["generate"], ["--logit-bias", '{"a": 1}'], "--logit-bias must name token ids, got 'a'"),
        (
            [*DRAFTING, "demo", "doctor", "prepare"],
            ["--target", ""],
            "--target is empty; give a value",
        ),
        (["generate", "bench", "cache-prompt", "demo", "doctor"], ["--drafter", " "], "--drafter is empty"),
    ],
)
def test_other_bad_values_are_one_line(commands, options, message, arguments):
    for command in commands:
        assert_one_error(invoke(*arguments(command, [], *options)), message)
