"""Many requests through one running batch: admitted as rows get free, answered block by block, cut at stop strings."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from mlx_lm.generate import StopSequences

from .batch import SpeculativeGenerator, Tapped
from .sampling import GREEDY, DrawingSampler, LogitsProcessor, Sampler
from .stream import Answer, DFlashResponse, Step
from .text import TextStream

PROMPTS_AT_ONCE = 8  # read in one pass, as in mlx-lm


@dataclass(frozen=True)
class Request:
    """One row: its prompt, and how it is sampled and ends."""

    prompt: list[int]
    max_tokens: int
    sampler: Sampler
    processors: Sequence[LogitsProcessor]
    stops: frozenset[int]
    text: TextStream


def stream_requests(
    model: Tapped, requests: Sequence[Request], batch_size: int, prefill_step_size: int
) -> Generator[tuple[int, DFlashResponse], None, None]:
    """The responses of all requests, each with its request's number, as they are decoded in up to ``batch_size`` rows.

    A row that fails ends with the reason ``"error"``. Closing this, or any other error, ends all of them.
    """
    generator = SpeculativeGenerator(
        model,
        completion_batch_size=batch_size,
        prefill_batch_size=min(batch_size, PROMPTS_AT_ONCE),
        prefill_step_size=prefill_step_size,
    )
    try:
        asked = [(number, request) for number, request in enumerate(requests) if request.max_tokens]
        uids = generator.insert(
            [request.prompt for _, request in asked],
            [request.max_tokens for _, request in asked],
            samplers=[row_sampler(request.sampler) for _, request in asked],
            logits_processors=[list(request.processors) for _, request in asked],
            stop_sequences=[StopSequences([[token] for token in request.stops]) for _, request in asked],
        )
        answers = {
            uid: (number, Answer(len(request.prompt), request.text))
            for uid, (number, request) in zip(uids, asked, strict=True)
        }
        while blocks := generator.next_generated():
            for block in blocks:
                number, answer = answers[block.uid]
                response = answer.add(Step(block.block.tokens, block.block, block.finish_reason, error=block.error))
                if response.finish_reason is not None and block.finish_reason is None:
                    generator.remove([block.uid])  # a stop string
                yield number, response
    finally:
        generator.close()


def row_sampler(sampler: Sampler) -> Sampler:
    """The sampler as mlx-lm gets it: rows that share one are sampled in one call, which not every one allows."""
    if isinstance(sampler, DrawingSampler):
        return _first_equal(sampler)
    return sampler if sampler is GREEDY else partial(sampler)


@lru_cache
def _first_equal(sampler: DrawingSampler) -> DrawingSampler:
    return sampler
