"""What a folder was started with: recorded, and required when the folder is continued."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from dflash.core.errors import TrainingError
from dflash.core.files import read_json, remove_unfinished, write_json


def differences(before: Any, now: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted name, old and new value of everything that differs; a missing key counts as ``None``.

    Both are plain data.
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
    """Raise ``TrainingError`` naming the first forbidden difference.

    ``may_change`` names keys that may differ, with everything nested in them.
    """
    for name, old, new in differences(before, now):
        if not any(name == free or name.startswith(f"{free}.") for free in may_change):
            raise TrainingError(
                f"{folder} belongs to a run with {name} {old!r}, this one has {new!r}. "
                "Set another folder for this run, or remove that one."
            )


def check_same_run(path: Path, identity: dict[str, Any], may_change: Collection[str] = ()) -> None:
    """Write ``identity`` to ``path``; raise ``TrainingError`` if another one is there that differs in more than
    ``may_change``.
    """
    if path.exists():
        require_same(path.parent, read_json(path), identity, may_change)
    remove_unfinished(path)
    write_json(path, identity)
