"""From a target alone to its drafter: requests, responses, a recipe, training, export.

    prompts.jsonl    requests written by the target, unless prompts are given
    data/            the target's responses to them
    recipe.yaml      the recipe; it may be edited before training
    run/             the training
    drafter/         the finished drafter

Every stage can be resumed and finished stages are skipped, so the same call continues an interrupted run.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash import LoadedTargetModel, load_target
from dflash.core.errors import DataError
from dflash.core.files import atomic_write
from dflash.prompts.conversations import read_conversations

from .cpu import model_to_write_with
from .data.dataset import MANIFEST
from .data.plan import PrepareSettings
from .data.prepare import prepare
from .data.responses import generate_responses
from .data.self_prompts import PromptSettings, write_prompts
from .export import export
from .loop.clock import duration
from .loop.run_folder import BEST
from .loop.run_folder import RECIPE as RUN_OF_TRAIN
from .new_recipe import as_yaml, propose_recipe, training_seconds
from .recipe import load_recipe
from .train import FINISHED, train

logger = logging.getLogger(__name__)

PROMPTS, DATA, RECIPE, RUN, DRAFTER = "prompts.jsonl", "data", "recipe.yaml", "run", "drafter"

_COUNT, _TRIAL_TOKENS = 5000, 8
_REQUEST_TOKENS = 64
"""Tokens written for each request that is kept, those of dropped requests included: an estimate."""


@dataclass(frozen=True)
class Pipeline:
    """All stages for ``target`` in ``folder``.

    Args:
        count: How many requests the target writes (default 5000), or how many of ``prompts`` are used.
        prompts: A file of requests to use instead of the target's own.
        recipe_settings: Settings that override the proposed recipe, such as ``"run.epochs=2"``.
        trust_remote_code: As in :func:`~dflash.load_target`.
    """

    target: str
    folder: Path
    count: int | None = None
    prompts: Path | None = None
    made_up: PromptSettings = field(default_factory=PromptSettings)
    responses: PrepareSettings = field(default_factory=PrepareSettings)
    recipe_settings: Sequence[str] = ()
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise DataError(f"count must be at least 1, got {self.count}.")

    def run(self) -> Path:
        """Run the stages that are left; returns the folder of the finished drafter.

        Raises ``DataError`` if the folder holds anything else or belongs to another target, and whatever the stages
        raise: ``DFlashError`` and ``OSError``.
        """
        self._require_own_folder()
        if (self.folder / DRAFTER / "model.safetensors").exists():
            logger.info("Nothing is left to do: the drafter is in %s.", self.folder / DRAFTER)
            return self.folder / DRAFTER
        target = load_target(self.target, self.trust_remote_code)
        self._data(target)
        self._recipe()
        checked = load_recipe(self.folder / RECIPE)
        if not (checked.run.folder / FINISHED / "model.safetensors").exists():
            announce("training", training_seconds(checked, target), at_most=True)
            del target  # training loads its own
            train(checked, trust_remote_code=self.trust_remote_code)
        announce("export", None)
        export(checked.run.folder, self.folder / DRAFTER, best=(checked.run.folder / BEST).exists())
        return self.folder / DRAFTER

    def _require_own_folder(self) -> None:
        path = self.folder / RECIPE
        if path.exists():
            begun = load_recipe(path).target
            if Path(begun).resolve() != Path(self.target).resolve():
                raise DataError(f"{self.folder} belongs to the target {begun}, not {self.target}; choose a new folder.")
        elif (self.folder / RUN_OF_TRAIN).exists() or (self.folder / DRAFTER).exists():
            raise DataError(
                f"{self.folder} was not made by dflash fit: it holds a run or a drafter, and no {RECIPE}. Choose a new "
                "folder; a run of dflash train continues by dflash train."
            )

    def _data(self, target: LoadedTargetModel) -> None:
        if (self.folder / DATA / MANIFEST).exists():
            return
        path, speed = self.prompts, tokens_per_second(target, self.responses.batch_size)
        if path is None:
            path, count = self.folder / PROMPTS, self.count or _COUNT
            announce(f"requests: {count}, made up by the target", count * _REQUEST_TOKENS / speed)
            write_prompts(target, count, path, self.made_up)
        conversations = read_conversations(path, limit=self.count)
        most = len(conversations) * self.responses.max_tokens
        announce(f"responses to {len(conversations)} requests", most / speed, at_most=True)
        prepare(conversations, target, self.responses, self.folder / DATA, path.name)

    def _recipe(self) -> None:
        path = self.folder / RECIPE
        if path.exists():
            return
        announce("recipe, with a short measurement", None)
        given = (self.recipe_settings, self.trust_remote_code)
        text = as_yaml(propose_recipe(self.target, self.folder / DATA, self.folder / RUN, *given))
        atomic_write(path, lambda file: file.write_text(text, encoding="utf-8"))


def announce(stage: str, seconds: float | None, at_most: bool = False) -> None:
    """Log that a stage begins, with its expected time if there is an estimate."""
    expected = "" if seconds is None else f", {'at most ' if at_most else ''}about {duration(seconds)}"
    logger.info("Stage %s%s.", stage, expected)


def tokens_per_second(target: LoadedTargetModel, batch: int) -> float:
    """The target's speed in writing ``batch`` responses at a time, measured briefly."""
    prompts = [[token] for token in range(batch)]
    begin = time.perf_counter()
    for _ in generate_responses(model_to_write_with(target), prompts, (), [_TRIAL_TOKENS] * batch, batch):
        pass
    return batch * _TRIAL_TOKENS / (time.perf_counter() - begin)
