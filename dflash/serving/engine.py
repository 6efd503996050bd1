"""How a request is decoded: the function that takes the place of mlx-lm's ``stream_generate`` in its server.

This is the one place that knows the decoder. What else the server may decode with is exchanged here.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationResponse

from ..decoding.sampling import LogitsProcessor, Sampler
from .counts import Metrics

if TYPE_CHECKING:
    from ..decoding.stream import DFlashResponse
    from ..generate import DFlashSpeculativeDecoder
    from ..prompts.prompt_cache import PromptCache
    from .http import Handler


@dataclass
class Asked:
    """What mlx-lm's server does not hand to its ``stream_generate``, and how the request ended."""

    client: "Handler"
    stop_words: list[str]
    logprobs: bool
    finish: str = "abort"


class ServedModel:
    """What stands for the model in mlx-lm's server: a decoder, and the request that it decodes.

    ``still_serves`` is told of each step, and raises once the server ends. ``plain`` says why there is no drafter,
    where none was found.
    """

    def __init__(
        self, decoder: "DFlashSpeculativeDecoder", metrics: Metrics, still_serves: Callable[[], None], plain: str
    ):
        self.decoder, self.metrics, self.still_serves, self.plain = decoder, metrics, still_serves, plain
        self.asked: Asked | None = None
        self.no_logprobs = np.broadcast_to(np.float32(0), decoder.loaded_target.vocab_size)

    def make_cache(self) -> "list[PromptCache]":
        """The caches of target and drafter as one, for mlx-lm's list of caches."""
        return [self.decoder.make_prompt_cache()]


def stream_generate(
    model: ServedModel,
    tokenizer: Any,
    prompt: list[int],
    *,
    max_tokens: int,
    sampler: Sampler,
    logits_processors: Sequence[LogitsProcessor],
    prompt_cache: "list[PromptCache]",
    prompt_progress_callback: Callable[[int, int], None],
    prefill_step_size: int,
    **_of_other_engines: Any,
) -> Iterator[GenerationResponse]:
    """Decode ``prompt``, which goes on after the tokens of the cache: a response for each token, and one at the end.

    The text of a step comes with its last token. The end has no token of its own, since mlx-lm drops the text of a
    response that ends with ``"stop"``. It does not come if the client goes away; then decoding ends after a block or a
    part of the prompt, and the cache holds what was read and written.
    """
    (cache,), asked, decoder = prompt_cache, model.asked, model.decoder
    assert asked is not None
    tokens, cached = [*cache.tokens, *prompt], len(cache.tokens)
    model.metrics.add("prompt_tokens", len(tokens))
    model.metrics.add("prompt_tokens_cached", cached)
    for end in range(cached + prefill_step_size, len(tokens), prefill_step_size):
        model.still_serves()
        if asked.client.gone():
            return
        decoder.cache_prompt(tokens[:end], cache, prefill_step_size)
        prompt_progress_callback(end, len(tokens))
    recorder = Recorder(sampler) if asked.logprobs else None
    no_row = mx.zeros(decoder.loaded_target.vocab_size) if recorder else model.no_logprobs
    steps = decoder.stream_generate(
        tokens,
        max_tokens=min(max_tokens, decoder.max_seq_length - len(tokens)),
        stop_strings=asked.stop_words or None,
        sampler=recorder or sampler,
        logits_processors=logits_processors,
        prompt_cache=cache,
        prefill_step_size=prefill_step_size,
    )
    with closing(steps):  # type: ignore[type-var]
        for step in steps:
            model.still_serves()
            if asked.client.gone():
                return
            asked.client.counts.add(step)
            model.metrics.step(step)
            rows = recorder.rows_of(step) if recorder else [no_row] * len(step.tokens)
            texts = [""] * (len(step.tokens) - 1) + [step.text]
            for text, token, row in zip(texts, step.tokens or [0], rows or [no_row], strict=True):
                yield _response(step, text, token, row, None)
    asked.finish = step.finish_reason or "length"
    yield _response(step, "", 0, no_row, asked.finish)


def _response(step: "DFlashResponse", text: str, token: int, row: Any, finish: str | None) -> GenerationResponse:
    return GenerationResponse(
        text=text,
        token=token,
        logprobs=row,
        from_draft=step.accepted > 0,
        prompt_tokens=step.prompt_tokens,
        prompt_tps=step.prompt_tps,
        generation_tokens=step.generation_tokens,
        generation_tps=step.generation_tps,
        peak_memory=step.peak_memory,
        finish_reason=finish,
    )


class Recorder:
    """A sampler that keeps the log-probabilities ``[V]`` that it sampled from, until their tokens are certain."""

    def __init__(self, sampler: Sampler):
        self._sampler = sampler
        self._sampled: list[mx.array] = []
        self._committed: deque[mx.array] = deque()

    def __call__(self, logprobs_1V: mx.array) -> mx.array:
        """Sample, as the sampler does."""
        self._sampled.append(logprobs_1V[0])
        return self._sampler(logprobs_1V)

    def rows_of(self, step: "DFlashResponse") -> list[mx.array]:
        """One row for each of the step's tokens. Rows after its block are dropped; plain steps sample one ahead."""
        kept = step.accepted + 1
        self._committed.extend(self._sampled[:kept])
        self._sampled = [] if step.drafted else self._sampled[kept:]
        return [self._committed.popleft() for _ in step.tokens]
