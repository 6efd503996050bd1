"""From decoded blocks to responses: cut at a stop token or a stop string, timed, and recorded.

Knows tokens, blocks, and the text that may be shown (``text.py``). Must not know models, options, or how a block is
decoded.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from .block import Block, DecodeState
from .profile import Profile
from .sampling import set_random_state
from .text import TextStream
from .trace import Recorder


@dataclass(frozen=True)
class DFlashResponse:
    """One step of a streamed generation.

    The first response carries the token that the prompt's own pass chose; each later one is a block, so that
    the acceptance length tau is the mean of ``len(tokens)`` over all responses but the first.

    Args:
        text: Text that became certain in this step, possibly empty.
        tokens: Tokens that became certain in this step: those that the block committed, to the stop token or the
            token in which a stop string begins, either included. Tokens whose text may be part of a stop string
            come with a later step, or not at all.
        accepted: How many of ``drafted`` the target accepted; the block committed these and one token of the
            target's own, before anything was cut from it. 0 for the first response.
        drafted: Tokens that the drafter proposed in this step.
        prompt_tokens: Tokens in the prompt.
        prompt_tps: Prompt tokens per second.
        generation_tokens: Tokens generated so far.
        generation_tps: Tokens after the first per second since the first; 0 while there is only one.
        peak_memory: Peak memory of the process's MLX arrays in GB.
        finish_reason: ``"stop"``, ``"length"``, or ``None`` before the end.
        profile: Where the time went; in the last response of a request with ``profile=True``.
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


@dataclass(frozen=True)
class Step:
    """A block cut at the first stop token.

    ``why`` holds the policy's reasons.
    """

    tokens: list[int]
    block: Block
    finish_reason: str | None
    why: Mapping[str, float] = field(default_factory=dict)


def first_block(state: DecodeState) -> Block:
    """The prompt's own pass as a block without drafts."""
    return Block(drafted=[], tokens=state.tokens[state.prompt_length :], accepted=0)


def through_stop(blocks: Iterable[Block], stops: frozenset[int], max_tokens: int) -> Iterator[Step]:
    """The blocks up to and including the first of ``stops``, or ``max_tokens`` tokens."""
    generated = 0
    for block in blocks:
        end = next((i for i, token in enumerate(block.tokens) if token in stops), len(block.tokens) - 1)
        tokens = block.tokens[: end + 1]
        generated += len(tokens)
        finish = "stop" if tokens[-1] in stops else "length" if generated == max_tokens else None
        if finish is not None and block.random_states:  # what was drawn past the end was not
            set_random_state(block.random_states[end])
        yield Step(tokens, block, finish)
        if finish is not None:
            return


def responses(
    prompt_tokens: int, steps: Iterable[Step], text: TextStream, recorder: Recorder | None
) -> Iterator[DFlashResponse]:
    """One response a step, up to the first stop string; the clock starts with the first one asked for."""
    start = time.perf_counter()
    prompt_seconds, generated = 0.0, 0
    for step in steps:
        if not prompt_seconds:
            now = time.perf_counter()
            prompt_seconds, start = now - start, now
        piece, tokens, finish = _shown(step, text)
        generated += len(tokens)
        if recorder is not None:
            said = {"pieces": text.segments, "text": piece, "finish_reason": finish}
            recorder.block(step.block, step.tokens, step.why, said)
        yield DFlashResponse(
            text=piece,
            tokens=tokens,
            accepted=step.block.accepted,
            drafted=step.block.drafted,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tokens / prompt_seconds,
            generation_tokens=generated,
            generation_tps=max(generated - 1, 0) / max(time.perf_counter() - start, 1e-9),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish,
            profile=recorder.profile if recorder is not None and finish is not None else None,
        )
        if finish is not None:
            return


def _shown(step: Step, text: TextStream) -> tuple[str, list[int], str | None]:
    """Text and tokens that became certain with ``step``, and why the answer ends there, if it does."""
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
