"""Answers with their times: plain mlx_lm and DFlash on the same prompts, alternating."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step, generation_stream

from ..core.errors import DFlashError, GenerationError, one_line
from ..decoding.block import Block
from ..decoding.sampling import GREEDY, LogitsProcessor, Sampler
from ..decoding.stream import responses, through_stop
from ..decoding.text import TextStream
from ..generate import DFlashSpeculativeDecoder
from ..policies.threads import DecodeThreads
from ..prompts.conversations import Conversation
from ..target import LoadedTargetModel
from .identity import Difference, find_difference

PLAIN, DFLASH = "plain mlx_lm", "DFlash"


class Step(NamedTuple):
    """New tokens, the text that became certain, and for a block how many tokens were drafted and accepted."""

    tokens: list[int]
    text: str
    block: tuple[int, int] | None = None


Side = Callable[[list[int]], Iterator[Step]]
"""One way to answer a prompt of token ids. Its first step brings exactly one token."""


@dataclass(frozen=True)
class BenchPrompt:
    """A request as text (to be shown), as token ids, and the plain data to judge its answer by, if it has some.

    ``kind`` is its row in tables; ``conversation`` is where it comes from, if that continues after the answer.
    """

    text: str
    tokens: list[int]
    check: dict[str, Any] | None = None
    kind: str | None = None
    conversation: Conversation | None = None


@dataclass(frozen=True)
class Run:
    """One side's answer.

    Args:
        tokens: What was generated.
        text: The same as text.
        seconds: Time since the first token.
        committed: Tokens that each block committed, those after a stop token left out; empty for plain decoding.
        drafted: Tokens that each block drafted.
        accepted: Drafts that each block accepted.
        request_seconds: Time of the whole request, its prompt included. If a side computes its second token before it
            yields the first, as ``mlx_lm`` does, only this includes that pass.
    """

    tokens: list[int]
    text: str
    seconds: float
    committed: list[int]
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    request_seconds: float = 0.0

    @property
    def tps(self) -> float | None:
        """Tokens after the first per second since the first; ``None`` if there is only one."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 and self.seconds > 0 else None

    @property
    def request_tps(self) -> float | None:
        """All tokens per second since the request; ``None`` if that was not timed."""
        return len(self.tokens) / self.request_seconds if self.request_seconds > 0 else None


@dataclass(frozen=True)
class PromptResult:
    """All runs of one prompt, plain and with one drafter; run ``i`` of one side belongs to run ``i`` of the other."""

    prompt: BenchPrompt
    plain: list[Run]
    dflash: list[Run]
    difference: Difference | None

    @property
    def ratios(self) -> list[float]:
        """DFlash's speed over plain's, run by run, if both have one."""
        return self._ratios(lambda run: run.tps)

    @property
    def request_ratios(self) -> list[float]:
        """The same for whole requests."""
        return self._ratios(lambda run: run.request_tps)

    def _ratios(self, speed: Callable[[Run], float | None]) -> list[float]:
        pairs = [(speed(p), speed(d)) for p, d in zip(self.plain, self.dflash, strict=True)]
        return [dflash / plain for plain, dflash in pairs if plain is not None and dflash is not None]


def plain_side(
    target: LoadedTargetModel,
    max_tokens: int,
    longest: int | None = None,
    sampler: Sampler = GREEDY,
    logits_processors: list[LogitsProcessor] | None = None,
    *,
    stop_strings: Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    **options: Any,
) -> Side:
    """``mlx_lm.stream_generate`` as its users call it; prompt and answer have at most ``longest`` tokens.

    ``options`` are others of mlx-lm, such as ``kv_bits``. It has no stop strings, and stops only at the tokenizer's
    tokens: if others are given, its tokens are cut as DFlash's are.

    Raises ``GenerationError`` for fewer than one token: -1 would mean no end to mlx-lm.
    """
    if max_tokens < 1:
        raise GenerationError(f"max_tokens must be at least 1 to compare, got {max_tokens}.")
    options |= {"sampler": sampler, "logits_processors": logits_processors}

    def answer(prompt: list[int]) -> Iterator[Step]:
        room = _room(max_tokens, longest, prompt)
        stream = mlx_lm.stream_generate(target.model, target.tokenizer, prompt, room, **options)
        return (Step([r.token], r.text) for r in stream)

    def cut_answer(prompt: list[int]) -> Iterator[Step]:
        room = _room(max_tokens, longest, prompt)
        stops = target.stop_token_ids() if stop_token_ids is None else frozenset(stop_token_ids)
        tokens = generate_step(mx.array(prompt), target.model, max_tokens=room, **options)
        steps = through_stop((Block([], [int(token)], 0) for token, _ in tokens), stops, room)
        text = TextStream(target.tokenizer.detokenizer, stop_strings or ())
        return (Step(r.tokens, r.text) for r in responses(len(prompt), steps, text, None))

    return answer if stop_strings is None and stop_token_ids is None else cut_answer


def dflash_side(
    decoder: DFlashSpeculativeDecoder,
    max_tokens: int,
    temperature: float = 0.0,
    longest: int | None = None,
    **options: Any,
) -> Side:
    """:meth:`~dflash.DFlashSpeculativeDecoder.stream_generate` as its users call it, with its ``options``."""

    def answer(prompt: list[int]) -> Iterator[Step]:
        stream = decoder.stream_generate(prompt, _room(max_tokens, longest, prompt), temperature, **options)
        for i, r in enumerate(stream):  # the first token is the prompt's own pass, which is no block
            yield Step(r.tokens, r.text, (len(r.drafted), r.accepted) if i else None)

    return answer


def _room(max_tokens: int, longest: int | None, prompt: list[int]) -> int:
    return max_tokens if longest is None else max(1, min(max_tokens, longest - len(prompt)))


def time_side(side: Side, prompt: list[int], show: Callable[[str], object] | None = None) -> Run:
    """Let ``side`` answer and take its own time; ``show`` gets the text piece by piece."""
    mx.synchronize(generation_stream)  # plain decoding leaves one step more than it needs in flight
    answer, steps, times = iter(side(prompt)), list[Step](), list[float]()
    while True:
        began = time.perf_counter()
        if (step := next(answer, None)) is None:
            break
        times.append(time.perf_counter() - began)
        steps.append(step)
        if show is not None:
            show(step.text)
    tokens, text = [token for step in steps for token in step.tokens], "".join(step.text for step in steps)
    blocks = [(len(step.tokens), *step.block) for step in steps if step.block]
    committed, drafted, accepted = ([block[i] for block in blocks] for i in range(3))
    return Run(tokens, text, sum(times[1:]), committed, drafted, accepted, sum(times))


def compare(
    target: LoadedTargetModel,
    plain: Side,
    drafters: Mapping[str, Side],
    prompts: Sequence[BenchPrompt],
    runs: int = 1,
    *,
    greedy: bool = True,
    seed: int = 0,
    on_failure: Callable[[DFlashError], object] | None = None,
    threads: DecodeThreads | None = None,
) -> Iterator[dict[str, PromptResult]]:
    """Answer every prompt ``runs`` times by plain decoding and each drafter, alternating; who is first changes.

    Before that, each side answers the first prompt once, uncounted. Yields the results of a prompt by the name of
    the drafter. Unless ``greedy``, tokens are not compared: rounding can change which token is sampled. All sides
    answer with the number of BLAS threads that ``threads`` chose before the first prompt.

    Raises ``DFlashError``, naming side and prompt, if one side fails; with ``on_failure`` the error is passed to that
    function instead, and the next prompt follows.
    """
    if runs < 1:
        raise GenerationError(f"runs must be at least 1, got {runs}.")
    sides = {PLAIN: plain, **drafters}
    warm = False
    for i, prompt in enumerate(prompts):
        try:
            with threads.in_use() if threads is not None else nullcontext():
                if not warm:
                    _alternate(sides, prompt, i, 1, seed)
                warm = True
                done = _alternate(sides, prompt, i, runs, seed)
        except DFlashError as error:
            if on_failure is None:
                raise
            on_failure(error)
            continue
        tokens = {name: [run.tokens for run in own] for name, own in done.items()}
        results = {}
        for name in drafters:
            found = find_difference(target, prompt.tokens, tokens[PLAIN], tokens[name]) if greedy else None
            results[name] = PromptResult(prompt, done[PLAIN], done[name], found)
        yield results


def _alternate(
    sides: Mapping[str, Side], prompt: BenchPrompt, number: int, runs: int, seed: int
) -> dict[str, list[Run]]:
    """Every side's runs of one prompt."""
    done: dict[str, list[Run]] = {name: [] for name in sides}
    for run in range(runs):
        for name in rotated([*sides], number + run):
            mx.random.seed(seed + run)
            try:
                found = time_side(sides[name], prompt.tokens)
            except Exception as error:  # whatever a model, a kernel or another package's drafter raises
                raise DFlashError(f"{name} failed on prompt {number + 1}: {one_line(error)}") from error
            if not found.tokens:
                raise DFlashError(f"{name} wrote nothing for prompt {number + 1}.")
            done[name].append(found)
    return done


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The order of ``names`` in a turn: another one is first in each, so that no side always is."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]
