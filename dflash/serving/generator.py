"""The thread that decodes: mlx-lm's queue and tokenization, our decoding; what is wrong in a request stays in it."""

import argparse
import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import accumulate
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
from mlx_lm import server
from mlx_lm.generate import make_text_state_machine

from ..core.backend import wait_for_this_thread
from ..core.errors import one_line
from ..decoding.stream import Answer
from ..decoding.text import TextStream
from ..options import DecodeOptions
from .body import Refused
from .caches import PromptCaches
from .counts import Metrics
from .engine import Engine, Job
from .record import Record

if TYPE_CHECKING:
    from ..generate import DFlashSpeculativeDecoder
    from .http import Handler

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAKE_SECONDS = 1.0
"""How often a handler that waits for the decoding thread looks whether that is alive."""

Loader = Callable[[], "tuple[DFlashSpeculativeDecoder, dict[str, str]]"]
"""Loads a decoder; with it comes what /v1/models tells of it."""


class Request(server.CompletionRequest):
    """A request that knows its client."""

    client: "Handler"


class Provider(server.ModelProvider):
    """The models that are served, one at a time, loaded in the decoding thread.

    Args:
        arguments: mlx-lm's.
        loaders: By the names that requests give; the first one is loaded at the start.
    """

    def __init__(self, arguments: argparse.Namespace, loaders: dict[str, Loader]):
        super().__init__(arguments)
        self.loaders = loaders
        self.ready: Future[Engine] = Future()
        """The first one, or the error."""
        self.name: str | None = None
        self.engine: Engine | None = None
        self.about: dict[str, dict[str, Any]] = {}
        """What is known of those that have been loaded."""


class Generator(server.ResponseGenerator):
    """The queue of requests and the thread that answers them. They begin in order of arrival."""

    model_provider: Provider
    prompt_cache: PromptCaches

    def __init__(
        self,
        provider: Provider,
        caches: PromptCaches,
        metrics: Metrics,
        most: int,
        longest_queue: int,
        patience: float,
    ):
        self.metrics, self._most, self._longest_queue, self._patience = metrics, most, longest_queue, patience
        self._lock, self._here = threading.Lock(), threading.local()
        self.waiting: list[Handler] = []
        self.record: Record | None = None
        self.exchange: Callable[[str | None], None]
        self._moved = time.monotonic()
        super().__init__(provider, caches)

    # --- asked in the threads of handlers ------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """Whether the thread lives, and has done something lately: an idle one looks for requests all the time."""
        return self.generation_available() and time.monotonic() - self._moved < self._patience

    @property
    def running(self) -> int:
        """How many requests are decoded."""
        engine = self.model_provider.engine
        return 0 if engine is None else len(engine.jobs)

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

    def between_requests(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the decoding thread when nothing is decoded, after the requests that wait now.

        Raises what it raises, and :class:`Refused` if the thread ends before.
        """
        done: Future[T] = Future()
        self.requests.put((done, action, None))
        while True:
            self._check_alive()
            try:
                return done.result(WAKE_SECONDS)
            except TimeoutError:
                continue

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

    # --- the decoding thread -------------------------------------------------------------------------------

    def _run_generate(self) -> None:
        wait_for_this_thread()
        try:
            self._generate()
        except BaseException as error:
            self._generation_failed = True
            logger.error("The decoding thread has ended: %s: %s", type(error).__name__, one_line(error))
        finally:  # here, since other threads may not free arrays of this one
            self.model_provider.engine = None
            self.prompt_cache.trim_to(n_sequences=0)
            gc.collect()

    def _generate(self) -> None:
        provider, next_one = self.model_provider, None
        try:
            provider.ready.set_result(self.load(next(iter(provider.loaders))))
        except BaseException as error:
            provider.ready.set_exception(error)
            raise
        while not self._stop:
            self._moved = time.monotonic()
            next_one = next_one or self._next_request(None if self.running else 0.1)
            if next_one is not None and self._can_begin(*next_one[1:]):
                self._begin(*next_one)
                next_one = None
            elif provider.engine is not None:
                provider.engine.step()
        if provider.engine is not None:
            provider.engine.stop(Refused(503, "The server ends."))

    def _can_begin(self, request: Any, args: Any) -> bool:
        """Whether a request, or what is done between requests, can begin beside those that are decoded."""
        engine = self.model_provider.engine
        if args is None or engine is None or args.model.model != self.model_provider.name:
            return not self.running
        return engine.can_begin(_batchable(args))

    def _begin(self, queue: Any, request: Any, args: Any) -> None:
        if args is None:
            try:
                queue.set_result(request())
            except BaseException as error:
                queue.set_exception(error)
            return
        with self._lock:
            self.waiting = [client for client in self.waiting if client is not request.client]
        try:
            if request.client.gone():
                raise ConnectionError("The client has gone.")
            engine = self.load(args.model.model)
            job = self._job(engine, queue, request, args)
            queue.put(job.context)
            engine.begin(job)
        except Exception as error:
            queue.put(error)

    def load(self, name: str) -> Engine:
        """The engine of a model, loaded if it is not the present one. Only for the decoding thread."""
        provider = self.model_provider
        if provider.engine is None or provider.name != name:
            provider.engine = provider.name = None  # its memory is needed for the next
            self.prompt_cache.trim_to(n_sequences=0)
            gc.collect()
            mx.clear_cache()
            decoder, about = provider.loaders[name]()
            return self.use(name, decoder, **about)
        return provider.engine

    def use(self, name: str, decoder: "DFlashSpeculativeDecoder", **about: str) -> Engine:
        """Serve ``decoder`` under a name from now on, while nothing is decoded. Only for the decoding thread.

        ``about`` is what /v1/models tells of it.
        """
        provider = self.model_provider
        self.prompt_cache.trim_to(n_sequences=0)  # they hold the context of the drafter before
        provider.engine = Engine(decoder, self.prompt_cache, self.metrics.step, self._ended, self._most)
        provider.name = name
        provider.about[name] = {"max_model_len": decoder.max_seq_length, **about}
        return provider.engine

    def _job(self, engine: Engine, queue: "Queue[Any]", request: Any, args: Any) -> Job:
        """A request as the engine takes it. Raises :class:`Refused` for what the client has got wrong."""
        decoder = engine.decoder
        tokenizer, limit = decoder.tokenizer, decoder.max_seq_length
        try:
            prompt, segments, kinds, state, _ = self._tokenize(tokenizer, request, args)
            options = _options(decoder, args, max(limit - len(prompt), 0))
        except Exception as error:  # a chat template is a program that comes with the target
            raise Refused(400, f"The target cannot take this request: {one_line(error)}") from error
        request.client.counts.prompt, request.client.decode = list(prompt), tokenizer.decode
        if not 0 < len(prompt) < limit:
            reason = f"The prompt has {len(prompt)} tokens; expected 1 to {limit - 1}."
            raise Refused(400, reason, code="context_length_exceeded")
        cache = self.prompt_cache.take(decoder, prompt)
        self.metrics.add("prompt_tokens", len(prompt))
        self.metrics.add("prompt_tokens_cached", len(cache.tokens))
        context = server.GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=make_text_state_machine(tokenizer),  # without stop strings, at which decoding ends itself
            initial_state=state,
            prompt=prompt,
            prompt_cache_count=len(cache.tokens),
        )
        ends = dict(zip(accumulate(map(len, segments[:-1])), kinds, strict=False))
        return Job(
            client=request.client,
            respond=queue.put,
            context=context,
            tokens=list(prompt),
            ends={} if cache.keeps_all else ends,
            options=options,
            answer=Answer(len(prompt), TextStream(tokenizer.detokenizer, args.stop_words)),
            cache=cache,
            logprobs=args.top_logprobs if args.logprobs or args.top_logprobs > 0 else None,
            batchable=_batchable(args),
        )

    def _ended(self, job: Job) -> None:
        """Called before a client is told the end of its answer."""
        self.metrics.add("request_success", 1, job.finish)


def _batchable(args: Any) -> bool:
    """Whether a request can be decoded beside others: those share MLX's random numbers, and tell no probabilities."""
    drawn = args.seed is not None and args.sampling.temperature > 0
    return not (drawn or args.logprobs or args.top_logprobs > 0)


def _options(decoder: "DFlashSpeculativeDecoder", args: Any, room: int) -> DecodeOptions:
    """mlx-lm's arguments of a request. Raises ``GenerationError`` for what does not fit the model."""
    limits = {"max_tokens": min(args.max_tokens, room), "stop_strings": args.stop_words, "seed": args.seed}
    options = decoder._request_options(vars(args.sampling) | vars(args.logits) | limits)
    options.check_vocabulary(decoder.loaded_target.vocab_size)
    return options
