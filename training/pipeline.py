"""From a target alone to its drafter: requests, responses, a recipe, training, export.

    prompts.jsonl    requests written by the target, unless prompts are given
    data/            the target's responses to them
    recipe.yaml      the recipe; it may be edited before training
    run/             the training
    drafter/         the finished drafter

Every stage can be resumed and finished stages are skipped, so the same call continues an interrupted run.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash import LoadedTargetModel, load_target
from dflash.core.errors import DataError
from dflash.core.files import atomic_write
from dflash.core.progress import duration
from dflash.prompts.conversations import read_conversations

from ..core.settings import to_dict
from .data.dataset import MANIFEST, read_manifest
from .data.plan import PrepareSettings
from .data.prepare import prepare
from .data.responses import tokens_per_second
from .data.self_prompts import PromptSettings, write_prompts, writing_seconds
from .data.sequences import Sequences
from .export import export
from .identity import differences
from .loop.run_folder import BEST
from .loop.run_folder import RECIPE as RUN_OF_TRAIN
from .new_recipe import as_yaml, check_overrides, propose_recipe, training_seconds
from .recipe import load_recipe
from .train import FINISHED, train

logger = logging.getLogger(__name__)

PROMPTS, DATA, RECIPE, RUN, DRAFTER = "prompts.jsonl", "data", "recipe.yaml", "run", "drafter"

_COUNT = 5000
_TYPICAL_PROMPT = 64  # tokens, where there are no data yet


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
        check_overrides(self.recipe_settings)

    def run(self) -> Path:
        """Run the stages that are left; returns the folder of the finished drafter.

        Raises ``DataError`` if the folder holds anything else, or is of another target or of other options, and
        whatever the stages raise: ``DFlashError`` and ``OSError``.
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
            announce("training", training_seconds(checked, target))
            del target  # training loads its own
            train(checked, trust_remote_code=self.trust_remote_code)
        announce("export", None)
        export(checked.run.folder, self.folder / DRAFTER, best=(checked.run.folder / BEST).exists())
        return self.folder / DRAFTER

    def forecast(self) -> Iterator[tuple[str, float | None]]:
        """The stages that are left, in words, each with the seconds that it takes at most, measured briefly.

        ``None`` stands for a moment. Nothing is written. Raises what :meth:`run` raises.
        """
        self._require_own_folder()
        if (self.folder / DRAFTER / "model.safetensors").exists():
            return
        target, prepared = load_target(self.target, self.trust_remote_code), (self.folder / DATA / MANIFEST).exists()
        count, most = self.count or _COUNT, self.responses.max_tokens
        if not prepared:
            if self.prompts is not None:
                count = len(read_conversations(self.prompts, limit=self.count))
            else:
                yield f"{count} requests, made up by the target", writing_seconds(target, count, self.made_up)
            yield f"responses to {count} requests", count * most / tokens_per_second(target, self.responses.batch_size)
        if (self.folder / RECIPE).exists():
            recipe = load_recipe(self.folder / RECIPE)
        else:
            yield "a recipe", None
            given = (self.folder / RUN, self.recipe_settings, self.trust_remote_code)
            recipe = propose_recipe(self.target, self.folder / DATA if prepared else None, *given).recipe
        if not (recipe.run.folder / FINISHED / "model.safetensors").exists():
            length = min(_TYPICAL_PROMPT + most, recipe.data.max_length)
            longest = Sequences.from_lists([[0]] * count, [[0] * (length - 1)] * count)
            yield "training, without evaluations", training_seconds(recipe, target, None if prepared else longest)
        yield "export", None

    def _require_own_folder(self) -> None:
        path = self.folder / RECIPE
        if path.exists():
            begun = load_recipe(path)
            if Path(begun.target).resolve() != Path(self.target).resolve():
                raise DataError(
                    f"{self.folder} belongs to the target {begun.target}, not {self.target}; choose a new folder."
                )
            asked = load_recipe(path, self.recipe_settings)
            _require_alike(path, to_dict(begun), to_dict(asked), "leave --set out, edit it")
        elif (self.folder / RUN_OF_TRAIN).exists() or (self.folder / DRAFTER).exists():
            raise DataError(
                f"{self.folder} was not made by dflash fit: it holds a run or a drafter, and no {RECIPE}. Choose a new "
                "folder; a run of dflash train continues by dflash train."
            )
        made, count = (self.folder / DATA / MANIFEST).exists(), self.count
        there = read_manifest(self.folder / DATA) if made else {}
        if self.prompts is not None and made and not self.prompts.exists():
            count = None  # they are answered, so nobody needs the file
        elif self.prompts is not None:
            count = len(read_conversations(self.prompts, limit=self.count))  # a mistake shows before the target loads
        if "conversations" in there:  # other datasets were put there by hand
            requests = there["conversations"]["count"]
            before = {"source": there["source"], "requests": requests, **there["settings"]}
            now = {"source": PROMPTS if self.prompts is None else self.prompts.name, "requests": count or requests}
            now |= {name: getattr(self.responses, name) for name in ("max_tokens", "temp", "seed")}
            _require_alike(self.folder / DATA, before, before | now, "give the options of then")

    def _data(self, target: LoadedTargetModel) -> None:
        if (self.folder / DATA / MANIFEST).exists():
            return
        path = self.prompts
        if path is None:
            path, count = self.folder / PROMPTS, self.count or _COUNT
            announce(f"requests: {count}, made up by the target", None)
            write_prompts(target, count, path, self.made_up)
        conversations = read_conversations(path, limit=self.count)
        most = len(conversations) * self.responses.max_tokens
        seconds = most / tokens_per_second(target, self.responses.batch_size)
        announce(f"responses to {len(conversations)} requests", seconds)
        prepare(conversations, target, self.responses, self.folder / DATA, path.name)

    def _recipe(self) -> None:
        path = self.folder / RECIPE
        if path.exists():
            return
        announce("recipe, with a short measurement", None)
        given = (self.recipe_settings, self.trust_remote_code)
        text = as_yaml(propose_recipe(self.target, self.folder / DATA, self.folder / RUN, *given))
        atomic_write(path, lambda file: file.write_text(text, encoding="utf-8"))


def _require_alike(path: Path, there: dict[str, Any], asked: dict[str, Any], remedy: str) -> None:
    for name, old, new in differences(there, asked):
        raise DataError(
            f"{path} has {name} {old!r}, but these options ask for {new!r}; {remedy}, or choose a new folder."
        )


def announce(stage: str, seconds: float | None) -> None:
    """Log that a stage begins, with the time that it takes at most if there is an estimate."""
    expected = "" if seconds is None else f", at most about {duration(seconds)}"
    logger.info("Stage %s%s.", stage, expected)
