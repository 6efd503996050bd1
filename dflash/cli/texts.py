"""``dflash texts``: what is kept of the target's texts."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from . import options, terminal

app = typer.Typer()

Folder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where the target's texts are kept. Default: ~/.cache/dflash/texts.",
        callback=options.can_be_made,
    ),
]


@app.command("texts")
def list_texts(
    folder: Folder = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete all of them.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """List the texts that dflash eval, train and compare keep, or delete them.

    The target's features of a text, which drafters read, lie beside it. All take
    at most 1 GB; features, and then texts, that were not used for longest make
    room.

    Examples:

    dflash texts
    dflash texts --delete
    """
    from rich.table import Table

    from ..evaluation.texts import default_folder, delete_texts, kept_texts

    folder = folder or default_folder()
    found = kept_texts(folder)
    if delete:
        delete_texts(folder)
    if as_json:
        print(json.dumps([vars(kept) | {"folder": str(kept.folder)} for kept in found]))
        return
    held = f"{sum(k.texts for k in found)} texts, {sum(k.nbytes for k in found) / 1e6:.1f} MB"
    held += f" and {sum(k.features_nbytes for k in found) / 1e6:.1f} MB of features"
    print(f"{held}, {'deleted from' if delete else 'in'} {folder}")
    if not delete and found:
        table = Table("target", "texts", "MB", "features MB", "last used", "folder", box=None, pad_edge=False)
        for kept in found:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.used))
            sizes = (f"{size / 1e6:.1f}" for size in (kept.nbytes, kept.features_nbytes))
            table.add_row(kept.name, str(kept.texts), *sizes, used, kept.folder.name)
        terminal.print_rich(table)
