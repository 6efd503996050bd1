"""The plan of a study on this machine: its cells with their keys, its prompts, and what is still to be done."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ..adapters.registry import ADAPTERS, detect_model_architecture
from ..core.errors import DataError, DFlashError, GenerationError, did_you_mean, one_line
from ..core.files import read_json
from ..core.settings import SettingsError
from ..drafters.checks import check_drafter
from ..drafters.combined import own_name
from ..drafters.kinds import drafter_class, needs_no_files
from ..evaluation import HELDOUT
from ..evaluation.runs import rotated
from ..models import ModelOptions
from ..options import decode_options
from ..prompts.conversations import read_conversations
from ..prompts.tokens import prompt_tokens
from ..target import LoadedTargetModel
from ..target.identity import target_fingerprint
from ..training.drafters.init import drafter_config, new_drafter
from ..training.loop.run_folder import STATE, read_progress
from ..training.recipe import Recipe
from .cache import (
    FEATURES,
    FINISHED,
    TRAINED,
    Answers,
    decoding_key,
    drafter_identity,
    features_key,
    plain_key,
    plain_options,
    prompt_key,
    training_key,
)
from .plugins import Sources, sources, sources_of_drafter, sources_of_options, sources_of_recipe
from .settings import BUNDLED, Cell, PromptSet, Study, make_cells, short_name


@dataclass(frozen=True)
class StudyPrompt:
    """A request in the set of prompts called ``set``: its token ids and its key."""

    set: str
    tokens: list[int]
    key: str


@dataclass(frozen=True)
class PlannedCell:
    """A cell with the keys of its drafter's training (``None``: not trained), its answers and plain answers.

    ``plugins`` are the sources of what it uses of plug-ins.
    """

    cell: Cell
    training: str | None
    answers: str
    plain: str
    plugins: Sources

    @property
    def name(self) -> str:
        """What tables and commands call it."""
        return self.answers[:8]

    def __str__(self) -> str:
        levels = (f"{short_name(factor)} {label}" for factor, label in self.cell.levels.items())
        return f"{self.name} ({', '.join(levels)}, seed {self.cell.seed})"


class Plan:
    """Every cell of ``study`` with its keys, all prompts, and what is done.

    ``only`` are names of cells; the others are left out. Raises ``DFlashError`` for prompts,
    datasets or drafters that cannot be read, settings that target or drafter cannot be decoded with, two levels that
    are the same cell, and an unknown cell.
    """

    def __init__(self, study: Study, target: LoadedTargetModel, only: Sequence[str] = ()):
        self.study, self.target, self.folder = study, target, study.folder
        self._known_reads: dict[str, tuple[tuple[int, ...], bool]] = {}
        self.prompts = [p for name, chosen in study.prompt_sets.items() for p in encoded(name, chosen, target)]
        fingerprint = target_fingerprint(target)
        adapter = sources((ADAPTERS, detect_model_architecture(target.model)))
        cells = [_planned(cell, fingerprint, adapter) for cell in make_cells(study)]
        _check_decoding([cell.cell for cell in cells], target)
        _check_different(cells, fingerprint)
        names = [cell.name for cell in cells]
        for name in only:
            if name not in names:
                raise DFlashError(f"The study has no cell {name!r}; {did_you_mean(name, names)}")
        self.cells = [cell for cell in cells if not only or cell.name in only]

    @property
    def plugins(self) -> Sources:
        """What the cells use of plug-ins."""
        return {part: source for cell in self.cells for part, source in cell.plugins.items()}

    # --- training ---------------------------------------------------------------------------------------------

    @cached_property
    def trainings(self) -> dict[str, Recipe]:
        """The recipe of each drafter by its key, with the study's folders.

        Trainings share features of the same layers and text, with hidden states if any of them needs those.
        """
        cells = {cell.training: cell.cell.recipe for cell in self.cells if cell.training is not None}
        recipes = {
            key: dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, folder=self.run_folder(key)))
            for key, recipe in cells.items()
            if recipe is not None
        }
        if not self.study.cache_features:
            return recipes
        reads = {key: self._features_read(recipe) for key, recipe in recipes.items()}
        complete = {key: features_key(recipes[key].data, layer_ids, True) for key, (layer_ids, _) in reads.items()}
        needed = {complete[key] for key, (_, with_hidden) in reads.items() if with_hidden}
        for key, recipe in recipes.items():
            name = complete[key] if complete[key] in needed else features_key(recipe.data, reads[key][0], False)
            data = dataclasses.replace(recipe.data, cached_features=self.folder / FEATURES / name)
            recipes[key] = dataclasses.replace(recipe, data=data)
        return recipes

    @property
    def untrained(self) -> list[str]:
        """The keys of the drafters that are not complete."""
        return [key for key in self.trainings if self.finished(key) is None]

    def feature_recipes(self) -> list[Recipe]:
        """For each folder of features that an untrained drafter reads, the recipe of the plan that needs most of it."""

        def amount(recipe: Recipe) -> tuple[bool, int]:
            layer_ids, with_hidden = self._features_read(recipe)
            return with_hidden, len(layer_ids)

        wanted = {self.trainings[key].data.cached_features for key in self.untrained} - {None}
        keys = self.trainings if self.study.cache_features else self.untrained  # a folder of the study's serves all
        readers = [recipe for key in keys if (recipe := self.trainings[key]).data.cached_features in wanted]
        return list({recipe.data.cached_features: recipe for recipe in sorted(readers, key=amount)}.values())

    def _features_read(self, recipe: Recipe) -> tuple[tuple[int, ...], bool]:
        """:func:`features_read`, once for recipes that read alike: it may load a drafter."""
        alike = repr((dataclasses.replace(recipe.drafter, seed=0), recipe.objective.kind))
        if alike not in self._known_reads:
            self._known_reads[alike] = features_read(recipe, self.target)
        return self._known_reads[alike]

    def run_folder(self, training: str) -> Path:
        """Where a drafter is trained."""
        return self.folder / TRAINED / training

    def finished(self, training: str) -> dict[str, Any] | None:
        """What is recorded of a complete training: ``seconds``, ``steps``, ``parameters``; else ``None``."""
        path = self.run_folder(training) / FINISHED
        return read_json(path) if path.exists() else None

    def steps(self, training: str | None) -> tuple[int, int | None]:
        """Steps done of a training, and its length if known; 0 of 0 for a cell without a training."""
        if training is None:
            return 0, 0
        if (done := self.finished(training)) is not None:
            return done["steps"], done["steps"]
        begun = read_progress(self.run_folder(training) / STATE)
        return begun.step, self.trainings[training].run.steps or begun.steps or None

    # --- decoding ---------------------------------------------------------------------------------------------

    @cached_property
    def sides(self) -> dict[str, PlannedCell]:
        """Each way of decoding once, by the key of its answers; plain decoding by the cell's ``plain``."""
        plain = {cell.plain: cell for cell in self.cells} if self.study.plain else {}
        return plain | {cell.answers: cell for cell in self.cells}

    def answers(self, key: str) -> Answers:
        """The answers of a side so far."""
        planned = self.sides[key]
        plain = key == planned.plain
        options = plain_options(planned.cell) if plain else planned.cell.options
        drafter = {"drafter": "none"} if plain else planned.cell.drafter
        return Answers(self.folder, key, {"drafter": drafter, "options": options})

    def turns(self) -> list[tuple[StudyPrompt, list[str]]]:
        """Each prompt with the sides that have not answered it yet, in the order of their turns.

        The order rotates from prompt to prompt, so that a machine that slows down does so for all alike.
        """
        answers, turns = {key: self.answers(key) for key in self.sides}, []
        for number, prompt in enumerate(self.prompts):
            if missing := [key for key in rotated([*answers], number) if prompt.key not in answers[key]]:
                turns.append((prompt, missing))
        return turns


def features_read(recipe: Recipe, target: LoadedTargetModel) -> tuple[tuple[int, ...], bool]:
    """The layers whose features the training of ``recipe`` reads, and whether it reads the final hidden states too.

    Raises ``DFlashError`` for a drafter that cannot be made for ``target`` or read.
    """
    shape = recipe.drafter
    if shape.from_ is not None:
        drafter: Any = new_drafter(shape, target)
    else:
        drafter = drafter_class(shape.kind)(drafter_config(shape, target))  # its weights are never computed
    return drafter.target_layer_ids, recipe.objective.needs_target_logits or drafter.needs_target_logits


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


def _planned(cell: Cell, target: str, adapter: Sources) -> PlannedCell:
    """The cell with its keys; ``target`` is a fingerprint."""
    if cell.recipe is not None:
        plugins = adapter | sources_of_recipe(cell.recipe)
        training: str | None = training_key(cell.recipe, target, plugins)
        drafter = f"trained {training}"
    else:
        plugins, training = adapter | sources_of_drafter(cell.drafter["drafter"]), None
        drafter = drafter_identity(cell.drafter["drafter"])
    plugins = plugins | sources_of_options(cell.options)
    plain = plain_key(cell, target, adapter | sources_of_options(plain_options(cell)))
    return PlannedCell(cell, training, decoding_key(cell, target, drafter, plugins), plain, plugins)


# --- refusals -------------------------------------------------------------------------------------------------


def _check_decoding(cells: Sequence[Cell], target: LoadedTargetModel) -> None:
    """Raise :class:`~dflash.core.settings.SettingsError` for settings that target or drafter cannot decode with."""

    @lru_cache
    def own_block_size(chosen: ModelOptions) -> int:
        drafter = chosen.load_drafter(None)
        check_drafter(drafter)
        return drafter.block_size

    for cell in cells:
        asked, who = decode_options(cell.options), cell.drafter
        named = needs_no_files(own_name(who["drafter"]))  # made at once
        try:
            asked.check_vocabulary(target.vocab_size)
            cache = target.make_cache(**asked.cache_options)
            if asked.tree is not None:
                target.check_trees(cache)
            if cell.recipe is not None and cell.recipe.drafter.from_ is None:
                own = cell.recipe.drafter.block_size
            elif who.keys() & {"block_size", "draft_bits", "draft_window"} or named:
                name = who["drafter"] if cell.recipe is None else cell.recipe.drafter.from_
                own = own_block_size(ModelOptions(**who | {"drafter": name, "block_size": None}))
            else:
                continue
        except DFlashError as error:
            raise SettingsError(f"decode: {one_line(error)}") from error
        if who.get("block_size", 0) > own:
            raise SettingsError(f"decode.block_size {who['block_size']} is more than the drafter's own {own}.")


def _check_different(cells: Sequence[PlannedCell], target: str) -> None:
    """Raise :class:`~dflash.core.settings.SettingsError` if two combinations of levels are decoded alike."""
    known: dict[tuple[str, int], Cell] = {}
    for planned in cells:
        cell = planned.cell
        without_defaults = dataclasses.replace(cell, options=decode_options(cell.options).given())
        other = known.setdefault((_planned(without_defaults, target, {}).answers, cell.seed), cell)
        for factor, label in cell.levels.items():
            if other.levels[factor] != label:
                raise SettingsError(
                    f"vary: {factor}: {other.levels[factor]} and {label} are the same cell; leave one of them out."
                )
