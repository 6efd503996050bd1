"""Servers on loopback: one as a user starts it, others in this process with decoders made for a test."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import openai
import pytest

import dflash
from dflash.adapters.conformance import small_models as small
from dflash.models import ModelOptions
from dflash.options import DecodeOptions
from dflash.policies.base import Policy
from dflash.serving import generator as serving_generator
from dflash.serving import server as serving_server
from dflash.serving.models import Served
from dflash.serving.options import ServeOptions

QUESTIONS = [
    "Tom has 12 pears. He buys 3 bags with 4 pears each. How many pears does he have?",
    "Return the longest word of a sentence.",
    "How can I keep the numbers of at least 9 in a given list in Python?",
    "Write a function that keeps the even numbers, squares each and returns the sum.",
    "Hi",
]
QUESTION = QUESTIONS[0]
SMOLLM2 = Path(__file__).parents[2] / "runs/smollm2-135m/target"

both = pytest.mark.parametrize(
    "target", ["bundled", pytest.param(SMOLLM2, id="smollm2", marks=pytest.mark.slow)], indirect=True
)
"""The test is of SmolLM2, too."""


class Gate(Policy):
    """Lets blocks of `drafts` drafts pass one by one, when it is told to; `steps` counts those that have begun."""

    def __init__(self, drafts: int):
        self.drafts, self.steps, self.open = drafts, 0, threading.Semaphore(0)

    def draft_length(self, most: int) -> int:
        self.steps += 1
        self.open.acquire()
        return min(most, self.drafts)


class Server:
    """Where a server listens, and ways to ask it."""

    def __init__(self, port: int, log: Callable[[], str] = str, key: str = "none", generator=None, process=None):
        self.port, self.log, self.generator, self.process = port, log, generator, process
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=20)

    def chat(self, messages: str | list[dict], **options):
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self.client.chat.completions.create(model="bundled", messages=messages, **options)

    def text(self, messages: str | list[dict], **options) -> str:
        return self.chat(messages, **options).choices[0].message.content or ""

    def complete(self, prompt: str, **options):
        return self.client.completions.create(model="bundled", prompt=prompt, **options)

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()

    def post(self, body: object, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, dict]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, data = self.send("POST", path, raw, **headers)
        return status, json.loads(data)

    def open(self, body: dict, path: str = "/v1/completions") -> socket.socket:
        """A connection on which ``body`` was sent and nothing was read."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        raw = json.dumps(body).encode()
        connection.sendall(f"POST {path} HTTP/1.1\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        return connection

    def metric(self, name: str) -> float:
        text = self.send("GET", "/metrics")[1].decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


def endless(decoder: dflash.DFlashSpeculativeDecoder) -> dict:
    """What a request asks that shall end at its limit only."""
    return {"logit_bias": {str(token): -100 for token in decoder.loaded_target.stop_token_ids()}}


def answered(connection: socket.socket) -> dict:
    """The object that an open connection brings."""
    with connection, connection.makefile("rb") as file:
        head, _, body = file.read().partition(b"\r\n\r\n")
    return json.loads(body) | {"status": int(head.split()[1])}


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def process(*options: str) -> Iterator[Server]:
    """``dflash serve`` in a process of its own."""
    environment = os.environ | {"HF_HUB_CACHE": "/nowhere", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "dflash", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as started:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(iter(started.stderr.readline, "")), daemon=True)
        reader.start()
        try:
            until(lambda: any("Serving" in line for line in lines) or started.poll() is not None, 60)
            port = re.search(r"Serving .*:(\d+)/v1", "".join(lines))
            assert port is not None, "".join(lines)
            yield Server(int(port[1]), lambda: "".join(lines), process=started)
        finally:
            started.terminate()


@pytest.fixture(scope="package")
def target(request) -> str | Path:
    """What is served."""
    served = getattr(request, "param", "bundled")
    if isinstance(served, Path) and not served.exists():
        pytest.skip("SmolLM2 is not here; make runs/smollm2-135m/target/config.json fetches it")
    return served


@pytest.fixture(scope="package")
def server(target) -> Iterator[Server]:
    """The target with its drafter, as a user serves them."""
    limits = ("--max-body-bytes", "20000", "--max-seq-length", "600", "--prefill-step-size", "8")
    with process("--target", str(target), "--served-model-name", "bundled", "--policy", "full", *limits) as running:
        yield running


@pytest.fixture(scope="package")
def decoder(target) -> dflash.DFlashSpeculativeDecoder:
    """What the texts must equal."""
    return dflash.DFlashSpeculativeDecoder.from_pretrained(target, max_seq_length=600)


@pytest.fixture(scope="package")
def model():
    """A small random target."""
    mx.random.seed(0)
    model = small.build("qwen3", seed=3)
    mx.eval(model.parameters())
    return model


@pytest.fixture
def here(monkeypatch) -> Callable[..., Server]:
    """Serve in this process: the decoder that a function makes, or the models of ``models``.

    The thread that decodes goes on after an answer: what is read of it then is waited for, or asked of it.
    """
    stack: list = []
    monkeypatch.setattr(serving_generator, "WAKE_SECONDS", 0.1)

    def serve(make: Callable[[], dflash.DFlashSpeculativeDecoder] | None = None, models=None, **options) -> Server:
        if make is not None:
            about = {"engine": "speculative", "drafter": "made for the test"}
            monkeypatch.setattr(Served, "load", lambda *_: (make(), about))
        serving = ServeOptions(**{"port": 0, "served_model_name": "bundled"} | options)
        decoding = DecodeOptions(max_tokens=60, policy="full")
        context = serving_server.started(models or ModelOptions(), decoding, serving)
        httpd, generator = context.__enter__()
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        stack.append((context, httpd, thread))
        return Server(httpd.server_address[1], generator=generator, key=options.get("api_key", "none"))

    yield serve
    for context, httpd, thread in stack:
        httpd.shutdown()
        thread.join()
        context.__exit__(None, None, None)
