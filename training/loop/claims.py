"""Whose folder it is: what a run was begun with, written into its folder and compared when it goes on.

Knows plain data. Must not know what any setting means.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from dflash.errors import TrainingError
from dflash.files import read_json, remove_unfinished, write_json


def check_same_run(path: Path, identity: dict[str, Any], may_change: Collection[str] = ()) -> None:
    """Write ``identity`` to ``path``, or find that what is there differs in nothing but ``may_change``.

    Names are those of nested keys, ``run.folder``. Raises :class:`~dflash.errors.TrainingError` if the folder
    belongs to something else, naming the first that differs.
    """
    if path.exists():
        for key, before, now in _differences(read_json(path), identity):
            if key not in may_change:
                raise TrainingError(
                    f"{path.parent} belongs to a run with {key} {before!r}, this one has {now!r}. "
                    "Set another folder for this run, or remove that one."
                )
    remove_unfinished(path)
    write_json(path, identity)


def _differences(before: Any, now: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Name, old and new value of every setting that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*now, *(k for k in before if k not in now)]
        return [d for k in keys for d in _differences(before.get(k), now.get(k), f"{name}.{k}" if name else k)]
    return [] if before == now else [(name, before, now)]
