"""``dflash prepare`` and ``dflash data``: from prompts to a dataset that the target wrote, and what is in it.

Knows options, files and what to print. Must not know how anything is computed. Mounted by ``cli``.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from ..errors import DataError
from .options import TEMPLATE_CONFIG, json_object

app = typer.Typer()
data_app = typer.Typer(no_args_is_help=True, help="Look into a dataset, split it anew, or write it as JSONL.")
app.add_typer(data_app, name="data")

_DATASET = typer.Argument(metavar="FOLDER", help="A dataset of dflash prepare.")
_SPLIT = typer.Option(help="Only this split. Default: both.")
_PERCENT = typer.Option(help="Share of conversations held out for evaluation, by a hash of the prompt; 0 is none.")
_AT_LEAST = typer.Option(help="Hold out at least this many conversations.")
SplitName = Literal["train", "heldout"]


@app.command()
def prepare(
    data: Annotated[str, typer.Argument(metavar="FILE.jsonl|HUB", help="Prompts, with or without responses.")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder of the dataset.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Another way to name OUT.")] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="PATH|HUB", help="The target that writes the responses. Default: the bundled one."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Of a hub dataset; 'train[:1000]' takes its first 1000 rows. Default: train."),
    ] = None,
    subset: Annotated[str | None, typer.Option(help="Of a hub dataset that has several.")] = None,
    template: Annotated[
        str | None, typer.Option(help="Makes the prompt from a line's keys: 'Question: {question}'.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many conversations, the first.")] = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Let the target write given responses anew.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a response; it is cut there.")] = 2048,
    max_length: Annotated[int, typer.Option(help="Most tokens of a sequence; longer ones are dropped.")] = 3072,
    temp: Annotated[float, typer.Option(help="Temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 0 is off.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most probable; 0 is off.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Responses written at a time.")] = 32,
    shard_size: Annotated[int, typer.Option(help="Conversations in a file; a kill loses the unfinished file.")] = 512,
    heldout_percent: Annotated[
        float | None, typer.Option(help=f"{_PERCENT.help} Default: 1; can be changed later.")
    ] = None,
    heldout_at_least: Annotated[int | None, typer.Option(help=f"{_AT_LEAST.help} Default: 1.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Use the chat template, or prompts as they are.")] = True,
    chat_template_config: Annotated[str | None, TEMPLATE_CONFIG] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the target.")
    ] = False,
) -> None:
    """Make a training dataset: prompts, answered by the target.

    A line of the file is {"prompt": ...}, {"prompt": ..., "response": ...} or
    {"messages": [{"role": ..., "content": ...}, ...]}. Responses that are there
    are used as they are; the target writes the missing ones. Stopped or killed,
    the same command continues where it was.

    One conversation in a hundred, and at least one, is held out to evaluate on.
    The split can be changed afterwards: dflash data split.

    Examples:

    dflash prepare prompts.jsonl data
    dflash prepare prompts.jsonl data --target Qwen/Qwen3-4B --temp 0.7
    dflash prepare openai/gsm8k data --subset main --template "{question}"
    """
    from ..backend import keep_freed_memory
    from ..generate import PAIR
    from ..prompts import read_conversations
    from ..target import load_target
    from ..training.data.prepare import PrepareSettings
    from ..training.data.prepare import prepare as make

    settings = PrepareSettings(
        max_tokens=max_tokens,
        max_length=max_length,
        temp=temp,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        batch_size=batch_size,
        shard_size=shard_size,
        regenerate=regenerate,
        chat=chat,
        chat_template_config=json_object(chat_template_config, "--chat-template-config"),
    )
    heldout = _rule(heldout_percent, heldout_at_least)
    if (folder is None) == (output is None):
        raise typer.BadParameter("Name one folder for the dataset, as in: dflash prepare prompts.jsonl data.")
    out = cast(Path, folder or output)
    if target == "":
        raise DataError("--target is empty (an unset shell variable?); name a target, or leave the option out.")
    if out.exists() and not out.is_dir():
        raise DataError(f"The dataset must go to a folder, but {out} is a file; choose another name.")
    conversations = read_conversations(data, split=split, subset=subset, template=template, limit=limit)
    keep_freed_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    loaded = load_target(PAIR / "target" if target is None else target, trust_remote_code)
    hub = {"split": split, "subset": subset, "template": template}
    source = Path(data).name if Path(data).exists() else f"{data} {json.dumps(hub)}"
    try:
        manifest = make(conversations, loaded, settings, out, source, heldout)
    except KeyboardInterrupt:
        print(f"Stopped. Finished files stay in {out}; the same command continues.", file=sys.stderr)
        raise
    _print_splits(manifest)
    dropped = {name.replace("_", " "): number for name, number in manifest["dropped"].items()}
    print("dropped ", ", ".join(f"{number} {name}" for name, number in dropped.items()))
    print(f"The dataset is in {out}.")


@data_app.command()
def show(
    folder: Annotated[Path, _DATASET],
    limit: Annotated[int, typer.Option(min=1, help="Show this many conversations.")] = 5,
    split: Annotated[SplitName | None, _SPLIT] = None,
) -> None:
    """Print conversations of a dataset, with what the target wrote.

    Examples:

    dflash data show data
    dflash data show data --split heldout --limit 20
    """
    from itertools import islice

    from ..training.data.dataset import read_manifest
    from ..training.data.text import read_dataset

    rows = read_dataset(folder, split)
    _print_splits(read_manifest(folder))
    for row in islice(rows, limit):
        print(f"\n--- {row.number}, {row.split}: {row.tokens} tokens, {row.response_tokens} of them responses")
        for message in row.text["messages"]:
            print(f"[{message['role']}] {message['content']}")
        extra = {key: value for key, value in row.text.items() if key != "messages"}
        if extra:
            print(json.dumps(extra, ensure_ascii=False))


@data_app.command()
def split(
    folder: Annotated[Path, _DATASET],
    heldout_percent: Annotated[float, _PERCENT] = 1.0,
    heldout_at_least: Annotated[int, _AT_LEAST] = 1,
) -> None:
    """Choose anew which conversations are held out; the target writes nothing.

    A greater share adds to the conversations held out by a smaller one, so a
    drafter trained before has seen those that are added. Cached features and
    unfinished runs belong to the split they were begun with.

    Examples:

    dflash data split data --heldout-percent 10
    dflash data split data --heldout-at-least 20
    """
    from ..training.data.dataset import change_split
    from ..training.data.split import HeldoutRule

    _print_splits(change_split(folder, HeldoutRule(heldout_percent, heldout_at_least)))


@data_app.command()
def export(
    folder: Annotated[Path, _DATASET],
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="The file to write.")],
    split: Annotated[SplitName | None, _SPLIT] = None,
) -> None:
    """Write a dataset as JSONL: {"messages": [...]} and the other keys of each prompt.

    Examples:

    dflash data export data out.jsonl
    dflash data export data heldout.jsonl --split heldout
    """
    from ..training.data.text import export_dataset

    print(f"{export_dataset(folder, output, split)} conversations are in {output}.")


def _rule(percent: float | None, at_least: int | None) -> Any:
    """The rule that options give, or ``None`` where none is given."""
    from ..training.data.split import HeldoutRule

    given = {"percent": percent, "at_least": at_least}
    given = {name: value for name, value in given.items() if value is not None}
    return HeldoutRule(**given) if given else None  # type: ignore[arg-type]


def _print_splits(manifest: dict[str, Any]) -> None:
    for name, counts in manifest["splits"].items():
        print(
            f"{name:<8} {counts['sequences']} sequences, {counts['tokens']} tokens, "
            f"{counts['response_tokens']} of them responses, {counts['cut']} responses cut"
        )
    if not manifest["splits"]["heldout"]["sequences"]:
        print("Nothing is held out, so training has nothing to evaluate on; 'dflash data split' changes that.")
