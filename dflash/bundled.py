"""The models that ship with the package, found by what a target is, not by its name."""

from dataclasses import dataclass
from pathlib import Path

from .core.errors import CheckpointError, IncompatibleModelsError
from .core.files import is_hub_name, read_json, resolve_checkpoint
from .drafters.combined import own_name
from .drafters.kinds import needs_no_files
from .target import LoadedTargetModel, load_target
from .target.identity import norm_fingerprint, target_fingerprint
from .target.load import BUNDLED

REAL = Path(__file__).parent / "real"
"""Drafters for published targets, and requests to such targets: ``REAL / HELDOUT``."""

HELDOUT = "heldout.jsonl"

INDEX = REAL / "drafters.json"
"""For each target's :func:`~dflash.target.identity.norm_fingerprint` its ``name``, and its drafter's ``folder``
relative to the index. Written by ``.ci/publish.py``."""


@dataclass(frozen=True)
class BundledDrafter:
    """One drafter of the package: its folder, and the name of the target that it was trained for."""

    folder: Path
    target: str


def find_drafter(target: LoadedTargetModel) -> BundledDrafter | None:
    """The drafter that was made for ``target``, whatever precision it was loaded at; ``None`` if there is none.

    Raises ``CheckpointError`` for a damaged index.
    """
    fingerprint = norm_fingerprint(target)
    entry = None if fingerprint is None else read_json(INDEX).get(fingerprint)
    return None if entry is None else BundledDrafter((INDEX.parent / entry["folder"]).resolve(), entry["name"])


def heldout_for(target: LoadedTargetModel) -> Path:
    """A file of requests to ``target``: held-out ones of its bundled drafter, or to any chat model (JSONL)."""
    found = find_drafter(target)
    return REAL / HELDOUT if found is None else found.folder.parent / HELDOUT


def drafter_folder(target: LoadedTargetModel) -> Path:
    """The folder of the drafter that was made for ``target``.

    Raises ``IncompatibleModelsError`` if the package has none.
    """
    found = find_drafter(target)
    if found is None:
        known = ", ".join(entry["name"] for entry in read_json(INDEX).values())
        raise IncompatibleModelsError(
            f"No drafter is bundled for this target; there is one for: {known}. Give the drafter that was trained for "
            "it, or make one with: dflash fit --target TARGET --output FOLDER."
        )
    return found.folder


def target_for(drafter: str | Path) -> LoadedTargetModel:
    """The bundled target, for a ``drafter`` whose config says that it was trained for it, or that needs no files.

    Raises ``CheckpointError`` if there is no such folder, and ``IncompatibleModelsError`` for any other drafter.
    """
    name = own_name(drafter)
    if needs_no_files(name):
        return load_target(BUNDLED)
    if is_hub_name(name) and not Path(name).exists():
        raise CheckpointError(f"There is no folder {name!r}; with a drafter of the hub, give its target too.")
    trained_for = read_json(resolve_checkpoint(name) / "config.json").get("target_fingerprint")
    target = load_target(BUNDLED)
    if trained_for != target_fingerprint(target):
        raise IncompatibleModelsError(
            f"The drafter {drafter} works only with the target that it was trained for: give both, or neither for the "
            "bundled models."
        )
    return target
