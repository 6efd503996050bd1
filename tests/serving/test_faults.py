"""What goes wrong in one request stays there: clients that leave, drafters that fail, a thread that ends."""

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
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
    plain_greedy,
    qwen3_model,
    save_target,
    writer,
)

from dflash import DFlashSpeculativeDecoder
from dflash.models import ModelOptions
from dflash.serving import http

from .conftest import Gate, answered, until
from .words import ids, words

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


class FailsAfter(ScriptedDrafter):
    """A drafter that fails in texts that begin with 13."""

    def propose(self, anchor, length, cache):
        if cache.tokens[:1] == [13]:
            raise RuntimeError("the drafter is out of order")
        return super().propose(anchor, length, cache)


def not_a_number(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits + float("nan") if tokens[0].item() == 13 else logits


def out_of_order(tokens: mx.array, logits: mx.array) -> mx.array:
    if tokens[0].item() == 13:
        raise RuntimeError("the processor is out of order")
    return logits


def out_of_memory(tokens: mx.array, logits: mx.array) -> mx.array:
    """Fails when it is evaluated, as what a GPU has no memory for; without memory on a CPU, the process ends."""
    return logits + mx.linalg.inv(mx.zeros((1, 1)), stream=mx.cpu) if tokens[0].item() == 13 else logits


FAULTS = {
    "out of order": {"drafter": FailsAfter(list(range(64)), 64, 0.5)},
    "the processor is": {"logits_processors": [out_of_order]},
    "not a number": {"logits_processors": [not_a_number]},
    "eval_cpu": {"logits_processors": [out_of_memory]},
    "factorization": {"logits_processors": [out_of_memory], "policy": 0},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_that_fails_is_told_and_the_others_are_answered(here, model, fault):
    running = here(lambda: words(model, **FAULTS[fault]))

    def ask(prompt: str, stream: bool) -> str:
        try:
            if stream:
                chunks = running.complete(prompt, max_tokens=30, stream=True)
                return "".join(chunk.choices[0].text for chunk in chunks)
            return running.complete(prompt, max_tokens=30).choices[0].text
        except openai.APIError as error:
            return f"{getattr(error, 'status_code', 500)}: {error.message}"

    prompts = ["1 2 3", "13 4", "7 8 9 10", "13", "2"]
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(ask, prompts * 2, [False] * 5 + [True] * 5))
    found += [ask(prompt, False) for prompt in prompts]
    for prompt, answer in zip(prompts * 3, found, strict=True):
        if prompt.startswith("13"):
            assert answer.startswith("500: ")
            assert fault in answer
        else:
            assert ids(answer) == plain_greedy(model, ids(prompt), 30)[0]
    assert running.send("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": "1 998"}, "token ids outside 0 to 95"),
        *(
            ({f"{name}_context_size": 2**31}, "from 1 to 2147483647")
            for name in ("repetition", "presence", "frequency")
        ),
    ],
)
def test_numbers_beyond_what_the_target_and_mlx_take_are_the_requests_error(here, model, asked, message):
    status, answer = here(lambda: words(model)).post({"prompt": "1", "max_tokens": 4} | asked, "/v1/completions")
    assert (status, message in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize("passes", [1, 9])
def test_requests_that_need_too_much_memory_together_are_answered_one_after_another(here, model, monkeypatch, passes):
    embed, wide = nn.Embedding.__call__, []

    def embedding(self, tokens: mx.array) -> mx.array:
        wide.extend([1] * (tokens.shape[0] > 2))
        vectors = embed(self, tokens)
        return out_of_memory(mx.array([13]), vectors) if len(wide) >= passes and tokens.shape[0] > 2 else vectors

    monkeypatch.setattr(nn.Embedding, "__call__", embedding)
    running = here(lambda: words(model))
    prompts = ["1 2 3", "4 5 6 7", "13", "8 9"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: running.complete(prompt, max_tokens=40).choices[0].text, prompts * 2))
    assert len(wide) >= passes
    assert [ids(text) for text in found] == [plain_greedy(model, ids(prompt), 40)[0] for prompt in prompts] * 2


def test_stop_strings_end_decoding_wherever_blocks_and_tokens_end(here):
    written = ANSWER + " nononono!"
    running, made = here(lambda: writer(written, p=0.9, policy="full")), 0
    for stop in ("four five", "wo th", " ", "eight nine ten", "en e", "nonono!", "one", "ne t", "xyz"):
        alone = list(writer(written).stream_generate([65, 66], 200, stop_strings=[stop]))[-1].generation_tokens
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
            assert (text, finish) == (written.split(stop)[0], "stop"), stop
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


def test_two_hundred_requests_leave_no_more_memory_than_the_prompt_caches_may_take(here):
    """Alone and several at once; what is counted is all that they leave, of the drafter too."""
    most = 8 << 20
    running = here(prompt_cache_bytes=most, prompt_caches=1000)
    generator, taken = running.generator, []

    def held() -> tuple[int, int]:
        return mx.get_active_memory(), generator.prompt_cache.nbytes

    before, _ = generator.between_requests(held)
    for first in range(0, 200, 10):
        with ThreadPoolExecutor(4 if first >= 100 else 1) as pool:
            list(pool.map(lambda number: running.complete(f"{number} + 1", max_tokens=2), range(first, first + 10)))
        active, counted = generator.between_requests(held)  # while it does not change
        assert running.metric("dflash:prompt_cache_bytes") == counted <= most
        assert active - before == pytest.approx(counted, abs=most // 50)
        taken.append(counted)
    assert min(taken[2:]) > most // 2


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
