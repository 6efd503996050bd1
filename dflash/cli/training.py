"""``dflash recipe``, ``cache-features``, ``train``, ``export``: from a dataset to a drafter."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..core.errors import DFlashError, did_you_mean
from .options import Settings, TrustRemoteCode, can_be_made, is_text, not_empty
from .terminal import print_rich, show_log

if TYPE_CHECKING:
    from ..training.recipe import Recipe

app = typer.Typer()

RecipeFile = Annotated[
    str,
    typer.Argument(metavar="RECIPE.yaml", help="A recipe, or the name of a bundled one (dflash recipe lists them)."),
]


def _load(recipe: str, settings: list[str] | None) -> "Recipe":
    """The checked recipe; what happens from here on is logged to standard error."""
    from ..training.recipe import load_recipe

    checked = load_recipe(recipe, settings or [])
    show_log()
    return checked


# --- recipes --------------------------------------------------------------------------------------------


@app.command()
def recipe(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this bundled recipe.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|HUB", help="Write a recipe for this target. Default: the bundled one.", callback=not_empty
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Its dataset, made by dflash prepare, if there is one yet.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the run shall leave its files.", callback=can_be_made),
    ] = None,
    settings: Settings = None,
    quick: Annotated[bool, typer.Option("--quick", help="A run that ends in minutes, to try training.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Print a recipe for a target, or a bundled recipe; without options, the names of those.

    A recipe for a target is complete and commented: layers to read, a mask
    token that no text uses, batches for this machine's memory, and the time
    that training will take, from a short measurement. What --set gives is
    known before the rest is chosen. Without --target it is for the bundled one.

    Examples:

    dflash recipe
    dflash recipe qwen3-4b > my.yaml
    dflash recipe --target Qwen/Qwen3-0.6B --data data > my.yaml
    dflash recipe --data data --run runs/mine --set run.epochs=3 > mine.yaml
    dflash recipe --data data --quick > try.yaml
    """
    from ..training.recipe import bundled_recipes

    known = bundled_recipes()
    proposed = quick or any(option is not None for option in (target, data, run, settings))
    if name is not None and proposed:
        raise DFlashError("Give the NAME of a bundled recipe, or options for a new one such as --target, not both.")
    if proposed:
        from ..target.load import BUNDLED
        from ..training.new_recipe import as_yaml, propose_recipe

        given = (target or BUNDLED, data, run, settings or (), trust_remote_code, quick)
        print(as_yaml(propose_recipe(*given)), end="")
    elif name is None:
        print("\n".join(known))
    elif name in known:
        print(known[name].read_text(encoding="utf-8"), end="")
    else:
        raise DFlashError(f"There is no bundled recipe {name!r}; {did_you_mean(name, known)}")


# --- training -------------------------------------------------------------------------------------------


@app.command("cache-features")
def cache_features(recipe: RecipeFile, settings: Settings = None, trust_remote_code: TrustRemoteCode = False) -> None:
    """Compute the target's features of a recipe's dataset once, onto the disk.

    Training then reads them instead of running the target in every epoch. The
    size is stated first, and refused if the disk has no room for it. Stopped or
    killed, the same command continues.

    Examples:

    dflash cache-features RECIPE.yaml --set data.cached_features=features
    dflash train RECIPE.yaml --set data.cached_features=features
    """
    checked = _load(recipe, settings)
    from ..training.train import cache_features as run

    print(run(checked, trust_remote_code=trust_remote_code))


class WithSettings(TyperCommand):
    """A command whose help ends with the settings of a file: here those of a recipe."""

    def settings(self) -> dict[str, type]:
        """Dataclasses of settings by their headings."""
        from ..training.recipe import Recipe

        return {"Settings of a recipe": Recipe}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the command's help, then each setting with its default and meaning."""
        super().format_help(ctx, formatter)
        from ..core.settings import settings_help

        for what, cls in self.settings().items():
            rows = [(line.key, line.default or "(to be given)", line.meaning) for line in settings_help(cls)]
            print(f" {what}, their defaults and meanings:\n")
            print_rich(table(("setting", "default", "meaning"), rows))


@app.command(cls=WithSettings)
def train(recipe: RecipeFile, settings: Settings = None, trust_remote_code: TrustRemoteCode = False) -> None:
    """Train a drafter from a recipe, or continue where that run was stopped.

    Ctrl-C finishes the step, saves and exits with 130; the same command
    continues to the same weights. Several machines: mlx.launch.

    Examples:

    dflash train my.yaml
    dflash train qwen3-4b --set run.epochs=1 --set optimizer.learning_rate=3e-4
    dflash train my.yaml --set drafter.from=z-lab/Qwen3-4B-DFlash-b16 --set run.folder=runs/tuned
    mlx.launch --hosts 10.0.0.1,10.0.0.2 dflash train my.yaml
    """
    checked = _load(recipe, settings)
    from tqdm.contrib.logging import logging_redirect_tqdm

    from ..training.train import train as run

    with logging_redirect_tqdm():  # lines above the bar, not in it
        print(run(checked, trust_remote_code=trust_remote_code))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of dflash train, finished or not.")],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write the drafter.")],
    last: Annotated[bool, typer.Option("--last", help="The last weights, not those of the best evaluation.")] = False,
    target_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What the card calls a target that was given as a folder: its hub name.",
            callback=is_text,
        ),
    ] = None,
    push: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Upload to the hub.", callback=is_text)] = None,
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
    exporting.export(run, folder, best=not last, target_name=target_name, name=push)
    print(exporting.push(folder, push) if push else folder)


# --- tables ---------------------------------------------------------------------------------------------


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Any:
    """A plain table of texts."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
