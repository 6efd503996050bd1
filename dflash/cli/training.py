"""``dflash cache-features``, ``train``, ``export``: from a dataset to a drafter.

Knows options, files and what to print. Must not know how anything is computed. Mounted by ``cli``.
"""

import logging
from pathlib import Path
from typing import Annotated

import typer

from ..errors import DFlashError

app = typer.Typer()


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
