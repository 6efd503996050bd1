"""Acceptance: its counts, measured by decoding, without plain decoding next to it; rows by kind, a table.

The acceptance length tau of several prompts is that of their blocks together: tokens committed over target passes, the
prompts' own passes left out. Long answers weigh more than short ones, as in engines' counters; z-lab's script
(github.com/z-lab/dflash) takes the mean over answers, which ``by_prompt`` of the JSON gives too.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from sys import maxsize
from typing import Any, TypeVar

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from ..drafters.autoregressive import agreeing
from ..generate import DFlashSpeculativeDecoder
from ..target import LoadedTargetModel
from .runs import BenchPrompt
from .statistics import Interval, Ratio

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST = 6  # positions in the table of kinds
TAU = "tau: the blocks' tokens over passes of the target, of a row's prompts together; in brackets the 95 % interval"


# --- counts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acceptance:
    """Counts over the blocks of a decoding; those of several parts add up.

    ``committed`` tokens came from ``blocks`` target passes. Of the blocks that verified a draft at position
    ``i + 1`` (``verified[i]``), ``accepted[i]`` accepted it and all before it. A position after a stop
    token counts as not verified.
    """

    blocks: int
    committed: int
    verified: np.ndarray
    accepted: np.ndarray

    @property
    def length(self) -> float | None:
        """Acceptance length tau: tokens committed per target pass; ``None`` if no answer was long enough for one."""
        return self.committed / self.blocks if self.blocks else None

    @property
    def by_position(self) -> list[float]:
        """Fraction of blocks whose drafts up to position ``1, 2, ..`` were all accepted; 0 if none was verified."""
        return (self.accepted / np.maximum(self.verified, 1)).tolist()

    def results(self) -> dict[str, Any]:
        """Plain data for logs and JSON."""
        return {
            "acceptance_length": self.length,
            "acceptance_by_position": self.by_position,
            "blocks": self.blocks,
            "generated_tokens": self.committed,
        }


def total(parts: Iterable[Acceptance], block_size: int) -> Acceptance:
    """Counts over all ``parts``, which have ``block_size - 1`` positions each."""
    each, none = list(parts), np.zeros(block_size - 1, dtype=np.int64)
    return Acceptance(
        sum(part.blocks for part in each),
        sum(part.committed for part in each),
        sum((part.verified for part in each), none),
        sum((part.accepted for part in each), none),
    )


@dataclass(frozen=True)
class Drafted:
    """The block after one token of an answer.

    Args:
        at: The anchor's number in the answer, from 0.
        drafted: Drafts of the block.
        verified: Those that count: all, but none after a stop token.
        right: Leading drafts that are the text's.
        committed: Tokens of the text that the block would commit.
        chances: The drafter's own acceptance probability of each draft, if it was asked for and has some.
    """

    at: int
    drafted: int
    verified: int
    right: int
    committed: int
    chances: list[float] | None = None


def judged(answer: list[int], ended: bool, at: int, drafted: list[int]) -> Drafted:
    """The block that verifies ``drafted`` after the token ``at`` of a whole ``answer``, ``ended`` by a stop token."""
    rest = answer[at + 1 :]
    right = agreeing(drafted, rest)
    committed = min(right + 1, len(rest))
    cut = ended and committed == len(rest)
    return Drafted(at, len(drafted), min(committed, len(drafted)) if cut else len(drafted), right, committed)


def counts(blocks: Iterable[Drafted], block_size: int) -> Acceptance:
    """Counts as those of decoding; ``block_size - 1`` positions."""
    committed, found = 0, list(blocks)
    verified, accepted = (np.zeros(block_size - 1, dtype=np.int64) for _ in range(2))
    for block in found:
        committed += block.committed
        verified[: block.verified] += 1
        accepted[: block.right] += 1
    return Acceptance(len(found), committed, verified, accepted)


# --- decoding ----------------------------------------------------------------------------------------------


def measure_one(
    decoder: DFlashSpeculativeDecoder, prompt: list[int], max_tokens: int, temperature: float = 0.0, **options: Any
) -> tuple[Acceptance, str]:
    """Decode one answer: its counts, and its text. ``options`` go to ``stream_generate`` of the decoder.

    Every draft is verified unless ``options`` has another policy: acceptance is a property of the drafter, not of the
    machine.
    """
    options = {"policy": "full"} | options
    answer, text, drafts, at, reason = list[int](), "", dict[int, list[int]](), 0, None
    for i, response in enumerate(decoder.stream_generate(prompt, max_tokens, temperature, **options)):
        if i > 0:  # the first token is of the prompt's own pass, which is no block
            drafts[at] = response.drafted
            at += response.accepted + 1
        answer, text, reason = answer + response.tokens, text + response.text, response.finish_reason
    return _judged(answer, reason, drafts, decoder.block_size), text


def _judged(answer: list[int], reason: str | None, drafts: Mapping[int, list[int]], size: int) -> Acceptance:
    """The counts of a whole answer and its blocks' drafts, by the number of their anchor in it."""
    ended = reason == "stop"
    return counts((judged(answer, ended, at, own) for at, own in drafts.items() if at < len(answer) - 1), size)


def unlimited(decoder: DFlashSpeculativeDecoder) -> DFlashSpeculativeDecoder:
    """The same without a longest sequence of its own: prompts without room are left out before."""
    target, drafter, size = decoder.loaded_target, decoder.draft_model, decoder.block_size
    return DFlashSpeculativeDecoder(target, drafter, block_size=size, max_seq_length=maxsize)


def measure_batch(
    decoder: DFlashSpeculativeDecoder, prompts: Sequence[list[int]], batch_size: int, max_tokens: int, **options: Any
) -> Iterator[tuple[int, Acceptance, str]]:
    """Decode up to ``batch_size`` answers at a time: a prompt's number, its counts and its text, as each is complete.

    Counts are those of :func:`measure_one`: drafts that a row has beyond its own end, since others needed them, count
    nothing. What depends on other rows can differ: an elastic drafter's drafts before the end, samples, what a drafter
    learns. ``options`` go to :meth:`~dflash.DFlashSpeculativeDecoder.stream_batch`, whose errors it raises.
    """
    decoder, size = unlimited(decoder), decoder.block_size
    answers, texts, anchors = [list[int]() for _ in prompts], [""] * len(prompts), [0] * len(prompts)
    drafts = [dict[int, list[int]]() for _ in prompts]  # by their anchor's number in the answer
    options = {"policy": "full"} | options
    for number, response in decoder.stream_batch(prompts, batch_size, max_tokens=max_tokens, **options):
        if response.error is not None:
            raise response.error
        at = anchors[number]
        drafts[number][at] = response.drafted[: min(size, max_tokens - at - 1) - 1]
        anchors[number] += response.accepted + 1
        answers[number] += response.tokens
        texts[number] += response.text
        if response.finish_reason is not None:
            yield number, _judged(answers[number], response.finish_reason, drafts[number], size), texts[number]


def measure_turns(
    decoder: DFlashSpeculativeDecoder,
    prompts: Sequence[BenchPrompt],
    encode: Callable[[list[dict[str, str]]], list[int]],
    max_tokens: int,
    temperature: float = 0.0,
    **options: Any,
) -> Iterator[tuple[int, Acceptance]]:
    """Decode an answer to each prompt and to each of its later turns: the prompt's number, and the answer's counts.

    ``encode`` makes token ids of the messages so far, the target's own answers among them. A turn for which the target
    has no room is left out, with a warning. ``options`` as in :func:`measure_one`.
    """
    decoder = unlimited(decoder)
    for number, first in enumerate(prompts):
        prompt: BenchPrompt | None = first
        while prompt is not None:
            found, text = measure_one(decoder, prompt.tokens, max_tokens, temperature, **options)
            yield number, found
            prompt = next_turn(prompt, text, decoder.loaded_target, encode, max_tokens)


def in_turns(
    prompts: Sequence[BenchPrompt],
    answered: Callable[[list[list[int]]], Iterable[tuple[int, T, str]]],
    follow: Callable[[BenchPrompt, str], BenchPrompt | None],
) -> Iterator[tuple[int, T]]:
    """All first turns together, then all second ones, and so on: the prompt's number with what ``answered`` found.

    ``answered`` yields the number among the prompts that it gets, what is found, and the answer as text; ``follow`` is
    :func:`next_turn` but for its first two arguments.
    """
    waiting: Mapping[int, BenchPrompt] = dict(enumerate(prompts))
    while waiting:
        numbers, following = [*waiting], {}
        for i, found, text in answered([prompt.tokens for prompt in waiting.values()]):
            if (later := follow(waiting[numbers[i]], text)) is not None:
                following[numbers[i]] = later
            yield numbers[i], found
        waiting = dict(sorted(following.items()))


def next_turn(
    prompt: BenchPrompt,
    answer: str,
    target: LoadedTargetModel,
    encode: Callable[[list[dict[str, str]]], list[int]],
    max_tokens: int,
) -> BenchPrompt | None:
    """The next turn of a conversation after ``answer``; ``None`` after its last, or, with a warning, without room."""
    if prompt.conversation is None or not prompt.conversation.later:
        return None
    conversation = prompt.conversation.after(answer)
    tokens = encode(list(conversation.messages))
    if target.max_length is not None and len(tokens) + max_tokens > target.max_length:
        logger.warning("%s: a later turn is left out, %d tokens long.", conversation.where, len(tokens))
        return None
    return replace(prompt, tokens=tokens, conversation=conversation)


# --- results -----------------------------------------------------------------------------------------------


def acceptance_results(parts: Sequence[Acceptance], kinds: Sequence[str | None], block_size: int) -> dict[str, Any]:
    """Plain data over all prompts, and ``by_kind`` over those of each kind; ``parts`` are the counts of each prompt."""
    by_kind: dict[str, list[Acceptance]] = {}
    for part, kind in zip(parts, kinds, strict=True):
        if kind is not None:
            by_kind.setdefault(kind, []).append(part)
    return _row(parts, block_size) | {"by_kind": {kind: _row(own, block_size) for kind, own in by_kind.items()}}


def _row(parts: Sequence[Acceptance], block_size: int) -> dict[str, Any]:
    counts = total(parts, block_size)
    limits = None
    if counts.blocks:
        tau = length_of(parts).interval().bounded(1)
        limits = None if tau.low is None else [tau.low, tau.high]
    return {"prompts": len(parts)} | counts.results() | {"acceptance_length_interval": limits}


def length_of(parts: Sequence[Acceptance]) -> Ratio:
    """The acceptance length over ``parts``, of a prompt each."""
    return Ratio.of([part.committed for part in parts], [part.blocks for part in parts])


def length_over(parts: Sequence[Acceptance], first: Sequence[Acceptance]) -> Interval:
    """The acceptance length of one drafter over that of another on the same prompts, with its interval."""
    return (length_of(parts) / length_of(first)).interval()


def render_comparison(scores: dict[str, dict[str, Any]]) -> RenderableType:
    """The scores of several drafters by their names: a row each, for every kind of prompts and for all."""
    table = Table("", box=None, pad_edge=False)
    first, *_ = scores.values()
    kinds = [*first["by_kind"], None]
    for name in ("prompts", "blocks", "tau", "over the first", *(f"up to {i + 1}" for i in range(FIRST))):
        table.add_column(name, justify="right")
    for kind in kinds:
        if len(kinds) > 1:
            table.add_row("all prompts" if kind is None else kind, style="bold")
        for name, results in scores.items():
            row = results if kind is None else results["by_kind"][kind]
            rates = [f"{rate:.3f}" for rate in row["acceptance_by_position"][:FIRST]]
            over = "" if kind is not None or results is first else f"{Interval(**results['over_first']):.3f}"
            table.add_row(name, str(row["prompts"]), str(row["blocks"]), _length(row, 2), over, *rates)
    return Group(table, "", TAU, "over the first: the ratio of tau on the same prompts, with its 95 % interval")


def render_acceptance(results: dict[str, Any]) -> RenderableType:
    """The score as text: a row a kind or, if the prompts have none, a row a position."""
    if results["by_kind"]:
        return _kinds_table(results)
    positions = Table("position", "blocks accepted up to it", box=None, pad_edge=False)
    for position, rate in enumerate(results["acceptance_by_position"], 1):
        positions.add_row(f"{position:8}", f"{rate:.3f}")
    return Group(
        f"acceptance length {_length(results, 3)} tokens per target pass",
        f"prompts {results['prompts']}, blocks {results['blocks']}, tokens of blocks {results['generated_tokens']} "
        "(an answer's first token is the prompt's own)",
        positions,
    )


def _kinds_table(results: dict[str, Any]) -> RenderableType:
    table = Table("", box=None, pad_edge=False)
    first = range(min(FIRST, len(results["acceptance_by_position"])))
    for name in ("prompts", "blocks", "tokens", "tau", *(f"up to {i + 1}" for i in first)):
        table.add_column(name, justify="right")
    for kind, row in (results["by_kind"] | {"all prompts": results}).items():
        counts = (str(row[name]) for name in ("prompts", "blocks", "generated_tokens"))
        rates = (f"{row['acceptance_by_position'][i]:.3f}" for i in first)
        table.add_row(kind, *counts, _length(row, 2), *rates)
    return Group(table, "", TAU, "up to i: blocks whose drafts up to position i were all accepted")


def _length(row: dict[str, Any], digits: int) -> str:
    if row["acceptance_length"] is None:
        return "-"
    return f"{Interval(row['acceptance_length'], *row['acceptance_length_interval'] or ()):.{digits}f}"
