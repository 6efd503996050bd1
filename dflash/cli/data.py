"""``dflash prepare``: from prompts to a dataset that the target wrote.

Knows options, files and what to print. Must not know how anything is computed. Mounted by ``cli``.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import TEMPLATE_CONFIG, json_object

app = typer.Typer()


@app.command()
def prepare(
    data: Annotated[str, typer.Argument(metavar="FILE.jsonl|HUB", help="Prompts, with or without responses.")],
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the dataset goes.")],
    target: Annotated[
        str | None,
        typer.Option(metavar="PATH|HUB", help="The target that writes the responses. Default: the one that ships."),
    ] = None,
    split: Annotated[str, typer.Option(help="Of a hub dataset; 'train[:1000]' takes its first 1000 rows.")] = "train",
    subset: Annotated[str | None, typer.Option(help="Of a hub dataset that has several.")] = None,
    template: Annotated[
        str | None, typer.Option(help="Makes the prompt from a line's keys: 'Question: {question}'.")
    ] = None,
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
    shard_size: Annotated[int, typer.Option(help="Sequences of a file; a kill loses the file in work.")] = 512,
    heldout_percent: Annotated[float, typer.Option(help="Held out for evaluation, by a hash of the prompt.")] = 1.0,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Use the chat template, or prompts as they are.")] = True,
    chat_template_config: Annotated[str | None, TEMPLATE_CONFIG] = None,
) -> None:
    """Make a training dataset: prompts, answered by the target.

    A line of the file is {"prompt": ...}, {"prompt": ..., "response": ...} or
    {"messages": [{"role": ..., "content": ...}, ...]}. Responses that are there
    are used as they are; the target writes the missing ones. Stopped or killed,
    the same command continues where it was.

    Examples:

    dflash prepare prompts.jsonl --output data
    dflash prepare prompts.jsonl --output data --target Qwen/Qwen3-4B --temp 0.7
    dflash prepare openai/gsm8k --subset main --template "{question}" --output data
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
        heldout_percent=heldout_percent,
        regenerate=regenerate,
        chat=chat,
        chat_template_config=json_object(chat_template_config, "--chat-template-config"),
    )
    conversations = read_conversations(data, split=split, subset=subset, template=template)
    keep_freed_memory()
    loaded = load_target(target or PAIR / "target")
    hub = {"split": split, "subset": subset, "template": template}
    source = Path(data).name if Path(data).exists() else f"{data} {json.dumps(hub)}"
    _print_manifest(output, make(conversations, loaded, settings, output, source))


def _print_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    for split, counts in manifest["splits"].items():
        print(
            f"{split:<8} {counts['sequences']} sequences, {counts['tokens']} tokens, "
            f"{counts['response_tokens']} of them responses, {counts['cut']} responses cut"
        )
    dropped = {name.replace("_", " "): number for name, number in manifest["dropped"].items()}
    print("dropped ", ", ".join(f"{number} {name}" for name, number in dropped.items()))
    print(f"The dataset is in {folder}.")
