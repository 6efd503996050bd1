"""How requests are decoded: a lone one by the decoder's own loop, several at once in its batch. No HTTP here.

A request moves from the loop to the batch when another one comes, with its caches and what it has answered. The batch
ends with its last request; if it fails, its requests go on in the loop, one after another. So every request gets the
text that it has alone.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.server import Response, _format_top_logprobs

from ..batches import ALONE, tapped
from ..core.errors import IncompatibleModelsError, one_line
from ..decoding.admission import SpeculativeGenerator
from ..decoding.batch import RowBlock, Tapped
from ..decoding.sampling import Sampler
from ..decoding.stream import Answer, DFlashResponse, Step
from ..options import DecodeOptions

if TYPE_CHECKING:
    from ..generate import DFlashSpeculativeDecoder
    from ..prompts.prompt_cache import PromptCache
    from .caches import PromptCaches
    from .counts import Metrics
    from .http import Handler

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A request that is decoded.

    Args:
        client: Who asked.
        respond: Takes what mlx-lm's handlers read of a request: its progress, responses, an error, ``None`` at the end.
        tokens: The prompt, then the answer.
        ends: Where parts of the prompt end with which others may begin, and mlx-lm's names of these parts.
        options: How it is decoded.
        answer: Makes responses of its steps.
        cache: What is known of its tokens; it belongs to the batch while that decodes the request.
        logprobs: How many likeliest tokens are told of each token, ``None`` for no log-probabilities at all.
        batchable: Whether it can be decoded beside others.
    """

    client: "Handler"
    respond: Callable[[Any], None]
    tokens: list[int]
    ends: dict[int, str]
    options: DecodeOptions
    answer: Answer
    cache: "PromptCache"
    logprobs: int | None
    batchable: bool
    sampled: "Sampled | None" = None

    def __post_init__(self) -> None:
        self._begun = len(self.tokens)

    @property
    def left(self) -> int:
        """Most tokens that may follow."""
        assert self.options.max_tokens is not None
        return self._begun + self.options.max_tokens - len(self.tokens)

    @property
    def finish(self) -> str:
        """Why the answer ended, ``"abort"`` before its end."""
        steps = self.client.steps
        return (steps and steps[-1].finish_reason) or "abort"


class Engine:
    """Decodes requests with one decoder, step by step.

    Args:
        decoder: Its policy, caches and prompt steps hold for all requests.
        store: Keeps prompt caches.
        metrics: Count every step, and every request before its client hears the end.
        most: Most requests that are decoded at once.

    Raises ``DFlashError`` for options of caches, or a tree, that do not fit the model.
    """

    def __init__(self, decoder: "DFlashSpeculativeDecoder", store: "PromptCaches", metrics: "Metrics", most: int):
        self.decoder, self.jobs = decoder, list[Job]()
        self._store, self._metrics, self._most = store, metrics, most
        self._loop: Generator[Step | None, None, None] | None = None
        self._batch: SpeculativeGenerator | None = None
        self._rows: dict[int, Job] = {}
        self._model: Tapped | None = None
        options = decoder._request_options({})
        cache = decoder.make_prompt_cache()  # at once, or each request would fail
        if options.tree is not None:
            decoder.loaded_target.check_trees(cache.target_cache)
        alone = [name for name in ALONE if name in options.asked()]
        try:
            if most > 1 and not alone:
                cache.row()
                self._model = tapped(decoder, options)
        except IncompatibleModelsError as error:
            alone = [one_line(error)]
        if alone:
            logger.info("Requests are decoded one after another: %s", alone[0])

    def can_begin(self, batchable: bool) -> bool:
        """Whether one more request can begin now."""
        together = batchable and self._model is not None and all(job.batchable for job in self.jobs)
        return not self.jobs or (together and len(self.jobs) < self._most)

    def begin(self, job: Job) -> None:
        """Decode one more request from now on."""
        self.jobs.append(job)
        if len(self.jobs) > 1:
            self._close_loop()
            for waiting in [job for job in self.jobs if job not in self._rows.values()]:
                try:
                    self._insert(waiting)
                except Exception as error:
                    self._end(waiting, error)

    def step(self) -> None:
        """A block of every request, or a part of its prompt."""
        for job in [job for job in self.jobs if job.client.gone()]:
            self._end(job, ConnectionError("The client has gone."))
        if self._rows:
            self._step_batch()
        elif self.jobs:
            job = self.jobs[0]
            try:
                self._loop = self._loop or self._alone(job)
                step = next(self._loop)
                if step is not None and self._answer(job, step):
                    self._end(job)
            except Exception as error:
                self._end(job, error)

    def stop(self, error: Exception) -> None:
        """End all requests with ``error``."""
        for job in list(self.jobs):
            self._end(job, error)

    # --- one alone --------------------------------------------------------------------------------------

    def _alone(self, job: Job) -> Generator[Step | None, None, None]:
        """The steps of a request after what its tokens have already, and ``None`` for each part of its prompt."""
        step_size, cached, length = job.options.prefill_step_size, len(job.cache.tokens), len(job.tokens)
        for end in sorted({*range(cached + step_size, length, step_size), *(e for e in job.ends if e > cached)}):
            self.decoder.cache_prompt(job.tokens[:end], job.cache, step_size)
            job.respond((end, length))
            if end in job.ends:
                self._store.keep(copy.deepcopy(job.cache), job.ends[end])
            yield None
        options = replace(job.options, max_tokens=job.left, prompt_cache=job.cache)
        if job.logprobs is not None:
            job.sampled = Sampled(options.build_sampler(self.decoder.tokenizer))
            options = replace(options, sampler=job.sampled, temp=0, top_p=0, min_p=0, top_k=0, xtc_probability=0)
        yield from self.decoder._steps(list(job.tokens), options)

    def _close_loop(self) -> None:
        loop, self._loop = self._loop, None
        try:
            if loop is not None:
                loop.close()
        except Exception as error:  # of a drafter that is given the last plain steps; then the cache is empty
            logger.warning("The caches of a request are not kept: %s", one_line(error))

    # --- several at once --------------------------------------------------------------------------------

    def _insert(self, job: Job) -> None:
        """Make the request a row of the batch, to which it goes with what its caches hold."""
        options, decoder = job.options, self.decoder
        if self._batch is None:
            assert self._model is not None
            self._batch = SpeculativeGenerator(self._model, self._most, options.prefill_step_size)
        held = job.cache.begin(job.tokens)
        ends = [held, *(end for end in sorted(job.ends) if end > held), len(job.tokens)]
        stops = decoder.loaded_target.stop_token_ids() if options.stop_token_ids is None else options.stop_token_ids
        (uid,) = self._batch.insert_segments(
            [[job.tokens[a:b] for a, b in pairwise(ends)]],
            [job.left],
            [job.cache.row()],
            [job.tokens[:held]],
            [options.build_sampler(decoder.tokenizer)],
            [options.build_processors()],
            [StopSequences([[token] for token in stops])],
        )
        self._rows[uid] = job

    def _step_batch(self) -> None:
        assert self._batch is not None
        try:
            with self.decoder.loaded_target.alone(wait=True):
                prompts, blocks = self._batch.next()
            for part in prompts:
                if (job := self._rows[part.uid]).ends and part.end_of_segment and not part.end_of_prompt:
                    layers, tokens = self._batch.extract_cache([part.uid])[part.uid]
                    if len(tokens) in job.ends:
                        self._store.keep(copy.deepcopy(job.cache.of_row(layers, tokens)), job.ends[len(tokens)])
                job.respond(part.progress)
        except Exception as error:
            self._give_up_batch(error)
            return
        for block in blocks:
            if block.uid not in self._rows:
                return  # the batch was given up meanwhile
            job = self._rows[block.uid]
            try:
                if block.error is not None:
                    raise block.error
                if self._answer(job, Step(block.block.tokens, block.block, block.finish_reason)):
                    self._end(job, row=block)
            except Exception as error:
                self._end(job, error)

    def _give_up_batch(self, error: Exception) -> None:
        logger.warning("The requests that are decoded go on one after another: %s", one_line(error))
        if self._batch is not None:
            self._batch.close()
        for job in self._rows.values():
            job.batchable, job.cache = False, self._store.take(self.decoder, job.tokens)
        self._batch, self._rows = None, {}

    # --- of both ----------------------------------------------------------------------------------------

    def _answer(self, job: Job, step: Step) -> bool:
        """Tell what became certain in a step; returns whether the answer ends there."""
        job.tokens += step.tokens
        response = job.answer.add(step)
        job.client.steps.append(response)
        self._metrics.step(response)
        for told in _told(job, response, self.decoder.tokenizer):
            job.respond(told)
        return response.finish_reason is not None

    def _end(self, job: Job, error: Exception | None = None, row: RowBlock | None = None) -> None:
        """Let the request go, tell its client why, and keep its caches unless they may be wrong.

        ``row`` is the last block of one that the batch has let go.
        """
        self._metrics.add("request_success", 1, job.finish)
        for told in [error] if error else _end_of_answer(job.finish):
            job.respond(told)
        keep = error is None or isinstance(error, ConnectionError)
        uid = next((uid for uid, other in self._rows.items() if other is job), None)
        if uid is not None:
            assert self._batch is not None
            del self._rows[uid]
            try:
                held = self._batch.remove([uid], return_prompt_caches=keep).get(uid)
                if held is None and row is not None:
                    held = row.prompt_cache, row.all_tokens
                if held is not None:
                    job.cache = job.cache.of_row(*held)
            except Exception as fault:
                keep = False
                self._give_up_batch(fault)
            if self._batch is not None and not self._rows:
                self._batch.close()
                self._batch = None
        elif job is self.jobs[0]:
            self._close_loop()
        self.jobs.remove(job)
        if keep:
            self._store.keep(job.cache)


def _told(job: Job, response: DFlashResponse, tokenizer: Any) -> Iterator[Response]:
    """A step in mlx-lm's form: a response for each token if log-probabilities are told, or else one.

    The text of a step comes with its last token.
    """
    if job.sampled is None or not response.tokens:
        yield _response(response.text)
        return
    texts = [""] * (len(response.tokens) - 1) + [response.text]
    for text, token, row_V in zip(texts, response.tokens, job.sampled.rows_of(response), strict=True):
        likeliest = _format_top_logprobs(row_V, job.logprobs or 0, tokenizer)
        yield _response(text, None, token, cast(float, row_V[token].item()), likeliest)


def _end_of_answer(finish: str) -> Iterator[Response | None]:
    """The end has no token of its own. mlx-lm drops text that may begin a tag at "stop", so "length" comes before."""
    yield _response("", "length")
    if finish == "stop":
        yield _response("", "stop")
    yield None


def _response(text: str, finish: str | None = None, token: int = 0, logprob: float = 0.0, top: Any = ()) -> Response:
    return Response(text, token, logprob, finish, top)


class Sampled:
    """A sampler that keeps the log-probabilities ``[V]`` that it sampled from, until their tokens are certain."""

    def __init__(self, sampler: Sampler):
        self._sampler = sampler
        self._sampled: list[mx.array] = []
        self._committed: deque[mx.array] = deque()

    def __call__(self, logprobs_1V: mx.array) -> mx.array:
        """Sample, as the sampler does."""
        self._sampled.append(logprobs_1V[0])
        return self._sampler(logprobs_1V)

    def rows_of(self, step: DFlashResponse) -> list[mx.array]:
        """One row for each of the step's tokens. Rows after its block are dropped; plain steps sample one ahead."""
        kept = step.accepted + 1
        self._committed.extend(self._sampled[:kept])
        self._sampled = [] if step.drafted else self._sampled[kept:]
        return [self._committed.popleft() for _ in step.tokens]
