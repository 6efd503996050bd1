"""What ``dflash generate`` shows of its blocks: the text in colours as it comes, and where the time went."""

import sys
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..decoding.trace import Record, shown_pieces

if TYPE_CHECKING:
    from ..decoding.profile import Profile

# Underlined, in italics and struck through, so that they differ without colours too.
ACCEPTED, OWN, PLAIN, REJECTED = "black on green", "underline black on cyan", "italic", "strike red"
TAB = 4
LEGEND = ((" accepted draft ", ACCEPTED), (" target's own ", OWN), (" plain step ", PLAIN))

NOTES = {
    "prefill": "prefill: the pass over the prompt, which chooses the first token",
    "rewind": "rewind: both caches brought to the committed tokens",
    "plain": "plain: single tokens without the drafter, where it does not pay",
    "host": "host: all the rest, such as making text of tokens and printing it",
    "ms": "accepted, committed, ms: a block's averages; ms of draft, verify and rewind",
    "tokens": "expected: what the policy expected a block to commit and to take",
}
"""What names in the tables of a profile mean; each line fits into 80 columns."""

NOT_MARKED = "Blocks are not marked: standard output is no terminal. FORCE_COLOR=1 marks them, --trace records them."


class ColouredText:
    """Prints each block's text as its record comes: accepted drafts, the target's own token, rejected drafts.

    A terminal shows colours, unless ``NO_COLOR`` is set; a file or pipe gets the text alone, and standard error a line
    that says so.
    """

    def __init__(self, rejected: bool):
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._rejected = rejected
        self._blocks: list[Record] = []
        self._texts: dict[str, str] = {}
        self._pieces = shown_pieces(self._arriving())
        self._column = 0

    def __call__(self, record: Record) -> None:
        """Print a block, or the legend before the first."""
        if not self._console.is_terminal:
            if record["record"] == "request":
                print(NOT_MARKED, file=sys.stderr)
            print(record.get("text", ""), end="", flush=True)
            return
        if record["record"] == "request":
            legend = [*LEGEND, *([(" rejected drafts ", REJECTED)] if self._rejected else [])]
            self._console.print(Text("  ").join(Text(name, style) for name, style in legend), "\n", sep="")
            return
        self._texts |= record["texts"]
        self._blocks.append(record)
        line = Text()
        for piece, number, token in next(self._pieces):
            line.append(self._with_spaces(piece), style_of(self._blocks[number], token))
        if self._rejected:
            line.append(self._with_spaces(self._tail(record)), REJECTED)
        self._console.print(line, end="")
        sys.stdout.flush()

    def _arriving(self) -> Iterator[Record]:
        for number in count():
            yield self._blocks[number]

    def _with_spaces(self, piece: str) -> str:
        """``piece`` with spaces for each tab: to the next column of four of its line, which earlier pieces began."""
        shown = ""
        for character in piece:
            spaced = " " * (TAB - self._column % TAB) if character == "\t" else character
            self._column = 0 if character == "\n" else self._column + cell_len(spaced)
            shown += spaced
        return shown

    def _tail(self, block: Record) -> str:
        """The drafts that were checked and rejected, on one line, without what would command the terminal."""
        rejected = block["drafts"][block["accepted"] : block["verified"]]
        text = "".join(self._texts[str(token)] for token in rejected).replace("\n", "⏎").replace("\t", "⇥")
        return "".join(character if character.isprintable() else "\ufffd" for character in text)


def style_of(block: Record, token: int) -> str:
    """The style of a block's ``token``: the prompt's own pass and the last of each block are the target's own."""
    if block["asleep"]:
        return PLAIN
    return ACCEPTED if token < block["accepted"] else OWN


def print_profile(profile: "Profile") -> None:
    """To stderr: seconds by part, the verify lengths with what they committed and what the policy expected, notes."""
    total = sum(profile.seconds.values())
    parts = Table("part", "seconds", "share", "a block", title="time")
    for part, seconds in profile.seconds.items():
        in_blocks = profile.blocks and part not in ("prefill", "plain")
        each = f"{1000 * seconds / profile.blocks:.2f} ms" if in_blocks else ""
        if seconds:
            parts.add_row(part, f"{seconds:.3f}", f"{seconds / total:.1%}", each)
    # A plain step's time stands in its own row: a table of 80 columns has no room for more.
    expected = list(dict.fromkeys(name for use in profile.lengths.values() for name in use.why))
    expected = [name for name in expected if name != "plain_seconds"]
    shown = [f"expected\n{name.replace('seconds', 'ms').replace('_', ' ')}" for name in expected]
    lengths = Table("verified", "blocks", "accepted", "committed", "ms", *shown, title="drafts verified by a block")
    for k, use in sorted(profile.lengths.items()):
        means, hopes = use.means(), use.expected()
        own = (f"{means['accepted']:.2f}", f"{means['committed']:.2f}", f"{1000 * means['seconds']:.2f}")
        lengths.add_row(
            str(k), str(use.blocks), *own, *(_in_ms(name, hopes[name]) if name in hopes else "" for name in expected)
        )
    if profile.plain_steps:
        ms = 1000 * profile.seconds["plain"] / profile.plain_steps
        lengths.add_row("asleep", str(profile.plain_steps), "", "1", f"{ms:.2f}")
    console = Console(stderr=True, highlight=False)
    for table in (parts, lengths):
        for column in table.columns[1:]:
            column.justify = "right"
        console.print(table)
    named = [part for part, seconds in profile.seconds.items() if seconds] + ["ms"] + expected
    for name in named:
        if name in NOTES:
            console.print(NOTES[name])
    if pauses := profile.pauses:
        times = "once" if len(pauses) == 1 else f"{len(pauses)} times"
        tokens = f"{min(pauses)} to {max(pauses)} tokens"
        console.print(f"asleep: drafting paused {times}, with {tokens} to the next attempt")


def _in_ms(name: str, value: float) -> str:
    return f"{1000 * value:.2f}" if name.endswith("seconds") else f"{value:.4g}"
