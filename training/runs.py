"""Runs side by side: in what their recipes differ, how well and how fast they did.

Knows run folders. Must not know how a run is made or how a table is printed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash.core.errors import CheckpointError
from dflash.core.files import read_json

from ..core.settings import with_defaults
from .identity import differences
from .loop.run_folder import RECIPE, STATE, read_log, read_progress
from .recipe import Recipe

_OF_THE_FOLDER = ("target", "run.folder", "data.folder", "data.cached_features")
"""Settings that differ without the run being another."""

_RENAMED = {
    "data": {"batch_blocks": "max_blocks_per_batch"},
    "run": {"explosion": "max_loss_spike"},
    "objective": {"kl_share": "kl_weight"},
}
"""Settings by their older names, which recorded recipes may have."""


@dataclass(frozen=True)
class RunSummary:
    """One run: steps done of ``steps``, and what its log says; ``None`` where it says nothing.

    ``best_acceptance`` (tokens per target pass) is that of the best evaluation, at ``best_step``; the other values
    are the last ones. ``seconds`` is the time of all steps and evaluations, ``tokens_per_second`` the median of the
    log's. ``settings`` are those in which the compared runs differ.
    """

    folder: str
    step: int
    steps: int | None
    best_acceptance: float | None = None
    best_step: int | None = None
    heldout_loss: float | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    peak_memory_gb: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def results(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def compare_runs(folders: Sequence[Path]) -> list[RunSummary]:
    """The runs in ``folders``, in their order.

    Raises ``CheckpointError`` for a folder that holds no run.
    """
    recipes = [recorded_recipe(folder) for folder in folders]
    varying = {
        name for recipe in recipes[1:] for name, _, _ in differences(recipes[0], recipe) if name not in _OF_THE_FOLDER
    }
    return [
        _summary(folder, {name: _at(recipe, name) for name in sorted(varying)})
        for folder, recipe in zip(folders, recipes, strict=True)
    ]


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


def _at(values: Any, name: str) -> Any:
    for key in name.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _summary(folder: Path, settings: dict[str, Any]) -> RunSummary:
    lines = read_log(folder)
    progress = read_progress(folder / STATE)

    def values(name: str) -> list[float]:
        return [float(line[name]) for line in lines if isinstance(line.get(name), int | float)]

    def last(name: str) -> float | None:
        return (values(name) or [None])[-1]  # type: ignore[list-item]

    evaluated = [line for line in lines if isinstance(line.get("acceptance_length"), int | float)]
    best = max(evaluated, key=lambda line: line["acceptance_length"], default={})
    speeds = sorted(values("tokens_per_s"))
    return RunSummary(
        folder=str(folder),
        step=progress.step,
        steps=progress.steps or None,
        best_acceptance=best.get("acceptance_length"),
        best_step=best.get("step"),
        heldout_loss=last("heldout_loss"),
        loss=last("loss"),
        tokens_per_second=speeds[len(speeds) // 2] if speeds else None,
        seconds=last("seconds"),
        peak_memory_gb=max(values("peak_memory_gb"), default=None),
        settings=settings,
    )
