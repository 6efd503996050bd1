"""``dflash prompts``, ``prepare`` and ``data``: from prompts to a dataset that the target wrote, and what is in it."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from ..core.errors import DataError
from ..models import ModelOptions
from ..options import DecodeOptions
from . import options
from .options import Begin, Limit, RunSeed, Template, can_be_made
from .requests import PromptFormat
from .terminal import resumable, show_log

if TYPE_CHECKING:
    from ..target import LoadedTargetModel

app = typer.Typer()
data_app = typer.Typer(no_args_is_help=True, help="Look into datasets, split or join them, or write one as JSONL.")
app.add_typer(data_app, name="data")

Prompts = Annotated[str, typer.Argument(metavar="FILE.jsonl|HUB", help="Prompts, with or without responses.")]
Out = Annotated[Path | None, typer.Argument(metavar="OUT", help="The folder of the dataset.", callback=can_be_made)]
OutOption = Annotated[
    Path | None, typer.Option("--output", metavar="FOLDER", help="Another way to name OUT.", callback=can_be_made)
]
HubSplit = Annotated[
    str | None, typer.Option(help="Of a hub dataset; 'train[:1000]' takes its first 1000 rows. Default: train.")
]
HubSubset = Annotated[str | None, typer.Option(help="Of a hub dataset that has several.")]
Regenerate = Annotated[bool, typer.Option("--regenerate", help="Let the target rewrite the responses that are given.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of a response; it is cut there.")]
MaxLength = Annotated[int, typer.Option(help="Most tokens of a sequence; longer ones are dropped.")]
BatchSize = Annotated[int, typer.Option(help="Responses written at a time.")]
ShardSize = Annotated[int, typer.Option(help="Conversations in a file; a kill loses the unfinished file.")]
HeldoutPercent = Annotated[
    float | None,
    typer.Option(help="Share of conversations held out to evaluate on, by a hash of the prompt; 0: none. Default: 1."),
]
HeldoutAtLeast = Annotated[
    int | None, typer.Option(help="Hold out at least this many conversations, if one is left to train on. Default: 1.")
]
Dataset = Annotated[Path, typer.Argument(metavar="FOLDER", help="A dataset of dflash prepare.")]
SplitName = Annotated[Literal["train", "heldout"] | None, typer.Option(help="Only this split. Default: both.")]


@app.command()
@options.grouped(models=options.group(ModelOptions, "target", "trust_remote_code"))
def prompts(
    output: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="The file to write.", callback=can_be_made)],
    count: Annotated[int, typer.Option(metavar="N", help="How many different requests.", min=1)],
    models: ModelOptions,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a request; one that goes on is dropped.")] = 256,
    temp: Annotated[float, typer.Option(help="Temperature; must be greater than 0.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Never draw tokens less probable than this part of the best one's.")
    ] = 0.02,
    seed: RunSeed = 0,
    begin: Begin = None,
    system: Annotated[str | None, options.option_of(PromptFormat, "system")] = None,
    batch_size: Annotated[int, typer.Option(help="Requests written at a time.")] = 64,
    round_size: Annotated[int, typer.Option(help="Most requests sampled together; a kill loses a round.")] = 256,
) -> None:
    """Let a target make up requests, where there is no data.

    The target is given its chat template up to where the user would speak, and
    goes on as a user would (Magpie, arXiv:2406.08464). Requests that repeat
    another, do not end by themselves or are no text are dropped. Stopped or
    killed, the same command continues to the same file; with a higher --count
    it adds more.

    Examples:

    dflash prompts --target Qwen/Qwen3-0.6B --count 5000 --output prompts.jsonl

    dflash prompts --count 100 --output code.jsonl --begin "" --begin "Write a Python function"
    """
    from ..training.data.self_prompts import PromptSettings, write_prompts

    begins = ("",) if not begin else tuple(begin)
    settings = PromptSettings(max_tokens, temp, min_p, seed, batch_size, round_size, begins, system)
    counts = write_prompts(_load(models), count, output, settings)
    made = counts.pop("requests")
    print(", ".join(f"{name} {number}" for name, number in counts.items()))
    print(f"{made} requests are in {output}. Next: dflash prepare {output} DATA")


@app.command()
@options.grouped(
    models=options.group(ModelOptions, "target", "trust_remote_code"),
    sampling=options.group(DecodeOptions, "temp", "top_p", "min_p", "top_k", "seed", default={"seed": 0}),
    form=options.group(PromptFormat, without=("prefill_response",)),
)
def prepare(
    data: Prompts,
    models: ModelOptions,
    sampling: DecodeOptions,
    form: PromptFormat,
    folder: Out = None,
    output: OutOption = None,
    split: HubSplit = None,
    subset: HubSubset = None,
    template: Template = None,
    limit: Limit = None,
    regenerate: Regenerate = False,
    max_tokens: MaxTokens = 2048,
    max_length: MaxLength = 3072,
    batch_size: BatchSize = 32,
    shard_size: ShardSize = 512,
    heldout_percent: HeldoutPercent = None,
    heldout_at_least: HeldoutAtLeast = None,
) -> None:
    """Make a training dataset: prompts, answered by the target.

    A line of the file is {"prompt": ...}, {"prompt": ..., "response": ...} or
    {"messages": [{"role": ..., "content": ...}, ...]}. Responses that are there
    are used as they are; the target writes the missing ones. Stopped or killed,
    the same command continues where it was.

    One conversation in a hundred, and at least one of two or more, is held out
    to evaluate on. The split can be changed afterwards: dflash data split.

    Examples:

    dflash prepare prompts.jsonl data
    dflash prepare prompts.jsonl data --target Qwen/Qwen3-4B --temp 0.7
    dflash prepare openai/gsm8k data --subset main --template "{question}"
    """
    from ..prompts.conversations import read_conversations
    from ..training.data.prepare import PrepareSettings
    from ..training.data.prepare import prepare as make

    settings = PrepareSettings(
        max_tokens,
        max_length,
        sampling.temp,
        sampling.top_p,
        sampling.top_k,
        sampling.seed or 0,
        batch_size,
        shard_size,
        regenerate,
        form.chat,
        form.chat_template_config or {},
        min_p=sampling.min_p,
    )
    heldout = _rule(heldout_percent, heldout_at_least)
    out = _one_folder(folder, output)
    conversations = read_conversations(data, split=split, subset=subset, template=template, limit=limit)
    if form.system is not None:
        conversations = [conversation.with_system(form.system) for conversation in conversations]
    hub = {"split": split, "subset": subset, "template": template}
    source = Path(data).name if Path(data).exists() else f"{data} {json.dumps(hub)}"
    target = _load(models)
    with resumable(out):
        manifest = make(conversations, target, settings, out, source, heldout)
    _print_splits(manifest)
    print("dropped ", ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in manifest["dropped"].items()))
    print(f"The dataset is in {out}.")


def _one_folder(argument: Path | None, option: Path | None) -> Path:
    """The one folder that was named. It is checked here: a mistake should fail before minutes of loading."""
    from ..training.data.dataset import require_only_a_dataset

    if (argument is None) == (option is None):
        raise typer.BadParameter("Name one folder for the dataset, as in: dflash prepare prompts.jsonl data.")
    out = cast(Path, argument or option)
    if os.path.lexists(out) and not out.is_dir():  # a link that leads nowhere too
        raise DataError(f"The dataset must go to a folder, but {out} is none; choose another name.")
    require_only_a_dataset(out)
    return out


def _load(models: ModelOptions) -> "LoadedTargetModel":
    from ..core.backend import keep_freed_memory

    keep_freed_memory()
    show_log()
    return models.load_target()


@data_app.command()
def show(
    folder: Dataset,
    limit: Annotated[int, typer.Option(min=1, help="Show this many conversations.")] = 5,
    split: SplitName = None,
) -> None:
    """Print conversations of a dataset, with what the target wrote.

    Examples:

    dflash data show data
    dflash data show data --split heldout --limit 20
    """
    from itertools import islice

    from ..prompts.conversations import MOST
    from ..training.data.dataset import read_manifest
    from ..training.data.text import read_dataset

    rows = read_dataset(folder, split)
    _print_splits(read_manifest(folder))
    for row in islice(rows, min(limit, MOST)):
        print(f"\n--- {row.number}, {row.split}: {row.tokens} tokens, {row.response_tokens} of them responses")
        for message in row.text["messages"]:
            print(f"[{message['role']}] {message['content']}")
        extra = {key: value for key, value in row.text.items() if key != "messages"}
        if extra:
            print(json.dumps(extra, ensure_ascii=False))


@data_app.command()
def split(
    folder: Dataset,
    heldout_percent: HeldoutPercent = None,
    heldout_at_least: HeldoutAtLeast = None,
) -> None:
    """Change which conversations are held out; the target writes nothing.

    A greater share adds to the conversations held out by a smaller one, so a
    drafter trained before has seen those that are added. Cached features and
    unfinished runs belong to the split they were begun with.

    Examples:

    dflash data split data --heldout-percent 10
    dflash data split data --heldout-at-least 20
    """
    from ..training.data.dataset import change_split
    from ..training.data.split import HeldoutRule

    _print_splits(change_split(folder, _rule(heldout_percent, heldout_at_least) or HeldoutRule()))


@data_app.command()
def join(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Datasets of one target.")],
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="The new dataset.")],
) -> None:
    """Make one dataset of several, such as greedy responses and sampled ones.

    A request is in the same split wherever it comes from.

    Examples:

    dflash data join greedy sampled --output both
    """
    from ..training.data.join import join as join_datasets

    _print_splits(join_datasets(folders, output))


@data_app.command()
def export(
    folder: Dataset,
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="The file to write.")],
    split: SplitName = None,
) -> None:
    """Write a dataset as JSONL: {"messages": [...]} and the other keys of each prompt.

    "finish_reason" is "length" where a response was cut and "stop" elsewhere.
    dflash prepare reads the file; it takes every response as complete.

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
