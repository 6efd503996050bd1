"""Drafters are exchanged between requests: no text changes, and one that cannot serve leaves the present one."""

import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

import dflash
from dflash.bundled import REAL
from dflash.models import ModelOptions
from dflash.target.load import PAIR

from .conftest import QUESTION, QUESTIONS, endless, process, until

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A drafter of the bundled target that drafts worse."""
    drafter = dflash.load_drafter(PAIR / "drafter")
    drafter.apply(
        lambda weight: weight + 0.2 * mx.random.normal(weight.shape, key=mx.random.key(0)).astype(weight.dtype)
    )
    dflash.save_drafter(drafter, folder := tmp_path_factory.mktemp("other") / "drafter")
    return folder


def exchange(server, drafter: object, **headers: str) -> tuple[int, dict]:
    return server.post({"drafter": drafter}, "/v1/drafter", **(headers or KEY))


def told(server) -> str:
    return server.client.models.retrieve("bundled").drafter


def test_texts_of_requests_in_flight_do_not_change(here, decoder, other):
    server = here(admin_key="secret")
    asked = QUESTIONS[:4] * 3
    with ThreadPoolExecutor(4) as pool:
        texts = [pool.submit(server.text, question, max_tokens=16) for question in asked]
        for drafter in (other, PAIR / "drafter"):
            status, answer = exchange(server, str(drafter))
            assert (status, answer["drafter"]) == (200, str(drafter))
    expected = {question: decoder.generate(question, 16) for question in asked[:4]}
    assert [text.result() for text in texts] == [expected[question] for question in asked]
    assert told(server) == str(PAIR / "drafter")


def test_a_new_drafter_reads_the_conversation_itself(here, decoder, other):
    """What is kept of a conversation holds the context of the drafter before."""
    server, messages = here(admin_key="secret"), [{"role": "user", "content": QUESTION}]
    first = server.text(messages, max_tokens=16)
    turn = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": QUESTIONS[1]}]
    assert exchange(server, str(other))[0] == 200
    answers = [server.chat(turn, max_tokens=16) for _ in range(2)]
    alone = dflash.DFlashSpeculativeDecoder(decoder.loaded_target, dflash.load_drafter(other))
    cold = sum(step.accepted for step in alone.stream_generate(turn, 16, policy="full"))
    assert [answer.choices[0].message.content for answer in answers] == [decoder.generate(turn, 16)] * 2
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert cached[0] == 0 < cached[1]
    assert [answer.usage.completion_tokens_details.accepted_prediction_tokens for answer in answers] == [cold] * 2


@pytest.fixture
def damaged(other, tmp_path) -> Path:
    shutil.copytree(other, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return tmp_path / "damaged"


def test_a_hangup_while_an_exchange_waits_loads_the_new_one_again(here, other):
    server, begun, ready = here(admin_key="secret"), threading.Event(), threading.Event()
    waiting = server.generator.requests
    with ThreadPoolExecutor(3) as pool:
        # Stands for a request that is decoded.
        pool.submit(server.generator.between_requests, lambda: begun.set() or ready.wait(20))
        assert begun.wait(20)
        answers = []
        for drafter in (str(other), None):
            answers.append(pool.submit(server.generator.exchange, drafter))
            until(lambda: waiting.qsize() == len(answers))
        ready.set()
        assert [answer.result() for answer in answers] == [None, None]
    assert told(server) == str(other)


def test_a_disk_that_does_not_answer_is_told_like_any_error(here):
    """The error is not taken for the end of a wait."""

    def load() -> None:
        raise TimeoutError("The disk does not answer.")

    asked = ThreadPoolExecutor().submit(here().generator.between_requests, load)
    assert str(asked.exception(20)) == "The disk does not answer."


def test_what_cannot_serve_leaves_the_present_drafter(here, decoder, damaged):
    server = here(admin_key="secret", api_key="other")
    refused = [
        ((str(REAL / "smollm2-135m-instruct"), {}), 400, "The drafter stays as it is"),
        ((str(damaged), {}), 400, "damaged"),
        (("/nowhere", {}), 400, "No checkpoint folder"),
        (("", {}), 400, "an empty name"),
        ((7, {}), 400, 'Expected {"drafter"'),
        ((str(damaged), {"Authorization": "Bearer other"}), 401, "key is missing or wrong"),
        ((str(damaged), {"Authorization": "none"}), 401, "key is missing or wrong"),
    ]
    for (drafter, headers), status, message in refused:
        found, answer = exchange(server, drafter, **headers)
        assert (found, message in answer["error"]["message"]) == (status, True), answer
    assert server.post(b"[", "/v1/drafter", **KEY)[0] == 400
    assert told(server) == "bundled"
    assert server.text(QUESTION, max_tokens=16) == decoder.generate(QUESTION, 16)


def test_without_an_admin_key_nobody_exchanges(server, other):
    status, answer = exchange(server, str(other))
    assert (status, "--admin-key" in answer["error"]["message"]) == (403, True)
    assert told(server) == "bundled"


def test_a_plain_server_gets_a_drafter(here, decoder, other):
    server = here(admin_key="secret", models=ModelOptions(target=PAIR / "target", drafter="ngram"))
    assert exchange(server, str(PAIR / "drafter"))[0] == 200
    answer = server.chat(QUESTION, max_tokens=16)
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens >= 0
    assert answer.choices[0].message.content == decoder.generate(QUESTION, 16)


def test_a_hangup_loads_the_folder_again_and_ctrl_c_ends_the_process(other, damaged, decoder, tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    folder = tmp_path / "mine"
    shutil.copytree(PAIR / "drafter", folder)
    models = ("--target", str(PAIR / "target"), "--drafter", str(folder), "--served-model-name", "bundled")
    with process(*models) as server:
        for source, message in ((damaged, "The drafter stays as it is"), (other, "The drafter is now")):
            shutil.copytree(source, folder, dirs_exist_ok=True)
            server.process.send_signal(signal.SIGHUP)
            until(lambda message=message: message in server.log(), 30)
            assert server.text(QUESTION, max_tokens=16) == decoder.generate(QUESTION, 16)
        asked = {"prompt": "def f(", "max_tokens": 5000, "stream": True} | endless(decoder)
        with server.open(asked) as connection, connection.makefile("rb") as file:
            assert any(line.startswith(b"data: ") for line in iter(file.readline, b""))
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(20) == 0
            assert b'"finish_reason": "' not in (rest := file.read())
        assert b"The server ends." in rest
        until(lambda: "Stopped." in server.log())  # which another thread reads
        assert "Traceback" not in server.log()
