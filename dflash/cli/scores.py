"""The three ways in which ``dflash eval`` scores drafters: by decoding, by decoding in batches, on finished texts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..models import ModelOptions
from ..options import DecodeOptions
from . import loading, terminal
from .requests import PromptFormat

if TYPE_CHECKING:
    from ..evaluation import BenchPrompt
    from ..evaluation.acceptance import Acceptance, Drafted
    from ..evaluation.texts import Text
    from ..generate import DFlashSpeculativeDecoder
    from ..target import LoadedTargetModel

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """Drafters of one target by their names, and the prompts on which they are scored."""

    decoders: "dict[str, DFlashSpeculativeDecoder]"
    prompts: "list[BenchPrompt]"
    form: PromptFormat
    decoding: DecodeOptions
    max_tokens: int

    @property
    def target(self) -> "LoadedTargetModel":
        """The target of all drafters."""
        return next(iter(self.decoders.values())).loaded_target

    @property
    def answers(self) -> int:
        """How many answers there will be, those to later turns among them."""
        return sum(1 + (len(prompt.conversation.later) if prompt.conversation else 0) for prompt in self.prompts)

    @property
    def follow(self) -> "Callable[[BenchPrompt, str], BenchPrompt | None]":
        """The next turn after a prompt and its answer."""
        from ..evaluation.acceptance import next_turn

        encode = self.form.in_messages(self.target)
        return partial(next_turn, target=self.target, encode=encode, max_tokens=self.max_tokens)

    def options(self, *without: str) -> dict[str, Any]:
        """The options of decoding but for those named, which are given in another way."""
        return {"policy": self.decoding.policy} | self.decoding.asked("max_tokens", "seed", *without)

    def by_name(self, found: Iterable[Sequence[T]]) -> Iterator[tuple[str, tuple[T, ...]]]:
        """Each drafter's name with its own part of all that is ``found``, which has a part for each drafter."""
        return zip(self.decoders, zip(*found, strict=True), strict=True)


@dataclass
class Scores:
    """The counts of each prompt that was answered, its turns together, by drafter; ``anchors`` if they are asked for.

    ``interrupted`` says that Ctrl-C came before the last prompt.
    """

    parts: "dict[str, list[Acceptance]]"
    interrupted: bool
    anchors: dict[str, Any] = field(default_factory=dict)


def by_decoding(task: Task, models: ModelOptions) -> Scores:
    """One answer at a time, by all drafters in turns."""
    import mlx.core as mx

    from ..evaluation.acceptance import measure_turns

    mx.random.seed(task.decoding.seed or 0)  # once: each prompt continues with the state that the previous one left
    encode, options = task.form.in_messages(task.target), task.options("temp", "trace")
    with loading.trace_file(task.decoding, models) as file:
        each = [
            measure_turns(decoder, task.prompts, encode, task.max_tokens, task.decoding.temp, trace=file, **options)
            for decoder in task.decoders.values()
        ]
        found, interrupted = terminal.until_stopped(zip(*each, strict=False), "eval", task.answers)
    return Scores({name: _totals(own, task.decoders[name]) for name, own in task.by_name(found)}, interrupted)


def in_batches(task: Task, rows: int) -> Scores:
    """``rows`` answers at a time, by one drafter after another; after Ctrl-C, the first prompts that all answered."""
    import mlx.core as mx

    from ..evaluation.acceptance import in_turns, measure_batch

    mx.random.seed(task.decoding.seed or 0)
    options = {"batch_size": rows, "max_tokens": task.max_tokens} | task.options()
    measured = (
        (name, numbered)
        for name, decoder in task.decoders.items()
        for numbered in in_turns(task.prompts, partial(measure_batch, decoder, **options), task.follow)
    )
    found, interrupted = terminal.until_stopped(measured, "eval", task.answers * len(task.decoders))
    each = {name: sorted((one for own, one in found if own == name), key=itemgetter(0)) for name in task.decoders}
    by_all = set.intersection(*({number for number, _ in own} for own in each.values()))
    if not (done := next(number for number in count() if number not in by_all)):
        raise terminal.stopped(" before the first prompt was answered.")
    first = {name: [one for one in own if one[0] < done] for name, own in each.items()}
    return Scores({name: _totals(own, task.decoders[name]) for name, own in first.items()}, interrupted)


def on_texts(task: Task, folder: Path | None, every_anchor: bool) -> Scores:
    """On the target's own texts, which are kept in ``folder``; with ``every_anchor`` on blocks after all tokens too."""
    from ..evaluation.acceptance import counts, in_turns
    from ..evaluation.anchors import anchor_results
    from ..evaluation.features import Features
    from ..evaluation.replay import replay
    from ..evaluation.texts import Texts

    kept = Texts(task.target, task.decoding.stop_token_ids, folder)

    def answered(asked: list[list[int]]) -> "Iterator[tuple[int, Text, str]]":
        return ((i, text, kept.shown(text)) for i, text in kept.answers(asked, task.max_tokens))

    turns = in_turns(task.prompts, answered, task.follow)
    written, interrupted = terminal.until_stopped(turns, "texts", task.answers)
    if interrupted:
        raise terminal.stopped(f"; {len(written)} of {task.answers} texts are kept, so the same command goes on.")
    written.sort(key=itemgetter(0))  # and in the order of turns
    numbers, texts, features = [number for number, _ in written], [text for _, text in written], Features(kept)

    def blocks(what: str, every: bool) -> "tuple[dict[str, list[list[Drafted]]], bool]":
        """By drafter, its blocks in each prompt with all turns; and whether Ctrl-C came."""
        drafted = replay(list(task.decoders.values()), texts, every, features)
        found, stopped = terminal.until_stopped(drafted, what, len(texts))
        each = {name: _by_prompt(zip(numbers, own, strict=False)) for name, own in task.by_name(found)}
        return {name: [list(chain(*turns)) for turns in own] for name, own in each.items()}, stopped

    walks, interrupted = blocks("eval", every=False)
    sizes = {name: decoder.block_size for name, decoder in task.decoders.items()}
    scores = Scores({name: [counts(own, sizes[name]) for own in each] for name, each in walks.items()}, interrupted)
    if every_anchor and not interrupted:
        anchors, scores.interrupted = blocks("every anchor", every=True)
        scores.anchors = {name: anchor_results(each, sizes[name]) for name, each in anchors.items()}
    return scores


def _totals(found: "Iterable[tuple[int, Acceptance]]", decoder: "DFlashSpeculativeDecoder") -> "list[Acceptance]":
    """The counts of each prompt, all its turns together."""
    from ..evaluation.acceptance import total

    return [total(own, decoder.block_size) for own in _by_prompt(found)]


def _by_prompt(numbered: Iterable[tuple[int, T]]) -> list[list[T]]:
    """What belongs to each prompt; all of a prompt's stands together."""
    return [[found for _, found in group] for _, group in groupby(numbered, itemgetter(0))]
