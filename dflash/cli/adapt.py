"""``dflash adapt``: a drafter learns from what was served."""

from pathlib import Path
from typing import Annotated

import typer

from ..models import ModelOptions
from . import options
from .options import can_be_made, not_empty
from .terminal import resumable, show_log

app = typer.Typer()

NOT_BETTER = 3
"""The exit code that tells a drafter that is no better from an error (1) and a wrong command (2)."""


@app.command()
@options.grouped(models=options.group(ModelOptions, "target", "trust_remote_code"))
def adapt(
    record: Annotated[Path, typer.Argument(metavar="FOLDER", help="What dflash serve --record kept.")],
    output: Annotated[
        Path, typer.Option(metavar="NEW", help="Where the new drafter goes, if it is better.", callback=can_be_made)
    ],
    models: ModelOptions,
    drafter: Annotated[
        str, typer.Option(metavar="PATH|HUB", help="The drafter to continue.", callback=not_empty)
    ] = "bundled",
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of training.", min=1)] = 300,
    mix: Annotated[
        Path | None,
        typer.Option(metavar="DATA", help="Train on this too, against forgetting; at least half is the record's."),
    ] = None,
    settings: options.Settings = None,
) -> None:
    """Continue a drafter on requests that were served, and take the new one if it is better.

    The record is copied, the drafter is trained on it, and both are scored on the
    requests that the record holds out (dflash data split changes which). NEW is
    written only if the new drafter is better there by more than the 95 %
    interval; if it is not, the exit code is 3 (errors have 1 and 2). All else is
    in NEW.adapt. Stopped or killed, the same command continues.

    Examples:

    dflash serve --record served

    dflash adapt served --output mine

    dflash adapt served --target T --drafter D --mix data --steps 500 --output mine
    """
    from dataclasses import replace

    from ..bundled import drafter_folder
    from ..core.backend import keep_freed_memory
    from ..training.adapt import Adaptation

    keep_freed_memory()
    show_log()
    target = replace(models, drafter=drafter).load_target()
    name = str(drafter_folder(target)) if drafter == "bundled" else drafter
    adaptation = Adaptation(
        record,
        drafter=name,
        output=output,
        target=str(models.target or target.folder),
        steps=steps,
        mix=mix,
        recipe_settings=tuple(settings or ()),
        trust_remote_code=models.trust_remote_code,
    )
    del target  # training loads its own
    with resumable(adaptation.folder):
        found = adaptation.run()
    print(f"{found.requests} held-out requests: {found.old:.3f} tokens per target pass before, {found.new:.3f} now")
    print(f"now over before: {found.ratio:.3f}")
    if not found.better:
        print(f"Not better by more than the interval, so {output} is not written: {adaptation.folder} has the drafter.")
        raise typer.Exit(NOT_BETTER)
    print(f"Better: the new drafter is in {output}")
