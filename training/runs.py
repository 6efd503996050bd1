"""The recipe that a run folder records, of whatever version."""

from pathlib import Path
from typing import Any

from dflash.core.errors import CheckpointError
from dflash.core.files import read_json

from ..core.settings import with_defaults
from .loop.run_folder import RECIPE
from .recipe import Recipe

_RENAMED = {
    "data": {"batch_blocks": "max_blocks_per_batch"},
    "run": {"explosion": "max_loss_spike"},
    "objective": {"kl_share": "kl_weight"},
}
"""Settings by their older names, which recorded recipes may have."""


def recorded_recipe(folder: Path) -> dict[str, Any]:
    """The recipe of the run in ``folder`` as plain data; settings that are newer than the run have their defaults.

    Raises ``CheckpointError``, saying what is there, if ``folder`` holds no run.
    """
    recipe = read_json(folder / RECIPE).get("recipe") if (folder / RECIPE).is_file() else None
    if not isinstance(recipe, dict):
        raise CheckpointError(f"{folder} is not the folder of a run of dflash train: {_found(folder)}")
    for section, names in _RENAMED.items():
        if isinstance(recipe.get(section), dict):
            recipe[section] = {names.get(key, key): value for key, value in recipe[section].items()}
    filled: dict[str, Any] = with_defaults(Recipe, recipe)
    return filled


def _found(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder."
    if not folder.is_dir():
        return "it is a file."
    if (folder / RECIPE).is_file():
        return f"its {RECIPE} holds no recipe of a drafter."
    inside = sorted(str(path.parent) for path in folder.glob(f"*/{RECIPE}"))
    if inside:
        return f"it holds runs, such as {inside[0]}."
    if (folder / "config.json").exists():
        return f"it holds a model and no {RECIPE}. A finished drafter needs no export."
    return f"it has no {RECIPE}."
