"""Acceptance by decoding, prompt by prompt: conversations in turns, rows by kind, a table.

Knows counts by prompt. Must not know the command line, where prompts come from, or how a block is counted
(``training/evaluate.py``).

The acceptance length tau is that of all prompts of a row together: tokens committed over passes of the target, the
prompts' own passes left out. Long answers weigh more than short ones, as in engines' counters; z-lab's script
(github.com/z-lab/dflash) takes the mean over answers, which ``by_prompt`` of the JSON gives too.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ..decoding.trace import Record, Trace, together
from ..generate import DFlashSpeculativeDecoder
from ..training import evaluate
from ..training.evaluate import Acceptance
from .bootstrap import bootstrap, ratio_of_sums
from .runs import BenchPrompt

logger = logging.getLogger(__name__)

FIRST = 6  # positions in the table of kinds
TAU = "tau: the blocks' tokens over passes of the target, of a row's prompts together; in brackets the 95 % interval"


def measure_turns(
    decoder: DFlashSpeculativeDecoder,
    prompts: Sequence[BenchPrompt],
    encode: Callable[[list[dict[str, str]]], list[int]],
    max_tokens: int,
    temperature: float = 0.0,
    trace: Trace | None = None,
    **options: Any,
) -> Iterator[tuple[int, Acceptance]]:
    """Decode an answer to each prompt and to each later turn of it: the prompt's number, and the counts of the answer.

    ``encode`` makes token ids of the messages so far, the target's own answers among them. A turn for which the target
    has no room is left out, with a warning. ``options`` as in :func:`~dflash.training.evaluate.measure_each`.
    """
    target, drafter = decoder.loaded_target, decoder.draft_model
    asked: list[int] = []
    answer: list[str] = []

    def listen(record: Record) -> None:
        answer.append(record.get("text", ""))

    def requests() -> Iterator[list[int]]:  # each is taken once the one before is answered
        for number, prompt in enumerate(prompts):
            tokens, conversation = prompt.tokens, prompt.conversation
            while True:
                asked.append(number)
                answer.clear()
                yield tokens
                if conversation is None or not conversation.later:
                    break
                conversation = conversation.after("".join(answer))
                tokens = encode(list(conversation.messages))
                if target.max_length is not None and len(tokens) + max_tokens > target.max_length:
                    logger.warning("%s: a later turn is left out, %d tokens long.", conversation.where, len(tokens))
                    break

    heard = together(trace, listen if any(prompt.conversation for prompt in prompts) else None)
    watching = {} if heard is None else {"trace": heard}
    for counts in evaluate.measure_each(target, drafter, requests(), max_tokens, temperature, **options, **watching):
        yield asked[-1], counts


def acceptance_results(parts: Sequence[Acceptance], kinds: Sequence[str | None], block_size: int) -> dict[str, Any]:
    """Plain data over all prompts, and ``by_kind`` over those of each kind; ``parts`` are the counts of each prompt."""
    chosen = {kind: [p for p, k in zip(parts, kinds, strict=True) if k == kind] for kind in kinds if kind is not None}
    return _row(parts, block_size) | {"by_kind": {kind: _row(own, block_size) for kind, own in chosen.items()}}


def _row(parts: Sequence[Acceptance], block_size: int) -> dict[str, Any]:
    found = {"prompts": len(parts)} | evaluate.total(parts, block_size).results()
    limits = None
    if found["blocks"]:
        tau = bootstrap(ratio_of_sums([p.committed for p in parts], [p.blocks for p in parts]), len(parts))
        limits = None if tau.low is None else [tau.low, tau.high]
    return found | {"acceptance_length_interval": limits}


def render_acceptance(results: dict[str, Any]) -> RenderableType:
    """The score as text: a row a kind, or where prompts have none, a row a position."""
    if results["by_kind"]:
        return _kinds_table(results)
    positions = Table("position", "blocks accepted up to it", box=None, pad_edge=False)
    for position, rate in enumerate(results["acceptance_by_position"], 1):
        positions.add_row(f"{position:8}", f"{rate:.3f}")
    return Group(
        f"acceptance length {_length(results, 3)} tokens per target pass",
        f"{results['prompts']} prompts, {results['blocks']} blocks, {results['generated_tokens']} tokens in them "
        "(the first of each answer is in none)",
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
    limits = row["acceptance_length_interval"]
    interval = "" if limits is None else f" ({limits[0]:.{digits}f}-{limits[1]:.{digits}f})"
    return f"{row['acceptance_length']:.{digits}f}{interval}"
