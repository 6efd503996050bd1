"""What goes wrong in one request stays there: clients that leave, drafters that fail, a thread that ends."""

import copy
import json
import threading
from dataclasses import replace

import openai
import pytest
from mlx_lm import server as mlx_server
from mlx_lm.generate import BatchGenerator, GenerationBatch
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from support.models import (
    TEXT_VOCAB,
    ScriptedDrafter,
    ScriptModel,
    byte_tokenizer,
    qwen3_model,
    save_target,
    writer,
)

from dflash import DFlashSpeculativeDecoder
from dflash.models import ModelOptions
from dflash.serving import http

from .conftest import Gate, answered, until

ANSWER = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
PROMPT = {"prompt": "AB", "max_tokens": 200}


@pytest.fixture
def gated(here):
    """A server whose decoder writes `ANSWER`, and its gate."""
    gate = Gate(4)
    running = here(lambda: writer(ANSWER, policy=gate))
    yield running, gate
    gate.open.release(1000)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_decoding_after_a_block(gated, stream):
    running, gate = gated
    connection = running.open(PROMPT | {"stream": stream})
    until(lambda: gate.steps == 1)
    connection.close()
    gate.open.release(1)
    until(lambda: running.metric("vllm:request_success_total") == 1)
    assert gate.steps <= 2
    assert running.metric("vllm:generation_tokens_total") <= 1 + 5
    gate.open.release(1000)
    again = running.complete("AB", max_tokens=200)
    assert again.choices[0].text == ANSWER
    assert again.usage.prompt_tokens_details.cached_tokens == 1


def test_a_client_that_leaves_while_it_waits_is_never_decoded(gated):
    running, gate = gated
    first = running.open(PROMPT)
    until(lambda: gate.steps == 1)
    leaves = running.open(PROMPT)
    until(lambda: running.metric("vllm:num_requests_waiting") == 1)
    stays = running.open(PROMPT)
    until(lambda: running.metric("vllm:num_requests_waiting") == 2)
    leaves.close()
    gate.open.release(1000)
    assert answered(first)["choices"][0]["text"] == answered(stays)["choices"][0]["text"] == ANSWER
    assert running.metric("vllm:prompt_tokens_total") == 2 * 2


def test_a_client_that_leaves_in_the_prompt_ends_its_reading(here):
    made = []

    def make():
        made.append(writer(ANSWER, prefill_step_size=4))
        read = made[0].cache_prompt
        made[0].cache_prompt = lambda *args: (lengths.append(len(args[0])), gate.wait(10), read(*args))
        return made[0]

    lengths, gate = [], threading.Event()
    running = here(make)
    connection = running.open({"prompt": "A" * 40})
    until(lambda: lengths == [4])
    connection.close()
    gate.set()
    until(lambda: running.metric("vllm:request_success_total") == 1)
    assert lengths == [4]
    assert running.complete("A" * 40, max_tokens=1).usage.prompt_tokens_details.cached_tokens == 4
    assert lengths == [4, *range(8, 40, 4)]


def test_a_client_that_leaves_makes_room_for_another_that_waits(gated):
    running, gate = gated
    running.generator.serving = replace(running.generator.serving, max_queue=1)
    first = running.open(PROMPT)
    until(lambda: gate.steps == 1)
    leaves = running.open(PROMPT)
    until(lambda: len(running.generator.waiting) == 1)
    leaves.close()
    until(lambda: running.generator.waiting[0].gone())
    other = running.open(PROMPT)
    until(lambda: not running.generator.waiting[0].gone(), 10)
    gate.open.release(1000)
    assert answered(first)["choices"][0]["text"] == answered(other)["choices"][0]["text"] == ANSWER


def test_who_waits_hears_that_the_server_lives_and_too_many_are_refused(gated, monkeypatch):
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.1)
    running, gate = gated
    running.generator.serving = replace(running.generator.serving, max_queue=1)
    first = running.open(PROMPT)
    until(lambda: gate.steps == 1)
    waits = running.open(PROMPT | {"stream": True})
    assert waits.recv(15).startswith(b"HTTP/1.0 200 OK")
    while b": keepalive" not in waits.recv(1000):
        pass
    with pytest.raises(openai.InternalServerError, match="1 requests wait already") as refused:
        running.complete("AB")
    assert refused.value.status_code == 503
    gate.open.release(1000)
    assert answered(first)["choices"][0]["text"] == ANSWER
    with waits, waits.makefile("rb") as file:
        chunks = [json.loads(line[6:]) for line in file if line.startswith(b"data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER


def test_a_thread_that_ends_is_told_by_health_and_to_who_waits(gated, monkeypatch):
    running, gate = gated
    first = running.open(PROMPT)
    until(lambda: gate.steps == 1)
    waits = running.open(PROMPT)
    until(lambda: running.metric("vllm:num_requests_waiting") == 1)

    def end(*_):
        raise SystemExit

    monkeypatch.setattr(running.generator, "_next_request", end)
    gate.open.release(1000)
    assert answered(first)["status"] == answered(waits)["status"] == 503
    assert running.send("GET", "/health")[0] == 503
    with pytest.raises(openai.InternalServerError, match="restart the server"):
        running.complete("AB")


def test_health_tells_of_a_thread_that_stands_still(gated):
    running, gate = gated
    running.generator.serving = replace(running.generator.serving, patience=1)
    connection = running.open(PROMPT)
    until(lambda: gate.steps == 1)
    until(lambda: running.send("GET", "/health")[0] == 503)
    gate.open.release(1000)
    assert answered(connection)["choices"][0]["text"] == ANSWER
    until(lambda: running.send("GET", "/health")[0] == 200)


def test_health_is_good_while_a_request_waits_for_others(gated):
    """The thread counts as moving with every block, whoever waits for it."""
    running, gate = gated
    with running.open(PROMPT | {"stream": True}), running.open(PROMPT | {"logprobs": 1}):
        until(lambda: running.metric("vllm:num_requests_waiting") == 1 and gate.steps == 1)
        for block in range(2, 5):
            before = running.generator._moved
            gate.open.release(1)
            until(lambda block=block: gate.steps == block)
            assert running.generator._moved > before
        assert running.send("GET", "/health")[0] == 200
        assert running.metric("vllm:num_requests_waiting") == 1


def test_stop_strings_end_decoding_wherever_blocks_and_tokens_end(here):
    running, made = here(lambda: writer(ANSWER, p=0.9, policy="full")), 0
    for stop in ("four five", "wo th", " ", "eight nine ten", "en e", "sixteen", "one", "ne t", "xyz"):
        alone = list(writer(ANSWER).stream_generate([65, 66], 200, stop_strings=[stop]))[-1].generation_tokens
        for stream in (False, True):
            asked = {"max_tokens": 200, "stop": stop}
            if stream:
                usage = {"include_usage": True}
                *chunks, last = running.complete("AB", **asked, stream=True, stream_options=usage)
                text, finish = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
            else:
                last = running.complete("AB", **asked)
                text, finish = last.choices[0].text, last.choices[0].finish_reason
            made += alone
            assert (text, finish) == (ANSWER.split(stop)[0], "stop"), stop
            assert last.usage.completion_tokens == alone, stop
            assert running.metric("vllm:generation_tokens_total") == made, stop
    assert b'finished_reason="stop"} 18.0' in running.send("GET", "/metrics")[1]


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "thought", "shown", "calls"),
    [
        (f"So 😀🎉: {CALL}", "", "So 😀🎉: ", 1),
        (f"{CALL} and {CALL}", "", " and ", 2),
        (f"I think that{CALL}", "", "I think that", 1),
        ("1 <tool 2 <", "", "1 <tool 2 <", 0),
        ("<think>ab</think>So", "ab", "So", 0),
        ("<think>A long thought with 😀🎉.</think> Łódź 😀", "A long thought with 😀🎉.", " Łódź 😀", 0),
        ("So <think>ab</think> so", "ab", "So  so", 0),
        ("<think>never ends", "never ends", "", 0),
    ],
)
def test_tools_thoughts_and_characters_may_begin_and_end_in_a_block(here, text, thought, shown, calls):
    """Call and text in one block; the emoji's bytes are tokens of two blocks; what only begins a tag is text."""
    messages = [{"role": "user", "content": "Weather?"}]
    plain = copy.deepcopy(byte_tokenizer())  # all tests share that one
    plain.add_tokens(["<think>", "</think>"])
    tags = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"}

    def make():
        tokenizer = TokenizerWrapper(plain, BPEStreamingDetokenizer, **tags, tool_parser=json_tools.parse_tool_call)
        script = [*tokenizer.apply_chat_template(messages, add_generation_prompt=True), *tokenizer.encode(text)]
        script.append(tokenizer.eos_token_id)
        target, drafter = ScriptModel(script, len(plain)), ScriptedDrafter(script, len(plain))
        return DFlashSpeculativeDecoder(target, drafter, tokenizer, policy="full")

    running, finish = here(make), "tool_calls" if calls else "stop"
    asked = {"max_tokens": 200, "tools": [{"type": "function", "function": {"name": "weather"}}]}
    (choice,) = running.chat(messages, **asked).choices
    assert (getattr(choice.message, "reasoning", ""), choice.message.content or "") == (thought, shown)
    made = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]
    assert (made, choice.finish_reason) == ([("weather", {"city": "Łódź"})] * calls, finish)
    pieces = [piece.choices[0] for piece in running.chat(messages, stream=True, **asked)]
    assert "".join(getattr(piece.delta, "reasoning", None) or "" for piece in pieces) == thought
    assert "".join(piece.delta.content or "" for piece in pieces) == shown
    assert sum(len(piece.delta.tool_calls or ()) for piece in pieces) == calls
    assert pieces[-1].finish_reason == finish


def test_memory_of_prompt_caches_is_bounded(here):
    running = here(lambda: writer(ANSWER, prompt=[0] * 8), prompt_cache_bytes=50_000, prompt_caches=100)
    generator, sizes = running.generator, []
    for number in range(20):
        running.complete(f"{number:08}", max_tokens=8)
        sizes.append(generator.between_requests(lambda: generator.prompt_cache.nbytes))  # while it does not change
    assert 30_000 < max(sizes) <= 50_000
    assert running.metric("dflash:prompt_cache_bytes") == sizes[-1]


def test_a_drafter_that_was_found_and_does_not_fit_is_told(here, tmp_path, caplog):
    """A target alone for which none is bundled."""
    save_target(qwen3_model(1, vocab=TEXT_VOCAB), tmp_path / "target")
    with caplog.at_level("WARNING"):
        running = here(models=ModelOptions(tmp_path / "target"))
    (model,) = running.client.models.list()
    assert model.engine == "plain"
    assert "No drafter is bundled for this target" in model.drafter
    assert "No drafter is bundled" in caplog.text
    drafts = running.complete("AB", max_tokens=20).metrics["speculative_decoding"]
    assert (drafts["num_draft_tokens"], drafts["mean_acceptance_length"]) == (0, None)


RELIED_ON = {
    mlx_server.ResponseGenerator: "generate _run_generate _generate _next_request _tokenize generation_available "
    "stop_and_join cli_args",
    mlx_server.APIHandler: "do_POST do_GET handle_completion validate_model_parameters generate_response "
    "completion_usage_response _set_completion_headers _set_stream_headers _set_cors_headers",
    BatchGenerator: "insert_segments remove extract_cache next next_generated close _make_batch",
    GenerationBatch: "empty next extend filter extract_cache",
    LRUPromptCache: "insert_cache fetch_nearest_cache trim_to nbytes",
}


def test_what_is_overridden_and_called_in_mlx_lm_has_its_name_still():
    """A method that it no longer called would be overridden without effect."""
    for owner, names in RELIED_ON.items():
        assert [name for name in names.split() if not hasattr(owner, name)] == [], owner
