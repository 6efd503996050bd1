"""The thread that decodes: mlx-lm's, with its queue, tokenization, tools and prompt cache, and its faults mended."""

import argparse
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from mlx_lm import server
from mlx_lm.generate import StopSequences, make_text_state_machine
from mlx_lm.models.cache import LRUPromptCache

from ..core.backend import wait_for_this_thread
from ..core.errors import one_line
from ..options import decode_options
from .body import Refused
from .engine import Asked, ServedModel

if TYPE_CHECKING:
    from .http import Handler

logger = logging.getLogger(__name__)

UNKNOWN = -1
"""A token that no text has, so that the last one of a prompt is never found."""

WAKE_SECONDS = 1.0
"""How often a handler that waits for the decoding thread looks whether that is alive."""


class Request(server.CompletionRequest):
    """A request that knows its client."""

    client: "Handler"


class Provider(server.ModelProvider):
    """Loads one model, in the decoding thread; ``ready`` holds it, or the error."""

    model: Any
    model_key: Any

    def __init__(self, arguments: argparse.Namespace, make: Callable[[], ServedModel]):
        super().__init__(arguments)
        self._make = make
        self.ready: Future[ServedModel] = Future()

    def load(self, *_names: Any) -> tuple[ServedModel, Any]:
        """The model and its tokenizer. Requests for others were refused before."""
        if self.model is None:
            try:
                self.model = self._make()
            except BaseException as error:
                self.ready.set_exception(error)
                raise
            self.tokenizer, self.model_key = self.model.decoder.tokenizer, (self.cli_args.model, None, None)
            self.ready.set_result(self.model)
        return self.model, self.tokenizer


class PromptCaches(LRUPromptCache):
    """mlx-lm's store of prompt caches, by the tokens that they hold.

    mlx-lm's key has every token that was answered, of which the caches may hold fewer. And a prompt that is stored
    leaves it nothing to read, which ended its thread (mlx-lm issue 1215).
    """

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], **kinds: Any) -> None:
        """Store the caches by their own tokens."""
        if held := prompt_cache[0].tokens:
            super().insert_cache(model, held, prompt_cache, **kinds)

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """A copy of the caches that hold most of ``tokens`` but the last, and the tokens that they lack."""
        caches, _ = super().fetch_nearest_cache(model, [*tokens[:-1], UNKNOWN])
        return caches, tokens[len(caches[0].tokens) if caches else 0 :]


class Answers:
    """The queue of one request's responses. Text that may begin a tag comes before "stop", where mlx-lm drops it."""

    def __init__(self, queue: "Queue[Any]"):
        self._queue = queue

    def put(self, response: Any) -> None:
        """Pass it on."""
        if isinstance(response, server.Response) and response.finish_reason == "stop":
            self._queue.put(replace(response, finish_reason="length"))
        self._queue.put(response)


class Generator(server.ResponseGenerator):
    """The queue of requests and the thread that answers them, in order of arrival."""

    model_provider: Provider

    def __init__(self, provider: Provider, caches: PromptCaches, longest_queue: int, patience: float):
        self._longest_queue, self._patience = longest_queue, patience
        self._lock, self._here = threading.Lock(), threading.local()
        self.waiting: list[Handler] = []
        self.running = 0
        self._moved = time.monotonic()
        super().__init__(provider, caches)

    @property
    def is_healthy(self) -> bool:
        """Whether the thread lives, and has done something lately: an idle one looks for requests all the time."""
        return self.generation_available() and time.monotonic() - self._moved < self._patience

    def still_serves(self) -> None:
        """Note a step of the thread. Raises :class:`Refused` once the server ends."""
        self._moved = time.monotonic()
        if self._stop:
            raise Refused(503, "The server ends.")

    def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> Any:
        """Queue a request. Raises :class:`Refused` if too many wait."""
        with self._lock:
            self.waiting = [client for client in self.waiting if not client.gone()]
            if len(self.waiting) >= self._longest_queue:
                raise Refused(503, f"{len(self.waiting)} requests wait already; try again later.", code="overloaded")
            self.waiting.append(request.client)
        self._here.client = request.client
        self._check_alive()
        return super().generate(request, generation_args, progress_callback)

    def _await_response(self, response_queue: "Queue[Any]") -> Any:
        while True:
            try:
                return response_queue.get(timeout=WAKE_SECONDS)
            except Empty:
                self._check_alive()
                self._here.client.still_waits()

    def _check_alive(self) -> None:
        if not self.generation_available():
            raise Refused(503, "The decoding thread has ended; restart the server.")

    def _run_generate(self) -> None:
        wait_for_this_thread()
        try:
            self._generate()
        except BaseException as error:
            self._generation_failed = True
            logger.error("The decoding thread has ended: %s: %s", type(error).__name__, one_line(error))

    def _next_request(self, timeout: float | None = None) -> Any:
        self._moved = time.monotonic()
        return super()._next_request(timeout)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """As mlx-lm does; what is wrong with a prompt or an option is the client's error."""
        decoder = self.model_provider.model.decoder
        try:
            asked = {"logit_bias": args.logits.logit_bias, "top_k": args.sampling.top_k}
            decode_options(asked).check_vocabulary(decoder.loaded_target.vocab_size)
            found = super()._tokenize(tokenizer, request, args)
        except Exception as error:  # a chat template is a program that comes with the target
            raise Refused(400, f"The target cannot take this request: {one_line(error)}") from error
        length = len(found[0])
        if not 0 < length < decoder.max_seq_length:
            reason = f"The prompt has {length} tokens; expected 1 to {decoder.max_seq_length - 1}."
            raise Refused(400, reason, code="context_length_exceeded")
        return found

    def _make_state_machine(self, model_key: Any, tokenizer: Any, stop_words: Any) -> Any:
        """Nothing that stops, since decoding ends at stop tokens and stop strings itself."""
        return StopSequences(), make_text_state_machine(tokenizer)

    def _serve_single(self, request: Any, stream: Any) -> None:
        queue, asked, args = request
        with self._lock:
            self.waiting = [client for client in self.waiting if client is not asked.client]
        model = self.model_provider.model
        model.asked = Asked(asked.client, args.stop_words, args.logprobs or args.top_logprobs > 0)
        self.running = 1
        try:
            if asked.client.gone():
                queue.put(ConnectionError("The client has gone."))
            else:
                super()._serve_single((Answers(queue), asked, args), stream)
        finally:
            self.running = 0
            model.metrics.add("request_success", 1, model.asked.finish)
