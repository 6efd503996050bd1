"""Runs of ``dflash train`` side by side: what differs, how they learned, and whose drafts survive on equal prompts.

Knows run folders, drafters and paired statistics. Must not know how a table or a plot is drawn.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import DFlashError
from ..core.progress import progress
from ..drafters.checkpoints.checkpoint import load_drafter
from ..evaluation.acceptance import Acceptance, measure
from ..evaluation.statistics import Floats, Interval, bootstrap, ratio_of_sums
from ..target import LoadedTargetModel, load_target
from ..training.data.dataset import open_dataset, read_manifest
from ..training.evaluate import heldout_prompts
from ..training.export import export
from ..training.loop.run_folder import BEST, read_log
from ..training.runs import RunSummary, compare_runs, recorded_recipe
from ..training.train import FINISHED
from .settings import PromptSet

CURVES = ("loss", "heldout_loss", "acceptance_length")


@dataclass(frozen=True)
class ComparedRun:
    """One run: its summary, its curves (step and value) by name, and its drafter's acceptance.

    ``acceptance`` is in tokens per target pass, ``ratio`` that over the first run's, on the same ``prompts`` prompts.
    """

    summary: RunSummary
    curves: dict[str, list[tuple[int, float]]]
    acceptance: Interval | None = None
    ratio: Interval | None = None
    prompts: int = 0

    def results(self) -> dict[str, Any]:
        """Plain data for JSON."""
        intervals = {"acceptance": self.acceptance, "ratio": self.ratio}
        known = {name: vars(interval) for name, interval in intervals.items() if interval is not None}
        return self.summary.results() | {"curves": self.curves, "prompts": self.prompts} | known


def compare(
    folders: Sequence[Path],
    prompts: PromptSet | None = None,
    limit: int = 32,
    max_tokens: int = 128,
    decode: bool = True,
    *,
    trust_remote_code: bool = False,
) -> list[ComparedRun]:
    """Compare runs of one target; without ``decode``, by their logs alone.

    Each run's best drafter, or its last where none was evaluated, decodes the same prompts in turns with the others:
    ``prompts``, or the heldout ones of the first run's dataset, at most ``limit``.

    Raises ``DFlashError`` for folders that hold no run, and runs of different targets.
    """
    summaries = compare_runs(folders)
    curves = [learning_curves(folder) for folder in folders]
    if not decode:
        return [ComparedRun(*pair) for pair in zip(summaries, curves, strict=True)]
    recipes = [recorded_recipe(folder) for folder in folders]
    _require_one_target(folders, recipes)
    target = load_target(recipes[0]["target"], trust_remote_code)
    tokens = _prompts(target, prompts, Path(recipes[0]["data"]["folder"]), limit)
    parts = _decode(target, [_drafter(folder) for folder in folders], tokens, max_tokens)
    statistics = [ratio_of_sums([a.committed for a in own], [a.blocks for a in own]) for own in parts]

    def over_first(number: int) -> Interval:
        def ratio(weights_RP: Floats) -> Floats:
            return np.asarray(statistics[number](weights_RP) / statistics[0](weights_RP))

        return bootstrap(ratio, len(tokens))

    return [
        ComparedRun(summary, curve, bootstrap(statistic, len(tokens)), over_first(number), len(tokens))
        for number, (summary, curve, statistic) in enumerate(zip(summaries, curves, statistics, strict=True))
    ]


def learning_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each of :data:`CURVES` in a run's log."""
    lines = read_log(folder)
    return {
        name: [(line["step"], float(line[name])) for line in lines if isinstance(line.get(name), int | float)]
        for name in CURVES
    }


def _require_one_target(folders: Sequence[Path], recipes: Sequence[dict[str, Any]]) -> None:
    targets = [read_manifest(Path(recipe["data"]["folder"]))["target"] for recipe in recipes]
    for folder, target in zip(folders, targets, strict=True):
        if target != targets[0]:
            raise DFlashError(
                f"{folder} was trained for another target than {folders[0]}, so their acceptance cannot be compared; "
                "give runs of one target, or --no-decode for their logs alone."
            )


def _prompts(target: LoadedTargetModel, chosen: PromptSet | None, data: Path, limit: int) -> list[list[int]]:
    if chosen is None:
        return heldout_prompts(open_dataset(data, "heldout", target), limit)
    from .plan import encoded

    return [prompt.tokens for prompt in encoded("prompts", chosen, target)][:limit]


def _drafter(folder: Path) -> Any:
    """The drafter of a run, finished or not."""
    if (folder / FINISHED / "config.json").exists():
        return load_drafter(folder / FINISHED)
    with tempfile.TemporaryDirectory() as made:
        export(folder, Path(made), best=(folder / BEST).exists())
        return load_drafter(made)


def _decode(
    target: LoadedTargetModel, drafters: Sequence[Any], prompts: Sequence[list[int]], max_tokens: int
) -> list[list[Acceptance]]:
    """Each drafter's counts by prompt."""
    parts: list[list[Acceptance]] = [[] for _ in drafters]
    for prompt in progress(prompts, "compare"):
        for drafter, own in zip(drafters, parts, strict=True):
            own.append(measure(target, drafter, [prompt], max_tokens))
    return parts
