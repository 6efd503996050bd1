"""Text in, and text, tables and log lines out, as several commands share them."""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer

from ..core.errors import DFlashError

T = TypeVar("T")


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


def one_prompt(argument: str | None, option: str | None, keep_ends: bool = False) -> str:
    """The prompt of a command, given as its argument or, with mlx_lm's escapes, as ``--prompt``."""
    if (argument is None) == (option is None):
        raise typer.BadParameter('Give one prompt, as in: dflash generate "Hello".')
    if argument is not None:
        return prompt_text(argument, keep_ends)
    return prompt_text(str(option).replace("\\n", "\n").replace("\\t", "\t"), keep_ends=True)


def show(text: str) -> None:
    """Print a piece of text as it comes."""
    print(text, end="", flush=True)


def show_log(level: int = logging.INFO) -> None:
    """Log to stderr what happens from here on."""
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


def show_progress() -> None:
    """Let the log lines of :func:`~dflash.core.progress.progress` through to stderr, and no other information."""
    show_log(logging.WARNING)
    logging.getLogger("dflash.core.progress").setLevel(logging.INFO)


def until_stopped(items: Iterable[T], name: str, count: int) -> tuple[list[T], bool]:
    """All of ``count`` items with a progress bar, or those that came before Ctrl-C, and whether it came.

    Ctrl-C before the first item raises ``KeyboardInterrupt``.
    """
    from ..core.progress import progress

    found: list[T] = []
    try:
        for item in progress(items, name, count):
            found.append(item)
    except KeyboardInterrupt:
        if not found:
            raise
        return found, True
    return found, False


def stopped(what: str) -> KeyboardInterrupt:
    """Ends a command as Ctrl-C does, with a line on ``what`` is there."""
    return KeyboardInterrupt(f"Stopped{what}")


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Let log lines stand above progress bars; Ctrl-C says that the same command continues."""
    from tqdm.contrib.logging import logging_redirect_tqdm

    try:
        with logging_redirect_tqdm():
            yield
    except KeyboardInterrupt:
        raise stopped(f". What is finished stays in {folder}; the same command continues.") from None


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
