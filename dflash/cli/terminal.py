"""Text in, and text and tables out, as several commands share them.

Knows standard input, the terminal and rich. Must not know any one command, or models.
"""

import logging
import sys
from typing import Any

from ..core.errors import DFlashError


def prompt_text(prompt: str, keep_ends: bool = False) -> str:
    """The prompt of a command; ``-`` is standard input, with or without the white space at its ends."""
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise DFlashError(f"Standard input is not UTF-8 text: {error}.") from error
        prompt = prompt if keep_ends else prompt.strip()
    if not prompt.strip():
        raise DFlashError("The prompt is empty; expected text.")
    return prompt


def show(text: str) -> None:
    """Print a piece of text as it comes."""
    print(text, end="", flush=True)


def show_progress() -> None:
    """Let the log lines of :func:`~dflash.core.progress.progress` through to stderr, and no other information."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("dflash.core.progress").setLevel(logging.INFO)


def print_pairs(pairs: dict[str, str]) -> None:
    """Names and values in two columns."""
    width = max(map(len, pairs))
    for name, value in pairs.items():
        print(f"{name:<{width}}  {value}")


def print_rich(renderable: Any) -> None:
    """Tables keep their full width in files and pipes."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    console.print(renderable)
