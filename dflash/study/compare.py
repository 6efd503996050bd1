"""Runs of ``dflash train`` next to each other: what differs, how they learned, and whose drafts survive."""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.errors import DFlashError
from ..core.files import read_json
from ..core.progress import progress
from ..drafters.checkpoints.checkpoint import load_drafter
from ..evaluation.acceptance import length_of, length_over
from ..evaluation.features import Features
from ..evaluation.replay import measure_on
from ..evaluation.statistics import Interval
from ..evaluation.texts import Texts
from ..target import LoadedTargetModel, load_target
from ..training.data.dataset import dataset_fingerprint, open_dataset, read_manifest
from ..training.evaluate import heldout_prompts
from ..training.export import export
from ..training.identity import differences
from ..training.loop.run_folder import BEST, RECIPE, STATE, read_log, read_progress
from ..training.runs import recorded_recipe
from ..training.train import FINISHED
from .plan import encoded
from .settings import PromptSet

logger = logging.getLogger(__name__)

CURVES = ("loss", "heldout_loss", "acceptance_length")

_OF_THE_FOLDER = ("target", "run.folder", "data.folder", "data.cached_features")
"""Settings that differ between equal runs."""

_OF_THE_LOSS = (
    "objective",
    "dataset",
    "data.max_length",
    "run.evaluate_prompts",
    "drafter.kind",
    "drafter.options",
    "drafter.from",
    "drafter.vocabulary",
    "drafter.block_size",
    "drafter.elastic_blocks",
)
"""Settings, with those below them, that decide what a loss is taken over, and what is added to it."""


@dataclass(frozen=True)
class ComparedRun:
    """One run: how far it is, what its log says (``None`` for what it does not), and its drafter's acceptance.

    ``settings`` are those in which the compared runs differ, with the ``dataset`` if it does. ``best_acceptance``
    (tokens per target pass) is that of the best evaluation, at ``best_step``; losses and times are the last ones.
    ``seconds`` is the time of all steps and evaluations, ``tokens_per_second`` the log's median. ``curves`` has steps
    and values by name.

    ``acceptance`` is in tokens per target pass, over ``blocks`` passes, ``ratio`` its ratio to the first run's, on the
    same ``prompts`` prompts; both are ``None`` unless the drafters decoded.
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
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    prompts: int = 0
    blocks: int = 0
    acceptance: Interval | None = None
    ratio: Interval | None = None

    @property
    def objective(self) -> str:
        """In what its loss differs in kind from other runs': only losses of the same kind can be compared."""
        own = {name: value for name, value in self.settings.items() if name.startswith(_OF_THE_LOSS)}
        return ", ".join(f"{name.removeprefix('objective.')} {value}" for name, value in own.items())

    def results(self) -> dict[str, Any]:
        """Plain data for JSON."""
        undecoded = {name for name in ("acceptance", "ratio") if getattr(self, name) is None}
        return {name: value for name, value in asdict(self).items() if name not in undecoded}


def compare(
    folders: Sequence[Path],
    prompts: PromptSet | None = None,
    limit: int = 32,
    max_tokens: int = 128,
    decode: bool | None = None,
    *,
    trust_remote_code: bool = False,
) -> list[ComparedRun]:
    """Compare runs by their logs and, with ``decode``, their drafters; ``None`` decodes if every run has weights.

    Each run's best drafter, or its last where none was evaluated, is scored on the target's answers to the same
    prompts (:mod:`~dflash.evaluation.replay`): ``prompts``, or the held-out ones of the first run's dataset, at most
    ``limit``. A run that was trained on other sequences than that dataset's may have seen those, which a warning says.

    Raises ``DFlashError`` for folders that hold no run, runs of different targets, and answers of one token each.
    """
    recipes = [recorded_recipe(folder) | {"dataset": _trained_on(folder)} for folder in folders]
    changes = [differences(recipes[0], recipe) for recipe in recipes[1:]]
    varying = sorted({name for found in changes for name, _, _ in found}.difference(_OF_THE_FOLDER))
    runs = [
        summary(folder, {name: _at(recipe, name) for name in varying})
        for folder, recipe in zip(folders, recipes, strict=True)
    ]
    if decode is None:
        decode = all(_has_weights(folder) for folder in folders)
    if not decode:
        return runs
    _require_one_target(folders, recipes)
    target = load_target(recipes[0]["target"], trust_remote_code)
    if prompts is None:
        data = Path(recipes[0]["data"]["folder"])
        tokens = heldout_prompts(open_dataset(data, "heldout", target), limit)
        now = _name(dataset_fingerprint(open_dataset(data, "train", None)))
        if others := [str(folder) for folder, own in zip(folders, recipes, strict=True) if own["dataset"] != now]:
            logger.warning(
                "%s: trained on other sequences than %s trains on now, perhaps on prompts that it holds out; "
                "give others with --prompts.",
                ", ".join(others),
                data,
            )
    else:
        tokens = [prompt.tokens for prompt in encoded("prompts", prompts, target)][:limit]
    decoded = _acceptance(target, [_drafter(folder) for folder in folders], tokens, max_tokens)
    return [replace(run, prompts=len(tokens), **found) for run, found in zip(runs, decoded, strict=True)]


def summary(folder: Path, settings: dict[str, Any]) -> ComparedRun:
    """What the log and the checkpoint of a run say."""
    lines, done = read_log(folder), read_progress(folder / STATE)

    def curve(name: str) -> list[tuple[int, float]]:
        return [(line["step"], float(line[name])) for line in lines if isinstance(line.get(name), int | float)]

    def values(name: str) -> list[float]:
        return [value for _, value in curve(name)]

    curves, speeds = {name: curve(name) for name in CURVES}, sorted(values("tokens_per_s"))
    best_step, best = max(curves["acceptance_length"], key=lambda point: point[1], default=(None, None))
    return ComparedRun(
        folder=str(folder),
        step=done.step,
        steps=done.steps or None,
        best_acceptance=best,
        best_step=best_step,
        heldout_loss=next(reversed(values("heldout_loss")), None),
        loss=next(reversed(values("loss")), None),
        tokens_per_second=speeds[len(speeds) // 2] if speeds else None,
        seconds=next(reversed(values("seconds")), None),
        peak_memory_gb=max(values("peak_memory_gb"), default=None),
        settings=settings,
        curves=curves,
    )


def _at(values: Any, name: str) -> Any:
    for key in name.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _trained_on(folder: Path) -> str | None:
    found = read_json(folder / RECIPE).get("dataset")
    return None if found is None else _name(found)


def _name(fingerprint: dict[str, int]) -> str:
    return f"{fingerprint['sequences']} sequences, {fingerprint['crc']:x}"


def _require_one_target(folders: Sequence[Path], recipes: Sequence[dict[str, Any]]) -> None:
    targets = [read_manifest(Path(recipe["data"]["folder"]))["target"] for recipe in recipes]
    for folder, target in zip(folders, targets, strict=True):
        if target != targets[0]:
            raise DFlashError(
                f"{folder} was trained for another target than {folders[0]}, so their acceptance cannot be compared; "
                "give runs of one target, or --no-decode for their logs alone."
            )


def _has_weights(folder: Path) -> bool:
    return any((folder / name).exists() for name in (f"{FINISHED}/config.json", BEST, STATE))


def _drafter(folder: Path) -> Any:
    """The drafter of a run, finished or not."""
    if (folder / FINISHED / "config.json").exists():
        return load_drafter(folder / FINISHED)
    with tempfile.TemporaryDirectory() as made:
        export(folder, Path(made), best=(folder / BEST).exists())
        return load_drafter(made)


def _acceptance(
    target: LoadedTargetModel, drafters: Sequence[Any], prompts: Sequence[list[int]], max_tokens: int
) -> list[dict[str, Any]]:
    """Each drafter's acceptance, that over the first one's on the same prompts, and its blocks."""
    kept = Texts(target)
    texts = kept.all(prompts, max_tokens)
    if all(len(text.answer) < 2 for text in texts):
        raise DFlashError("No answer was long enough for a block, so there is no acceptance to measure.")
    measured = measure_on(target, drafters, texts, Features(kept))
    own = list(zip(*progress(measured, "compare", len(texts)), strict=True))
    return [
        {
            "acceptance": length_of(parts).interval().bounded(1),
            "ratio": length_over(parts, own[0]),
            "blocks": sum(part.blocks for part in parts),
        }
        for parts in own
    ]
