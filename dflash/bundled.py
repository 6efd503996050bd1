"""The drafters that ship with the package, and how each is found: by what a target is, not by its name.

Knows their folders and the index of them. Must not know how a drafter is made, loaded or used.
"""

from dataclasses import dataclass
from pathlib import Path

from .errors import IncompatibleModelsError
from .files import read_json
from .target import LoadedTargetModel
from .target.identity import norm_fingerprint

REAL = Path(__file__).parent / "real"
"""Drafters for published targets, and requests to such targets: ``REAL / HELDOUT``."""

HELDOUT = "heldout.jsonl"

INDEX = REAL / "drafters.json"
"""Of each target's :func:`~dflash.target.identity.norm_fingerprint`: its ``name``, and its drafter's ``folder`` as
seen from the index. Written by ``python -m dflash.training.publish``."""


@dataclass(frozen=True)
class BundledDrafter:
    """One drafter of the package: its folder, and the name of the target that it was trained for."""

    folder: Path
    target: str


def find_drafter(target: LoadedTargetModel) -> BundledDrafter | None:
    """The drafter that was made for ``target``, at whatever precision it was loaded; ``None`` where there is none.

    Raises :class:`~dflash.errors.CheckpointError` for a damaged index.
    """
    fingerprint = norm_fingerprint(target)
    entry = None if fingerprint is None else read_json(INDEX).get(fingerprint)
    return None if entry is None else BundledDrafter((INDEX.parent / entry["folder"]).resolve(), entry["name"])


def heldout_for(target: LoadedTargetModel) -> Path:
    """A file of requests to ``target``: heldout ones of its bundled drafter, or to any chat model (JSONL)."""
    found = find_drafter(target)
    return REAL / HELDOUT if found is None else found.folder.parent / HELDOUT


def drafter_folder(target: LoadedTargetModel) -> Path:
    """The folder of the drafter that was made for ``target``.

    Raises :class:`~dflash.errors.IncompatibleModelsError` where the package has none.
    """
    found = find_drafter(target)
    if found is None:
        known = ", ".join(entry["name"] for entry in read_json(INDEX).values())
        raise IncompatibleModelsError(
            f"No drafter is bundled for this target; there is one for: {known}. Give the drafter that was trained for "
            "it, or make one with: dflash fit --target TARGET --output FOLDER."
        )
    return found.folder
