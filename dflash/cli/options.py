"""What several commands share: options, the decoder that they load, text in and tables out.

Knows typer, streams and rich. Must not know any one command.
"""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DataError, DFlashError

if TYPE_CHECKING:
    from ..generate import DFlashSpeculativeDecoder

Target = Annotated[
    str | None, typer.Option(metavar="PATH|HUB", help="Folder or hub name of the target. Default: the pair that ships.")
]
DrafterName = Annotated[str | None, typer.Option("--drafter", metavar="PATH|HUB", help="The drafter for the target.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temp = Annotated[float, typer.Option(help="Temperature; 0 is greedy.")]
BlockSize = Annotated[int, typer.Option(help="Positions per block, the anchor included.")]
Chat = Annotated[bool, typer.Option("--chat/--raw", help="Use the chat template, or the prompt as it is.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
TEMPLATE_CONFIG = typer.Option(metavar="JSON", help="Switches of the chat template: '{\"enable_thinking\": false}'.")


def load_decoder(target: str | None, drafter: str | None, block_size: int = 16) -> "DFlashSpeculativeDecoder":
    """The decoder that every command uses; without names, the bundled models."""
    from ..generate import DFlashSpeculativeDecoder

    return DFlashSpeculativeDecoder.from_pretrained(target, drafter, block_size=block_size)


def set_seed(seed: int | None) -> None:
    """Seed sampling; ``None`` leaves it random."""
    if seed is not None:
        import mlx.core as mx

        mx.random.seed(seed)


def show(text: str) -> None:
    """Print a piece of text as it comes."""
    print(text, end="", flush=True)


def stdin_text(keep_ends: bool) -> str:
    """Standard input, with or without the white space at its ends."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DFlashError(f"Standard input is not UTF-8 text: {error}.") from error
    return text if keep_ends else text.strip()


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """A JSON object given on the command line. Raises :class:`~dflash.errors.DataError` for anything else."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise DataError(f"{option} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise DataError(f'{option} must be a JSON object such as {{"enable_thinking": false}}, got {text}.')
    return value


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


def score_answers(pairs: list[tuple[str, dict[str, Any]]]) -> list[bool]:
    """Judge answers to requests of the world that the shipped pair knows."""
    from ..training.toy.tasks import check_answers

    try:
        return [verdict.ok for verdict in check_answers(pairs)]
    except (KeyError, TypeError) as error:
        raise DFlashError(f'A "check" in the prompts is not of a kind that is known: {error!r}.') from error
