"""``dflash train``, ``dflash eval`` and ``dflash export``: a recipe becomes a drafter, a drafter gets a score.

Knows options, tables and exit codes. Must not know how anything is trained or measured. Mounted by ``cli.py``.
"""

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from .errors import DFlashError

app = typer.Typer()


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
    mlx.launch --hosts a,b dflash train configs/qwen3-4b.yaml
    """
    from .training.recipe import Recipe
    from .training.settings import load_settings

    checked = load_settings(Recipe, recipe, settings or [])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")

    from .training.train import train as run

    print(run(checked))


@app.command("eval")
def evaluate(
    drafter: Annotated[str | None, typer.Argument(metavar="[PATH|HUB]", help="Default: the one that ships.")] = None,
    target: Annotated[str | None, typer.Option(metavar="PATH|HUB", help="The drafter's target.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help='Lines such as {"prompt": "..."}. Default: held-out requests.'),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate for a prompt.")] = 256,
    temp: Annotated[float, typer.Option(help="Temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Use the chat template, or the prompt as it is.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Score a drafter on a file of prompts by decoding: acceptance length, and acceptance by position.

    Examples:

    dflash eval
    dflash eval runs/qwen3-4b/drafter --target Qwen/Qwen3-4B --prompts mine.jsonl --json
    """
    import mlx.core as mx
    from tqdm import tqdm

    from .bench import HELD_OUT, read_prompts
    from .decoder import DFlashSpeculativeDecoder
    from .training.evaluate import measure

    requests = read_prompts(prompts or HELD_OUT)
    decoder = DFlashSpeculativeDecoder.from_pretrained(target, drafter)
    loaded = decoder.loaded_target
    mx.random.seed(seed)
    tokens = [loaded.build_prompt(request.text, chat) for request in requests]
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
    from .training import export as exporting

    if folder.resolve() == run.resolve():
        raise DFlashError("OUT must be another folder than RUN, which it would overwrite.")
    exporting.export(run, folder, best=not last)
    print(exporting.push(folder, push) if push else folder)
