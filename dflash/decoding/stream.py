"""From decoded blocks to responses: cut at a stop token or a stop string, timed, and recorded."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from .block import Block, DecodeState
from .profile import Profile
from .text import TextStream
from .trace import Recorder


@dataclass(frozen=True)
class DFlashResponse:
    """One step of a streamed generation.

    The first response holds the token that the prompt's own pass chose. Each later one is a block, so the acceptance
    length tau is the mean of ``len(tokens)`` over all responses but the first.

    Args:
        text: Text that became certain in this step; it may be empty.
        tokens: Tokens that became certain in this step: the block's committed tokens, up to and including the stop
            token or the token in which a stop string begins. Tokens whose text may belong to a stop string come
            with a later step, or not at all.
        accepted: How many of ``drafted`` the target accepted. The block committed these and one token of the
            target's own, before anything was cut from it. 0 for the first response.
        drafted: Tokens that the drafter proposed in this step.
        prompt_tokens: Tokens in the prompt.
        prompt_tps: Prompt tokens per second; in a batch a prompt's time begins with the batch, so it counts waiting.
        generation_tokens: Tokens generated so far.
        generation_tps: Tokens after the first per second since the first; 0 while there is only one.
        peak_memory: Peak memory of the process's MLX arrays in GB.
        finish_reason: ``"stop"``, ``"length"``, or ``None`` before the end; of a batch also ``"error"``.
        profile: Seconds by part; only in the last response of a request with ``profile=True``.
        error: What ended the answer, if that is ``"error"``.
    """

    text: str
    tokens: list[int]
    accepted: int
    drafted: list[int]
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    profile: Profile | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Step:
    """A block cut at the first stop token, the policy's reasons for it (``why``), and an error that ends the text."""

    tokens: list[int]
    block: Block
    finish_reason: str | None
    why: Mapping[str, float] = field(default_factory=dict)
    error: Exception | None = None


def first_block(state: DecodeState) -> Block:
    """The prompt's own pass as a block without drafts."""
    return Block(drafted=[], tokens=state.tokens[state.prompt_length :], accepted=0)


def through_stop(blocks: Iterable[Block], stops: frozenset[int], max_tokens: int) -> Iterator[Step]:
    """The blocks up to and including the first token in ``stops``, at most ``max_tokens`` tokens."""
    generated = 0
    for block in blocks:
        end = next((i for i, token in enumerate(block.tokens) if token in stops), len(block.tokens) - 1)
        tokens = block.tokens[: end + 1]
        generated += len(tokens)
        finish = "stop" if tokens[-1] in stops else "length" if generated == max_tokens else None
        if finish is not None and block.random_states:  # as if nothing had been sampled after the end
            block.random_states[end].restore()
        yield Step(tokens, block, finish)
        if finish is not None:
            return


def responses(
    prompt_tokens: int, steps: Iterable[Step], text: TextStream, recorder: Recorder | None
) -> Iterator[DFlashResponse]:
    """One response per step, up to the first stop string. The clock starts when the first one is requested."""
    answer = Answer(prompt_tokens, text, recorder)
    for step in steps:
        response = answer.add(step)
        yield response
        if response.finish_reason is not None:
            return


class Answer:
    """The answer to one prompt as it grows. Its clock starts when it is made."""

    def __init__(self, prompt_tokens: int, text: TextStream, recorder: Recorder | None = None):
        self._prompt_tokens, self._text, self._recorder = prompt_tokens, text, recorder
        self._start = time.perf_counter()
        self._prompt_seconds, self._generated = 0.0, 0

    def add(self, step: Step) -> DFlashResponse:
        """The response for the next step."""
        if not self._prompt_seconds:
            now = time.perf_counter()
            self._prompt_seconds, self._start = now - self._start, now
        piece, tokens, finish = _shown(step, self._text)
        self._generated += len(tokens)
        if self._recorder is not None:
            shown = {"pieces": self._text.segments, "text": piece, "finish_reason": finish}
            self._recorder.block(step.block, step.tokens, step.why, shown)
        return DFlashResponse(
            text=piece,
            tokens=tokens,
            accepted=step.block.accepted,
            drafted=step.block.drafted,
            prompt_tokens=self._prompt_tokens,
            prompt_tps=self._prompt_tokens / self._prompt_seconds,
            generation_tokens=self._generated,
            generation_tps=max(self._generated - 1, 0) / max(time.perf_counter() - self._start, 1e-9),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish,
            profile=self._recorder.profile if self._recorder is not None and finish is not None else None,
            error=step.error if finish == "error" else None,
        )


def _shown(step: Step, text: TextStream) -> tuple[str, list[int], str | None]:
    """The text and tokens that became certain with ``step``, and its finish reason, if the answer ends there."""
    ended = step.finish_reason == "stop"
    piece, tokens = text.add(step.tokens[:-1] if ended else step.tokens)
    if text.stopped:
        return piece, tokens, "stop"
    if step.finish_reason is None:
        return piece, tokens, None
    rest, late = text.finish()
    tokens += late
    if ended and not text.stopped:
        tokens += step.tokens[-1:]
    return piece + rest, tokens, "stop" if text.stopped else step.finish_reason
