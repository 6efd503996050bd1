"""Records what a folder was started with, and refuses to continue it with anything else."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from dflash.core.errors import TrainingError
from dflash.core.files import read_json, remove_unfinished, write_json


def differences(before: Any, now: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Name (of nested keys, ``run.folder``), old and new value of everything that differs between plain data.

    A key that one side lacks has ``None`` there.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*now, *(key for key in before if key not in now)]
        return [
            difference
            for key in keys
            for difference in differences(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
        ]
    return [] if before == now else [(name, before, now)]


def require_same(folder: Path, before: Any, now: Any, may_change: Collection[str] = ()) -> None:
    """Raise ``TrainingError`` naming the first thing that differs and may not.

    ``may_change`` names keys, with all that is nested in them.
    """
    for name, old, new in differences(before, now):
        if not any(name == free or name.startswith(f"{free}.") for free in may_change):
            raise TrainingError(
                f"{folder} belongs to a run with {name} {old!r}, this one has {new!r}. "
                "Set another folder for this run, or remove that one."
            )


def check_same_run(path: Path, identity: dict[str, Any], may_change: Collection[str] = ()) -> None:
    """Write ``identity`` to ``path``, or find that what is there differs in nothing but ``may_change``.

    Raises ``TrainingError`` if the folder belongs to something else.
    """
    if path.exists():
        require_same(path.parent, read_json(path), identity, may_change)
    remove_unfinished(path)
    write_json(path, identity)
