"""The thread that decodes: mlx-lm's queue and tokenization, our decoding; what is wrong in a request stays in it."""

import argparse
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from itertools import accumulate
from queue import Empty, Queue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import mlx.core as mx
from mlx_lm import server
from mlx_lm.generate import make_text_state_machine

from ..core.backend import wait_for_this_thread
from ..core.errors import DFlashError, one_line
from ..decoding.stream import Answer
from ..decoding.text import TextStream
from ..options import DecodeOptions
from .body import Refused
from .caches import PromptCaches
from .counts import Metrics
from .engine import Engine, Job
from .models import Served
from .options import ServeOptions
from .record import Record

if TYPE_CHECKING:
    from ..generate import DFlashSpeculativeDecoder
    from .http import Handler

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAKE_SECONDS = 1.0
"""How often a handler that waits for the decoding thread looks whether that is alive."""


class Generator(server.ResponseGenerator):
    """The queue of requests and the thread that answers them. They begin in order of arrival.

    Args:
        arguments: What mlx-lm reads of its command line; its ``model`` is the name of the first one.
        served: The models by the names that requests give. One is loaded at a time, in the decoding thread.
        serving: How many requests are decoded and wait, and what is kept of them.
    """

    prompt_cache: PromptCaches

    def __init__(self, arguments: argparse.Namespace, served: dict[str, Served], serving: ServeOptions):
        self.served, self.serving = served, serving
        self.name: str | None = None
        self.engine: Engine | None = None
        self.about: dict[str, dict[str, Any]] = {}
        """What is known of models that have been loaded."""
        self.record: Record | None = None
        self.waiting: list[Handler] = []
        self._lock, self._moved = threading.Lock(), time.monotonic()
        caches = PromptCaches(serving.prompt_caches, serving.prompt_cache_bytes)
        self.metrics = Metrics(
            {
                "vllm:num_requests_running": ("Requests that are decoded.", lambda: self.running),
                "vllm:num_requests_waiting": ("Requests that wait.", lambda: len(self.waiting)),
                "dflash:prompt_cache_bytes": ("Memory of the prompt caches that are kept.", lambda: caches.nbytes),
            }
        )
        # Stands for mlx-lm's provider, of which only these two are read.
        super().__init__(cast(Any, SimpleNamespace(cli_args=arguments, processor=None)), caches)

    # --- asked in the threads of handlers ------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """Whether the thread lives, and has done something lately: an idle one looks for requests all the time."""
        return self.generation_available() and time.monotonic() - self._moved < self.serving.patience

    @property
    def running(self) -> int:
        """How many requests are decoded."""
        engine = self.engine
        return 0 if engine is None else len(engine.jobs)

    def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> Any:
        """Queue a request; its context and its responses. Raises :class:`Refused` if too many wait."""
        self._check_alive()
        with self._lock:
            self.waiting = [client for client in self.waiting if not client.gone()]
            if len(self.waiting) >= self.serving.max_queue:
                raise Refused(503, f"{len(self.waiting)} requests wait already; try again later.", code="overloaded")
            self.waiting.append(request.client)
        answers: Queue[Any] = Queue()
        self.requests.put((answers, request, generation_args))
        told = self._told(answers, request.client, progress_callback)
        return next(told), told

    def _told(self, answers: "Queue[Any]", client: "Handler", progress: Callable[[int, int], None]) -> Iterator[Any]:
        """What the decoding thread says to a client, up to ``None``; errors are raised."""
        while True:
            try:
                told = answers.get(timeout=WAKE_SECONDS)
            except Empty:
                self._check_alive()
                client.still_waits()
                continue
            if told is None:
                return
            if isinstance(told, Exception):
                raise told
            if isinstance(told, tuple):
                progress(*told)
            else:
                yield told

    def between_requests(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the decoding thread when nothing is decoded, after the requests that wait now.

        Raises what it raises, and :class:`Refused` if the thread ends before.
        """
        done: Future[T] = Future()
        self.requests.put((done, action, None))
        while not done.done():
            self._check_alive()
            wait([done], WAKE_SECONDS)
        return done.result()

    def exchange(self, drafter: str | None) -> None:
        """Decode the first model with another drafter from the next request on; ``None`` loads the present one again.

        Raises ``DFlashError`` if it is damaged or of another target: the present one stays.
        """
        name = self.cli_args.model

        def exchange() -> None:  # one after another, so that the present one is that of the last
            served = self.served[name].with_drafter(drafter)
            decoder, about = served.load(self.load(name).decoder.loaded_target)
            self._use(name, decoder, about)
            self.served[name] = served
            logger.info("The drafter is now %s.", served.models.drafter)

        self.between_requests(exchange)

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
            self._drop()

    def _generate(self) -> None:
        next_one = None
        while not self._stop:
            self._moved = time.monotonic()
            next_one = next_one or self._next_request(None if self.running else 0.1)
            if next_one is not None and self._can_begin(next_one[2]):
                self._begin(*next_one)
                next_one = None
            elif self.engine is not None:
                self.engine.step()
        if self.engine is not None:
            self.engine.stop(Refused(503, "The server ends."))

    def _can_begin(self, args: Any) -> bool:
        """Whether a request, or what is done between requests, can begin beside those that are decoded."""
        if args is None or self.engine is None or args.model.model != self.name:
            return not self.running
        return self.engine.can_begin(_batchable(args))

    def _begin(self, answers: Any, request: Any, args: Any) -> None:
        if args is None:
            try:
                answers.set_result(request())
            except BaseException as error:
                answers.set_exception(error)
            return
        with self._lock:
            self.waiting = [client for client in self.waiting if client is not request.client]
        try:
            if request.client.gone():
                raise ConnectionError("The client has gone.")
            try:
                engine = self.load(args.model.model)
            except DFlashError as error:
                reason = f"The model {args.model.model!r} cannot be loaded: {one_line(error)}"
                raise Refused(404, reason, "model", "model_not_found") from error
            engine.begin(self._job(engine, answers.put, request, args))
        except Exception as error:
            answers.put(error)

    def load(self, name: str) -> Engine:
        """The engine of a model, loaded if it is not the present one. Only for the decoding thread.

        Raises ``DFlashError`` if it cannot be loaded. If a folder of it is missing, the present one stays.
        """
        if self.engine is None or self.name != name:
            if self.engine is not None:  # or it would be dropped for nothing
                self.served[name].check()
            self._drop()  # its memory is needed for the next
            mx.clear_cache()
            self._use(name, *self.served[name].load())
        return cast(Engine, self.engine)

    def _use(self, name: str, decoder: "DFlashSpeculativeDecoder", about: dict[str, str]) -> None:
        """Serve ``decoder`` under a name from now on; ``about`` is what /v1/models tells of it."""
        engine = Engine(decoder, self.prompt_cache, self.metrics, self.serving.decode_concurrency)
        self._drop()  # caches hold the context of the drafter before
        self.engine, self.name = engine, name
        self.about[name] = {"max_model_len": decoder.max_seq_length, **about}

    def _drop(self) -> None:
        self.engine = self.name = None
        self.prompt_cache.trim_to(n_sequences=0)
        gc.collect()

    def _job(self, engine: Engine, respond: Callable[[Any], None], request: Any, args: Any) -> Job:
        """A request as the engine takes it, of which its client has heard. Raises :class:`Refused` for a wrong one."""
        decoder = engine.decoder
        tokenizer, limit = decoder.tokenizer, decoder.max_seq_length
        try:
            prompt, segments, kinds, state, _ = self._tokenize(tokenizer, request, args)
            options = _options(decoder, args, max(limit - len(prompt), 0))
            if 0 < len(prompt) < limit:
                decoder._check_request(prompt, options)
        except Exception as error:  # a chat template is a program that comes with the target
            raise Refused(400, f"The target cannot take this request: {one_line(error)}") from error
        request.client.prompt, request.client.decode = list(prompt), tokenizer.decode
        request.client.drafter = self.about[args.model.model]["drafter"]
        if not 0 < len(prompt) < limit:
            reason = f"The prompt has {len(prompt)} tokens; expected 1 to {limit - 1}."
            raise Refused(400, reason, code="context_length_exceeded")
        cache = self.prompt_cache.take(decoder, prompt)
        self.metrics.add("prompt_tokens", len(prompt))
        self.metrics.add("prompt_tokens_cached", len(cache.tokens))
        respond(
            server.GenerationContext(
                has_tool_calling=tokenizer.has_tool_calling,
                has_thinking=tokenizer.has_thinking,
                tool_parser=tokenizer.tool_parser,
                text_sm=make_text_state_machine(tokenizer),  # without stop strings, at which decoding ends itself
                initial_state=state,
                prompt=prompt,
                prompt_cache_count=len(cache.tokens),
            )
        )
        ends = dict(zip(accumulate(map(len, segments[:-1])), kinds, strict=False))
        return Job(
            client=request.client,
            respond=respond,
            tokens=list(prompt),
            ends={} if cache.keeps_all else ends,
            options=options,
            answer=Answer(len(prompt), TextStream(tokenizer.detokenizer, args.stop_words)),
            cache=cache,
            logprobs=args.top_logprobs if args.logprobs else None,
            batchable=_batchable(args),
        )


def _batchable(args: Any) -> bool:
    """Whether a request can be decoded beside others: those share MLX's random numbers, and tell no probabilities."""
    drawn = args.seed is not None and args.sampling.temperature > 0
    return not (drawn or args.logprobs)


def _options(decoder: "DFlashSpeculativeDecoder", args: Any, room: int) -> DecodeOptions:
    """mlx-lm's arguments of a request. Raises ``GenerationError`` for a value out of range."""
    limits = {"max_tokens": min(args.max_tokens, room), "stop_strings": args.stop_words, "seed": args.seed}
    return decoder._request_options(vars(args.sampling) | vars(args.logits) | limits)
