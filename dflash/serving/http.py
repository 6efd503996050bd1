"""What mlx-lm's HTTP handler leaves open: who may ask, what is refused and how, and what is told of the server."""

import hmac
import io
import json
import logging
import select
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from mlx_lm.server import APIHandler

from ..core.errors import DFlashError, one_line
from ..core.values import short
from ..decoding.stream import DFlashResponse
from .body import Refused, checked_body, json_object
from .counts import complete_usage, totals
from .generator import Generator

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 5.0
"""How long a streaming client hears nothing, at most, while it waits."""

CHAT = ("/v1/chat/completions", "/chat/completions")
COMPLETIONS = (*CHAT, "/v1/completions")
DRAFTER = "/v1/drafter"
OPEN = ("/health", "/metrics")
"""Paths that need no key."""


class Handler(APIHandler):
    """Answers one connection."""

    timeout = 60
    """Seconds that a client may take to send its body or to read a piece of the answer."""
    response_generator: Generator
    prompt: list[int]
    drafter: str
    decode: Callable[[list[int]], str]
    """That of the model that answers."""

    def setup(self) -> None:
        super().setup()
        self.steps: list[DFlashResponse] = []
        """What has been decoded of the answer."""
        self.stream = False
        self._sent = 0
        self._heard = time.monotonic()

    # --- who waits for it -------------------------------------------------------------------------------

    def gone(self) -> bool:
        """Whether the client has closed the connection."""
        poll = select.poll()
        try:
            poll.register(self.connection, select.POLLIN)
            return bool(poll.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    def still_waits(self) -> None:
        """Send a streaming client a line now and then; the first brings the headers."""
        if self.gone():
            raise ConnectionError("The client has gone.")
        if self.stream and time.monotonic() - self._heard > KEEP_ALIVE_SECONDS:
            if not self._sent:
                self._set_stream_headers()
                self.end_headers()
            self.wfile.write(b": keepalive\n\n")
            self._heard = time.monotonic()

    # --- requests ---------------------------------------------------------------------------------------

    def parse_request(self) -> bool:
        if understood := super().parse_request():
            self.path, _, _ = self.path.partition("?")  # no query is read
        return understood

    def do_POST(self) -> None:
        self._answered(self._exchange if self.path == DRAFTER else self._complete)

    def do_GET(self) -> None:
        self._answered(self._tell)

    def _complete(self) -> None:
        if self.path not in COMPLETIONS:
            raise Refused(404, f"There is no {self.path}; expected one of {', '.join(COMPLETIONS)}.")
        models = list(self.response_generator.served)
        body = json.dumps(checked_body(self._body(), self.path in CHAT, models)).encode()
        self.rfile = io.BytesIO(body)
        self.headers.replace_header("Content-Length", str(len(body)))
        super().do_POST()

    def _exchange(self) -> None:
        """Decode with another drafter from the next request on."""
        generator, drafter = self.response_generator, json_object(self._body()).get("drafter")
        if not isinstance(drafter, str):
            raise Refused(400, f'Expected {{"drafter": a folder or a hub name}}, got {short(drafter)}.', "drafter")
        try:
            generator.exchange(drafter)
        except DFlashError as error:
            raise Refused(400, f"The drafter stays as it is: {one_line(error)}", "drafter") from error
        self._send(200, self._model(generator.cli_args.model))

    def _body(self) -> bytes:
        length, most = self.headers.get("Content-Length", ""), self.response_generator.serving.max_body_bytes
        if not length.isdecimal() or len(length) > 18:
            raise Refused(411, "The header Content-Length is missing, or no number of bytes.")
        if int(length) > most:
            left = int(length)  # a client that still sends would not read why it is refused
            while left > 0 and (part := self.rfile.read(min(left, 1 << 16))):
                left -= len(part)
            raise Refused(413, f"The request body has {length} bytes; expected at most {most}.")
        return self.rfile.read(int(length))

    def validate_model_parameters(self) -> None:
        try:
            super().validate_model_parameters()
        except (ValueError, TypeError) as error:
            name = "max_completion_tokens" if "max_completion_tokens" in self.body else "max_tokens"
            raise Refused(400, f"{one_line(error)}.".replace("max_tokens", name)) from error

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        request.client = self
        super().handle_completion(request, stop_words)

    def _tell(self) -> None:
        generator = self.response_generator
        if self.path == "/health":
            healthy = generator.is_healthy
            self._send(200 if healthy else 503, {"status": "ok" if healthy else "unavailable"})
        elif self.path == "/metrics":
            self._send(200, generator.metrics.text(), "text/plain; version=0.0.4")
        elif self.path.rstrip("/") == "/v1/models":
            names = generator.served
            self._send(200, {"object": "list", "data": [self._model(name) for name in names]})
        elif (name := unquote(self.path.removeprefix("/v1/models/"))) in generator.served:
            self._send(200, self._model(name))
        else:
            raise Refused(404, f"There is no {self.path}.")

    def _model(self, name: str) -> dict[str, Any]:
        """What is told of a model; of one that has not been loaded yet, its name."""
        generator = self.response_generator
        about = {"id": name, "object": "model", "created": generator.cli_args.created, "owned_by": "dflash"}
        return about | {"loaded": name == generator.name} | generator.about.get(name, {})

    # --- responses --------------------------------------------------------------------------------------

    def generate_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        response = super().generate_response(*args, **kwargs)
        if response["choices"][0]["finish_reason"] is not None:
            self._record()
        if "usage" in response:
            complete_usage(response, self.steps)
            if found := response["choices"][0].get("logprobs"):
                found["content"] = self._logprobs(found["content"], kwargs["tokens"], kwargs["token_logprobs"])
        return response

    def _record(self) -> None:
        """Record the request, unless it forbids that, before the client gets the end of its answer."""
        record, body, steps = self.response_generator.record, self.body, self.steps
        if record is None or body["model"] != self.response_generator.cli_args.model:  # it has one target's
            return
        answer = [token for step in steps for token in step.tokens]
        if not body.get("store", True) or not answer or steps[-1].finish_reason is None:
            return
        messages = body["messages"] if self.path in CHAT else [{"role": "user", "content": body["prompt"]}]
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.logit_bias)
        greedy = self.temperature == 0 and not any(penalties)
        blocks = [(len(step.drafted), step.accepted) for step in steps if step.drafted]
        about = {"chat": self.path in CHAT, "greedy": greedy, "finish_reason": steps[-1].finish_reason}
        about |= {"drafter": self.drafter, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        record.add(messages, self.prompt, answer, **about, blocks=blocks)

    def _logprobs(
        self, content: list[dict[str, Any]], tokens: list[int], logprobs: list[float]
    ) -> list[dict[str, Any]]:
        """Of each token; mlx-lm names any of the likeliest in its place. The end of an answer is no token."""
        count, _, _ = totals(self.steps)
        return [
            {"id": token, "token": self.decode([token]), "logprob": logprob}
            | {"top_logprobs": sorted(entry.get("top_logprobs", ()), key=lambda top: -top["logprob"])}
            for entry, token, logprob in zip(content[:count], tokens, logprobs, strict=False)
        ]

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        response = super().completion_usage_response(*args, **kwargs) | {"object": self.object_type}
        complete_usage(response, self.steps)
        return response

    def _set_completion_headers(self, status_code: int = 200) -> None:
        """Begin a response; what mlx-lm would answer with a text is raised again, for an error object."""
        error = sys.exception()
        if status_code >= 400 and error is not None:
            raise error
        super()._set_completion_headers(status_code)

    def end_headers(self) -> None:
        super().end_headers()
        self._sent = 1

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no HTTP request, or one of a method that there is not."""
        self._send(code, Refused(code, message or "The request is not understood.").body())

    def _answered(self, answer: Callable[[], None]) -> None:
        """Run ``answer``; whatever it raises becomes an error object, or a line of the stream."""
        began, status = time.monotonic(), "200"
        try:
            serving = self.response_generator.serving
            key = serving.admin_key if self.path == DRAFTER else serving.api_key
            if key is None and self.path == DRAFTER:
                raise Refused(403, "Drafters are exchanged where the server was started with --admin-key.")
            given = self.headers.get("Authorization", "").removeprefix("Bearer ").encode()
            if key is not None and self.path not in OPEN and not hmac.compare_digest(given, key.encode()):
                raise Refused(401, "The API key is missing or wrong.", code="invalid_api_key")
            answer()
        except OSError as error:
            status = f"client gone ({type(error).__name__})"
        except Exception as error:
            refused = error if isinstance(error, Refused) else Refused(500, f"The request failed: {one_line(error)}")
            status = f"{refused.status} ({type(refused.__cause__ or error).__name__})"
            if not self._sent:
                self._send(refused.status, refused.body())
            elif self.stream:
                self.wfile.write(f"data: {json.dumps(refused.body())}\n\n".encode())
        finally:
            path = self.path if self.path in (*COMPLETIONS, *OPEN, DRAFTER) else "other"
            tokens, drafted, accepted = totals(self.steps)
            done = f"{tokens} tokens, {accepted} of {drafted} drafts accepted"
            seconds = time.monotonic() - began
            logger.info("%s %s: %s, %s, %.3f s", self.command, path, status, done, seconds)

    def _send(self, status: int, body: dict[str, Any] | bytes, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._headers_buffer: list[bytes] = []  # of a response that had begun and was not sent
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if hasattr(self, "headers"):
            self._set_cors_headers()
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: `_answered` logs each request once, without what is in it."""
