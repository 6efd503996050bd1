"""What a study consists of on this machine: its cells with their keys, its prompts, and what is there already.

Knows settings, keys and where things lie. Must not know how a drafter is trained or a prompt is decoded.

    features/KEY/       the target's features, where the study caches them
    trained/KEY/        the run of dflash train that made a drafter, with ``finished.json`` once it is complete
    answers/KEY.json    the answers of one way of decoding, or of plain mlx_lm
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ..core.errors import DataError, DFlashError, GenerationError, did_you_mean, one_line
from ..core.files import read_json
from ..core.settings import SettingsError
from ..drafters.checkpoints.checkpoint import load_drafter
from ..drafters.combined import PREFIX as COMBINED
from ..generate import PAIR
from ..options import decode_options
from ..prompts.conversations import read_conversations
from ..prompts.tokens import prompt_tokens
from ..target import LoadedTargetModel
from ..target.identity import target_fingerprint
from ..training.recipe import Recipe
from .answers import Answers
from .identity import (
    FeaturesRead,
    decoding_key,
    drafter_identity,
    features_key,
    features_read,
    plain_key,
    plain_options,
    prompt_key,
    training_key,
)
from .settings import BUNDLED, HELDOUT, Cell, PromptSet, Study, make_cells

FEATURES_FOLDER, TRAINED_FOLDER, FINISHED = "features", "trained", "finished.json"


@dataclass(frozen=True)
class StudyPrompt:
    """A request of the prompts called ``set``, as token ids, and its key."""

    set: str
    tokens: list[int]
    key: str


@dataclass(frozen=True)
class PlannedCell:
    """A cell with the keys of its drafter's training (``None``: not trained), its answers and plain answers."""

    cell: Cell
    training: str | None
    answers: str
    plain: str

    @property
    def name(self) -> str:
        """What tables and commands call it."""
        return self.answers[:8]

    def __str__(self) -> str:
        levels = ", ".join(f"{factor.removeprefix('decode.').removeprefix('train.')} {label}" for factor, label in
                           self.cell.levels.items())  # fmt: skip
        return f"{self.name} ({levels}, seed {self.cell.seed})"


class Plan:
    """Every cell of ``study`` with its keys, all prompts, and what is done.

    ``only`` are names of cells; the others are left out. Raises ``DFlashError`` for prompts,
    datasets or drafters that cannot be read, settings that target or drafter cannot be decoded with, two levels that
    are the same cell, and an unknown cell.
    """

    def __init__(self, study: Study, target: LoadedTargetModel, only: Sequence[str] = ()):
        self.study, self.target, self.folder = study, target, study.folder
        self.prompts = [p for name, chosen in study.prompt_sets.items() for p in encoded(name, chosen, target)]
        fingerprint = target_fingerprint(target)
        cells = [_planned(cell, fingerprint) for cell in make_cells(study)]
        check_decoding([cell.cell for cell in cells], target)
        _check_different(cells, fingerprint)
        names = [cell.name for cell in cells]
        for name in only:
            if name not in names:
                raise DFlashError(f"The study has no cell {name!r}; {did_you_mean(name, names)}")
        self.cells = [cell for cell in cells if not only or cell.name in only]

    @cached_property
    def trainings(self) -> dict[str, Recipe]:
        """The recipe of each drafter by its key; its run folder is its own."""
        names, recipes = self._feature_keys() if self.study.cache_features else {}, {}
        for key, recipe in self._recipes.items():
            run, data = dataclasses.replace(recipe.run, folder=self.run_folder(key)), recipe.data
            if key in names:
                data = dataclasses.replace(data, cached_features=self.folder / FEATURES_FOLDER / names[key])
            recipes[key] = dataclasses.replace(recipe, run=run, data=data)
        return recipes

    @cached_property
    def reads(self) -> dict[str, FeaturesRead]:
        """What each training reads of the target, by its key."""
        known: dict[str, FeaturesRead] = {}
        reads = {}
        for key, recipe in self._recipes.items():
            alike = repr((dataclasses.replace(recipe.drafter, seed=0), recipe.objective.kind))
            if alike not in known:
                known[alike] = features_read(recipe, self.target)
            reads[key] = known[alike]
        return reads

    def caches(self, trainings: Sequence[str]) -> dict[Path, str]:
        """The folders of features that ``trainings`` read, each with the key of the training that needs most of it.

        A folder of the study's own is the one that its key says, so there finished trainings count too.
        """
        folders = {self.trainings[key].data.cached_features for key in trainings}
        readers = [
            (folder, key)
            for key in (self.trainings if self.study.cache_features else trainings)
            if (folder := self.trainings[key].data.cached_features) is not None and folder in folders
        ]
        return dict(sorted(readers, key=lambda reader: self.reads[reader[1]].amount))  # the last one of a folder stays

    def _feature_keys(self) -> dict[str, str]:
        """The key of each training's features; with hidden states where any training needs them."""

        def name(key: str, with_hidden: bool) -> str:
            return features_key(self._recipes[key].data, self.reads[key].layer_ids, with_hidden)

        complete = {name(key, True) for key, read in self.reads.items() if read.with_hidden}
        return {key: name(key, name(key, True) in complete) for key in self.reads}

    @cached_property
    def _recipes(self) -> dict[str, Recipe]:
        return {c.training: c.cell.recipe for c in self.cells if c.training is not None and c.cell.recipe is not None}

    @cached_property
    def sides(self) -> dict[str, PlannedCell]:
        """Each way of decoding once, by the key of its answers; plain ones by their cells' ``plain``."""
        plain = {cell.plain: cell for cell in self.cells} if self.study.plain else {}
        return plain | {cell.answers: cell for cell in self.cells}

    def run_folder(self, training: str) -> Path:
        """Where a drafter is trained."""
        return self.folder / TRAINED_FOLDER / training

    def finished(self, training: str) -> dict[str, Any] | None:
        """What is known of a complete training: ``seconds``, ``steps``, ``parameters``; else ``None``."""
        path = self.run_folder(training) / FINISHED
        return read_json(path) if path.exists() else None

    def answers(self, key: str) -> Answers:
        """The answers of a side, as far as they are there."""
        planned = self.sides[key]
        plain = key == planned.plain
        options = plain_options(planned.cell) if plain else planned.cell.options
        drafter = {"drafter": "none"} if plain else planned.cell.drafter
        return Answers(self.folder, key, {"drafter": drafter, "options": options})


def _planned(cell: Cell, target: str) -> PlannedCell:
    training = None if cell.recipe is None else training_key(cell.recipe, target)
    drafter = f"trained {training}" if training is not None else drafter_identity(cell.drafter["drafter"])
    return PlannedCell(cell, training, decoding_key(cell, target, drafter), plain_key(cell, target))


def check_decoding(cells: Sequence[Cell], target: LoadedTargetModel) -> None:
    """Raise :class:`~dflash.core.settings.SettingsError` for settings that target or drafter cannot decode with."""
    own_block_size = lru_cache(_own_block_size)
    for cell in cells:
        asked, who = decode_options(cell.options), cell.drafter
        try:
            asked.check_vocabulary(target.vocab_size)
            cache = target.make_cache(**asked.cache_options)
            if asked.tree is not None:
                target.check_trees(cache)
            if cell.recipe is not None and cell.recipe.drafter.from_ is None:
                own = cell.recipe.drafter.block_size
            elif who.keys() & {"block_size", "draft_bits", "draft_window"}:
                name = who["drafter"] if cell.recipe is None else cell.recipe.drafter.from_
                own = own_block_size(name, who.get("draft_bits"), who.get("draft_window"))
            else:
                continue
        except DFlashError as error:
            raise SettingsError(f"decode: {one_line(error)}") from error
        if who.get("block_size", 0) > own:
            raise SettingsError(f"decode.block_size {who['block_size']} is more than the drafter's own {own}.")


def _own_block_size(drafter: str, bits: int | None, window: int | None) -> int:
    return int(load_drafter(drafter_source(drafter), bits, window).block_size)


def drafter_source(name: str) -> str | Path:
    """What :func:`~dflash.load_drafter` takes for the drafter that a study calls ``name``."""
    if name.startswith(COMBINED):
        return f"{COMBINED}{drafter_source(name.removeprefix(COMBINED))}"
    return PAIR / "drafter" if name == BUNDLED else name


def _check_different(cells: Sequence[PlannedCell], target: str) -> None:
    """Raise :class:`~dflash.core.settings.SettingsError` if two combinations of levels are decoded alike."""
    known: dict[tuple[str, int], Cell] = {}
    for planned in cells:
        cell = planned.cell
        plainly = dataclasses.replace(cell, options=decode_options(cell.options).given())  # without what is usual
        other = known.setdefault((_planned(plainly, target).answers, cell.seed), cell)
        for factor, label in cell.levels.items():
            if other.levels[factor] != label:
                raise SettingsError(
                    f"vary: {factor}: {other.levels[factor]} and {label} are the same cell; leave one of them out."
                )


def encoded(name: str, chosen: PromptSet, target: LoadedTargetModel) -> list[StudyPrompt]:
    """The prompts of a set. Raises ``DataError`` where the target cannot take one."""
    source = HELDOUT if chosen.file == BUNDLED else chosen.file
    prompts = []
    for conversation in read_conversations(source, template=chosen.template, limit=chosen.limit):
        messages = list(conversation.unanswered().messages)
        alone = len(messages) == 1 and messages[0]["role"] == "user"
        try:
            tokens = prompt_tokens(target, messages[0]["content"] if alone else messages, chat=chosen.chat)
        except GenerationError as error:
            raise DataError(f"{conversation.where}: {error}") from error
        prompts.append(StudyPrompt(name, tokens, prompt_key(tokens)))
    return prompts
