"""``dflash prepare``, ``cache-features``, ``train``, ``eval``, ``export``: from prompts to a drafter with a score.

Knows options, files and what to print. Must not know how anything is computed. Mounted by ``cli.py``.
"""

import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DataError, DFlashError

app = typer.Typer()

TEMPLATE_CONFIG = typer.Option(metavar="JSON", help="Switches of the chat template: '{\"enable_thinking\": false}'.")


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
        chat_template_config=_json_object(chat_template_config, "--chat-template-config"),
    )
    conversations = read_conversations(data, split=split, subset=subset, template=template)
    keep_freed_memory()
    loaded = load_target(target or PAIR / "target")
    hub = {"split": split, "subset": subset, "template": template}
    source = Path(data).name if Path(data).exists() else f"{data} {json.dumps(hub)}"
    _print_manifest(output, make(conversations, loaded, settings, output, source))


@app.command("cache-features")
def cache_features(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="A recipe with data.cached_features.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting; repeatable.")
    ] = None,
) -> None:
    """Compute the target's features of a recipe's dataset once, onto the disk.

    Training then reads them instead of running the target in every epoch. The
    size is stated first, and refused if the disk has no room for it. Stopped or
    killed, the same command continues.

    Examples:

    dflash cache-features RECIPE.yaml --set data.cached_features=features
    dflash train RECIPE.yaml --set data.cached_features=features
    """
    from ..training.recipe import Recipe
    from ..training.settings import load_settings

    checked = load_settings(Recipe, recipe, settings or [])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")

    from ..training.train import cache_features as run

    print(run(checked))


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="A complete run; see configs/.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting; repeatable.")
    ] = None,
) -> None:
    """Train a drafter from a recipe, or go on where that run was stopped.

    Ctrl-C finishes the step, saves and exits with 130; the same command
    continues to the same weights. Several machines: mlx.launch.

    Examples:

    dflash train configs/qwen3-4b.yaml
    dflash train configs/qwen3-4b.yaml --set run.epochs=1 --set optimizer.learning_rate=3e-4
    mlx.launch --hosts 10.0.0.1,10.0.0.2 dflash train configs/qwen3-4b.yaml
    """
    from ..training.recipe import Recipe
    from ..training.settings import load_settings

    checked = load_settings(Recipe, recipe, settings or [])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")

    from tqdm.contrib.logging import logging_redirect_tqdm

    from ..training.train import train as run

    with logging_redirect_tqdm():  # lines above the bar, not in it
        print(run(checked))


@app.command("eval")
def evaluate(
    drafter: Annotated[str | None, typer.Argument(metavar="[PATH|HUB]", help="Default: the one that ships.")] = None,
    target: Annotated[str | None, typer.Option(metavar="PATH|HUB", help="The drafter's target.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Lines as for prepare. Default: the pair's held-out requests."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate for a prompt.")] = 256,
    temp: Annotated[float, typer.Option(help="Temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Use the chat template, or the prompt as it is.")] = True,
    chat_template_config: Annotated[str | None, TEMPLATE_CONFIG] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Score a drafter on a file of prompts by decoding: acceptance length, and acceptance by position.

    Examples:

    dflash eval
    dflash eval runs/qwen3-4b/drafter --target Qwen/Qwen3-4B --prompts mine.jsonl --json
    """
    import mlx.core as mx
    from tqdm import tqdm

    from ..bench import HELDOUT
    from ..generate import DFlashSpeculativeDecoder
    from ..prompts import read_conversations
    from ..training.data.chat import request_tokens
    from ..training.evaluate import measure

    switches = _json_object(chat_template_config, "--chat-template-config")
    if prompts is not None and not prompts.is_file():
        raise DataError(f"There is no file {str(prompts)!r}; expected a JSONL file.")
    requests = read_conversations(str(prompts or HELDOUT))
    decoder = DFlashSpeculativeDecoder.from_pretrained(target, drafter)
    loaded = decoder.loaded_target
    mx.random.seed(seed)
    tokens = request_tokens(requests, loaded, chat, switches, max_tokens)
    bar = tqdm(tokens, unit="prompt", disable=None)
    results = {"prompts": len(tokens)} | measure(loaded, decoder.draft_model, bar, max_tokens, temp).results()
    if not results["blocks"]:
        raise DFlashError("No answer was long enough for a block, so there is no acceptance to measure.")
    if as_json:
        print(json.dumps(results))
        return
    print(f"acceptance length {results['acceptance_length']:.3f} tokens per target pass")
    print(f"{results['prompts']} prompts, {results['blocks']} blocks, {results['generated_tokens']} tokens")
    print("position   blocks accepted up to it")
    for position, share in enumerate(results["acceptance_by_position"], 1):
        print(f"{position:8}   {share:.3f}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of dflash train, finished or not.")],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write the drafter.")],
    last: Annotated[bool, typer.Option("--last", help="The last weights, not those of the best evaluation.")] = False,
    push: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Upload it to the hub as well.")] = None,
) -> None:
    """Write a run's drafter in the published format, with a model card.

    Nothing leaves this machine without --push.

    Examples:

    dflash export runs/qwen3-4b out/qwen3-4b-dflash
    dflash export runs/qwen3-4b out/qwen3-4b-dflash --push me/qwen3-4b-dflash
    """
    from ..training import export as exporting

    if folder.resolve() == run.resolve():
        raise DFlashError("OUT must be another folder than RUN, which it would overwrite.")
    exporting.export(run, folder, best=not last)
    print(exporting.push(folder, push) if push else folder)


# --- helpers ------------------------------------------------------------------------------------------


def _json_object(text: str | None, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise DataError(f"{option} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise DataError(f'{option} must be a JSON object such as {{"enable_thinking": false}}, got {text}.')
    return value


def _print_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    for split, counts in manifest["splits"].items():
        print(
            f"{split:<8} {counts['sequences']} sequences, {counts['tokens']} tokens, "
            f"{counts['response_tokens']} of them responses, {counts['cut']} responses cut"
        )
    dropped = {name.replace("_", " "): number for name, number in manifest["dropped"].items()}
    print("dropped ", ", ".join(f"{number} {name}" for name, number in dropped.items()))
    print(f"The dataset is in {folder}.")
