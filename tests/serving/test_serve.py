"""``dflash serve`` as a user starts it, asked by OpenAI's client: every text is that of ``dflash generate``."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import mlx.core as mx
import openai
import pytest
from support.cli import assert_one_error, invoke

from dflash.bundled import REAL
from dflash.errors import IncompatibleModelsError
from dflash.models import ModelOptions
from dflash.serving.body import checked_body

from .conftest import QUESTION, both, endless, until


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@both
@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, {}),
        ({"temperature": 0.8, "seed": 7}, {"temperature": 0.8, "seed": 7}),
        ({"temperature": 1, "top_p": 0.9, "seed": -1}, {"temperature": 1.0, "top_p": 0.9, "seed": 2**64 - 1}),
        ({"logit_bias": {"13": 5}, "frequency_penalty": 0.3}, {"logit_bias": {13: 5.0}, "frequency_penalty": 0.3}),
        ({"extra_body": {"repetition_penalty": 1.2}}, {"repetition_penalty": 1.2}),
        ({"stop": "He buys"}, {"stop_strings": ["He buys"]}),
        ({"stop": ["zzz", ". "]}, {"stop_strings": ["zzz", ". "]}),
        ({"logprobs": True, "top_logprobs": 2}, {}),
        ({"tools": [{"type": "function", "function": {"name": "weather"}}]}, {}),  # which these templates leave out
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_that_of_generate_and_usage_counts_it(server, decoder, asked, options, stream):
    if stream and "logprobs" in asked:
        with pytest.raises(openai.BadRequestError, match="A stream has no log-probabilities"):
            server.chat(QUESTION, stream=True, **asked)
        return
    steps = list(decoder.stream_generate(user(QUESTION), 24, **options))
    text, count = "".join(step.text for step in steps), steps[-1].generation_tokens
    if stream:
        *chunks, last = server.chat(
            QUESTION, max_tokens=24, stream=True, stream_options={"include_usage": True}, **asked
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        finish = chunks[-1].choices[0].finish_reason
    else:
        last = server.chat(QUESTION, max_tokens=24, **asked)
        assert (last.choices[0].message.content or "") == text
        finish = last.choices[0].finish_reason
        if "logprobs" in asked:
            assert len(last.choices[0].logprobs.content) == count
    assert finish == steps[-1].finish_reason
    usage, drafts = last.usage, last.metrics["speculative_decoding"]
    assert usage.completion_tokens == count
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == drafts["num_accepted_draft_tokens"]
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == drafts["num_draft_tokens"]
    assert sum(drafts["acceptance_histogram"].values()) == drafts["num_spec_steps"]


@both
def test_logprobs_are_the_targets_own(server, decoder):
    """Of each token in its place, whatever was drafted: those of plain mlx-lm."""
    from mlx_lm import stream_generate

    answer = server.complete("def total(values):", max_tokens=16, logprobs=3)
    loaded = decoder.loaded_target
    plain = list(stream_generate(loaded.model, loaded.tokenizer, "def total(values):", max_tokens=16))
    assert answer.choices[0].text == "".join(response.text for response in plain)
    for ours, theirs in zip(answer.choices[0].logprobs.content, plain, strict=True):
        assert ours["id"] == ours["top_logprobs"][0]["id"] == theirs.token
        assert ours["logprob"] == pytest.approx(theirs.logprobs[theirs.token].item(), abs=1e-3)
        likeliest = mx.sort(theirs.logprobs)[::-1][:3].tolist()
        assert [top["logprob"] for top in ours["top_logprobs"]] == pytest.approx(likeliest, abs=1e-3)


def test_seeds_and_logprobs_that_come_together_are_exact(server, decoder):
    """They are decoded one after another: each has the text of its seed, and the target's own log-probabilities."""
    asked: list[dict] = [
        {"temperature": 0.8, "seed": 7},
        {"logprobs": 2},
        {"temperature": 0.8, "seed": 7, "logprobs": 2},
        {},
        {"temperature": 1.2, "seed": 8},
        {"temperature": 1.2, "seed": 8},
        {"logprobs": 1, "frequency_penalty": 0.5},
        {"temperature": 0.8, "seed": 9, "top_p": 0.9, "logprobs": 1},
    ]
    prompt = "def total(values):"

    def ask(number: int):
        return server.complete(prompt, max_tokens=16, **asked[number]).choices[0]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    loaded = decoder.loaded_target
    begin = loaded.tokenizer.encode(prompt)
    for answer, options in zip(found, asked, strict=True):
        plain = {name: value for name, value in options.items() if name != "logprobs"}
        steps = list(decoder.stream_generate(prompt, 16, chat=False, **plain))
        assert answer.text == "".join(step.text for step in steps)
        if "logprobs" in options:
            tokens = [token for step in steps for token in step.tokens]
            assert [told["id"] for told in answer.logprobs.content] == tokens
        if "logprobs" in options and "frequency_penalty" not in options:
            logits = loaded.model(mx.array([begin + tokens[:-1]]))[0, len(begin) - 1 :].astype(mx.float32)
            right = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            for told, row, token in zip(answer.logprobs.content, right, tokens, strict=True):
                assert told["logprob"] == pytest.approx(row[token].item(), abs=2e-3)
                best = mx.sort(row)[::-1][: options["logprobs"]].tolist()
                assert [top["logprob"] for top in told["top_logprobs"]] == pytest.approx(best, abs=2e-3)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17])
def test_max_tokens_counts_tokens(server, decoder, count):
    answer = server.complete("def total(values):", max_tokens=count)
    assert answer.choices[0].text == decoder.generate("def total(values):", count, chat=False)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (count, "length")


def test_an_answer_ends_with_the_context(server, decoder):
    for room in (7, 1):
        tokens = decoder.tokenizer.encode("a b c d " * 300)[: 600 - room]
        prompt = decoder.tokenizer.decode(tokens)
        assert len(decoder.tokenizer.encode(prompt)) == len(tokens)
        answer = server.complete(prompt, max_tokens=500)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (room, "length")
        assert answer.choices[0].text == decoder.generate(tokens, room)


def test_a_turn_after_an_answer_that_ended_in_a_block_is_as_with_cold_caches(server, decoder):
    messages = user(QUESTION)
    *_, last = decoder.stream_generate(messages, 200, policy="full")
    assert last.accepted == len(last.tokens) < len(last.drafted)  # its end was a draft, and not the last one
    first = server.chat(messages, max_tokens=200)
    assert (first.choices[0].finish_reason, first.usage.completion_tokens) == ("stop", last.generation_tokens)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, *user("And without the pears?")]
    steps = list(decoder.stream_generate(messages, 24, policy="full"))
    second = server.chat(messages, max_tokens=24)
    assert second.choices[0].message.content == "".join(step.text for step in steps)
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens
    accepted = second.usage.completion_tokens_details.accepted_prediction_tokens
    assert accepted == sum(step.accepted for step in steps)


@both
def test_the_same_prompt_again_and_a_prompt_that_is_kept_whole_are_answered(server, decoder):
    """mlx-lm issue 1215: nothing is left to read. The last token of an answer is not in the caches."""
    prompt = "def add(a, b):"
    first = server.complete(prompt, max_tokens=12).choices[0].text
    assert server.complete(prompt, max_tokens=12).choices[0].text == first
    kept = server.complete(prompt, max_tokens=11).choices[0].text
    for longer in (prompt + kept, prompt + first, prompt + first):
        answer = server.complete(longer, max_tokens=12)
        assert answer.choices[0].text == decoder.generate(longer, 12, chat=False)
        assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1
    assert server.send("GET", "/health")[0] == 200


@both
def test_clients_that_leave_while_they_wait_in_the_answer_and_in_the_prompt(server, decoder):
    endless_answer = {"prompt": "def part(", "max_tokens": 500, "stream": True} | endless(decoder)

    def counts_at_rest() -> list[float]:
        for gauge in ("running", "waiting"):
            until(lambda gauge=gauge: server.metric(f"vllm:num_requests_{gauge}") == 0)
        return [
            server.metric(f"vllm:{name}_total") for name in ("prompt_tokens", "request_success", "generation_tokens")
        ]

    def read_up_to(connection, begin: bytes) -> None:
        with connection.makefile("rb") as file:
            assert any(line.startswith(begin) for line in iter(file.readline, b""))

    before = counts_at_rest()
    with server.open(endless_answer | {"temperature": 1, "seed": 1}) as first:  # beside which none is decoded
        read_up_to(first, b"data: ")
        with server.open(endless_answer):
            until(lambda: server.metric("vllm:num_requests_waiting") == 1)
    *counted, answered = [now - then for then, now in zip(before, counts_at_rest(), strict=True)]
    assert counted == [len(decoder.tokenizer.encode("def part(")), 1]
    assert 0 < answered < 500
    for beside in (False, True):
        long = {"prompt": f"{beside} e f g h " * 60, "max_tokens": 8}
        with server.open(endless_answer) if beside else nullcontext():
            until(lambda beside=beside: server.metric("vllm:num_requests_running") == beside)
            with server.open(long | {"stream": True}) as leaves:
                read_up_to(leaves, b": keepalive")
        counts_at_rest()
        again = server.complete(**long)
        assert 0 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens - 1
        assert again.choices[0].text == decoder.generate(long["prompt"], 8, chat=False)


def test_an_answer_without_text_and_parts_of_text_go_back_as_one_text(server, decoder):
    begins = decoder.generate(user(QUESTION), 4)[:3]
    empty = server.chat(QUESTION, stop=begins).choices[0].message
    assert empty.content is None
    parts = [{"type": "text", "text": "And without"}, {"type": "text", "text": " the pears?"}]
    turns = [*user(QUESTION), {"role": "assistant", "content": ""}, *user("And without the pears?")]
    asked = [turns[0], empty, {"role": "user", "content": parts}]
    assert server.text(asked, max_tokens=12) == decoder.generate(turns, 12)
    asked[1] = {"role": "assistant"}  # mlx-lm would write None, and the list, where a target has no chat template
    assert checked_body(json.dumps({"messages": asked}).encode(), True, ["bundled"])["messages"] == turns


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/secret"}}
BAD = [
    (b"{", "not valid JSON"),
    (b"\xff\xfe\x00binary\x80", "not valid JSON"),
    (b"[" * 10000, "not valid JSON"),
    (b'{"messages": [], "temperature": NaN}', "NaN"),
    (b"7", "must be a JSON object"),
    ({"messages": []}, "messages must be a list"),
    ({"messages": "Hi"}, "messages must be a list"),
    ({"messages": ["Hi"]}, "an object with a role"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "a role of system"),
    ({"messages": [{"role": "user", "content": 7}]}, "must have a content"),
    ({"messages": [{"role": "user", "content": None}]}, "must have a content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "only parts of type text"),
    ({"messages": [{"role": "user", "content": [IMAGE | {"text": "x"}]}]}, "only parts of type text"),
    ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, "only parts of type text"),
    ({"messages": user("\ud800")}, "cannot take this request"),
    ({"messages": user("x " * 9000)}, "tokens; expected"),
    ({"messages": user("Hi"), "model": "gpt-9"}, "There is no model 'gpt-9'"),
    ({"messages": user("Hi"), "model": 7}, "model"),
    ({"messages": user("Hi"), "max_tokens": 0}, "max_tokens must be"),
    ({"messages": user("Hi"), "max_completion_tokens": 0}, "max_completion_tokens must be"),
    ({"messages": user("Hi"), "temperature": -1}, "temperature must be"),
    ({"messages": user("Hi"), "logit_bias": {"a": 1}}, "logit_bias"),
    ({"messages": user("Hi"), "logit_bias": {"1": []}}, "float"),
    ({"messages": user("Hi"), "logit_bias": {"99999": 1}}, "logit_bias names token 99999"),
    ({"messages": user("Hi"), "top_k": 99999}, "top_k"),
    ({"messages": user("Hi"), "stop": [""]}, "stop must be"),
    ({"messages": user("Hi"), "stop": 7}, "stop must be"),
    ({"messages": user("Hi"), "stream": "yes"}, "stream must be"),
    ({"messages": user("Hi"), "stream_options": 1}, "stream_options"),
    ({"messages": user("Hi"), "n": 2}, "n 2 is not supported"),
    ({"messages": user("Hi"), "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": user("Hi"), "tools": "all"}, "tools"),
    ({"messages": user("Hi"), "tool_choice": "required"}, "tool_choice"),
    ({"messages": user("Hi"), "function_call": {"name": "f"}}, "function_call must be"),
    ({"messages": user("Hi"), "stream": True, "logprobs": True}, "A stream has no log-probabilities"),
    ({"messages": user("Hi"), "top_logprobs": 2}, "top_logprobs needs logprobs"),
    ({"messages": user("Hi"), "adapters": "/etc"}, "adapters"),
    ({"messages": user("Hi"), "chat_template_kwargs": {"truncation": True}}, "leave it out of chat_template_kwargs"),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_bad_input_gets_openais_error_object(server, body, message):
    status, answer = server.post(body)
    assert 400 <= status < 500
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/nothing", None, {}, 404),
        ("POST", "/v1/embeddings", b"{}", {}, 404),
        ("PUT", "/v1/models", b"{}", {}, 501),
        ("POST", "/v1/completions", b"x" * 5_000_000, {}, 413),
        ("POST", "/v1/completions", None, {"Content-Length": "-5"}, 411),
        ("POST", "/v1/completions", None, {"Content-Length": "9" * 5000}, 411),
        ("POST", "/v1/completions", b'{"prompt": ["a", "b"]}', {}, 400),
        ("POST", "/v1/completions", b'{"prompt": ""}', {}, 400),
        ("POST", "/v1/completions", b"{}", {}, 400),
        ("GET", "/v1/models/other", None, {}, 404),
    ],
)
def test_errors_of_http_are_error_objects_too(server, method, path, body, headers, status):
    found, answer = server.send(method, path, body, **headers)
    assert found == status
    assert json.loads(answer)["error"]["message"]


def test_nulls_unknown_fields_and_empty_stream_options_are_harmless(server):
    asked = {"messages": user("Hi"), "max_tokens": 4} | dict.fromkeys(
        ("temperature", "stop", "logprobs", "seed", "tools")
    )
    status, answer = server.post(asked | {"user": "me", "store": False, "n": 1, "response_format": {"type": "text"}})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    status, data = server.send(
        "POST", "/v1/chat/completions", json.dumps(asked | {"stream": True, "stream_options": {}}).encode()
    )
    assert (status, data.endswith(b"data: [DONE]\n\n")) == (200, True)


def test_models_tells_what_is_served_without_a_hub_cache(server):
    (model,) = server.client.models.list()
    assert (model.id, model.engine, model.drafter, model.max_model_len) == ("bundled", "speculative", "bundled", 600)
    assert server.client.models.retrieve("bundled").id == "bundled"
    for path in ("/v1/models?x=1", "/v1/models/b%75ndled", "/v1/models/bundled?x=1"):
        assert server.send("GET", path)[0] == 200
    assert server.post({"messages": user("Hi"), "max_tokens": 1}, "/v1/chat/completions?api-version=1")[0] == 200


def test_metrics_count_drafts_in_vllms_names(server):
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    before = [server.metric(f"vllm:spec_decode_{name}_total") for name in names]
    drafts = server.chat(QUESTION, max_tokens=40).metrics["speculative_decoding"]
    after = [server.metric(f"vllm:spec_decode_{name}_total") for name in names]
    grown = [b - a for a, b in zip(before, after, strict=True)]
    accepted = drafts["num_accepted_draft_tokens"]
    assert grown == [drafts["num_spec_steps"], drafts["num_draft_tokens"], accepted, accepted]
    for gauge in ("running", "waiting"):
        until(lambda gauge=gauge: server.metric(f"vllm:num_requests_{gauge}") == 0)
    until(lambda: server.metric("dflash:prompt_cache_bytes") > 0)


def test_the_log_holds_no_text(server):
    server.text("Say xylophone", max_tokens=5)
    server.post({"messages": user("Say xylophone"), "model": "xylophone"})
    server.post(b'{"messages": xylophone')
    server.send("GET", "/xylophone?xylophone")
    for line in ("GET other: 404", "POST /v1/chat/completions: 200", "POST /v1/chat/completions: 400"):
        until(lambda line=line: line in server.log())  # which is written after the answer
    log = server.log()
    assert "xylophone" not in log
    assert "Traceback" not in log


def test_a_named_drafter_that_does_not_fit_is_an_error_at_start(here):
    with pytest.raises(IncompatibleModelsError, match="made for a target with hidden_size 576"):
        here(models=ModelOptions("bundled", REAL / "smollm2-135m-instruct"))


def test_a_port_that_is_taken_is_one_line(server):
    assert_one_error(invoke("serve", "--port", server.port), "in use")


def test_without_the_extra_and_with_bad_numbers_there_is_one_line(monkeypatch):
    assert_one_error(invoke("serve", "--max-queue", 0), "max_queue must be a whole number of at least 1")
    for name in ("counts", "engine", "generator", "http", "server"):
        monkeypatch.delitem(sys.modules, f"dflash.serving.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert_one_error(invoke("serve"), "install the extra 'serve'")


def test_only_who_knows_the_key_is_answered(here):
    running = here(api_key="secret")
    assert running.text("Hi", max_tokens=3)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer sécret"}):
        status, answer = running.send("GET", "/v1/models", **headers)
        assert (status, json.loads(answer)["error"]["code"]) == (401, "invalid_api_key")
    assert running.send("GET", "/health?x=1")[0] == 200
    with pytest.raises(openai.AuthenticationError):
        running.client.with_options(api_key="other").models.list()
