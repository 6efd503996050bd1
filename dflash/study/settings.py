"""A study as its YAML says it: what all cells share, what varies, and the cells that follow.

A setting of decoding is named ``decode.KEY``, one of the recipe ``train.KEY`` with the dotted path that
``dflash train --set`` takes. A factor is such a name with a list of values, or any other name with labelled
groups of settings that change together.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..core.errors import DFlashError, did_you_mean
from ..core.option import all_names, named
from ..core.parts import Part
from ..core.settings import (
    Checked,
    SettingsError,
    from_dict,
    load_settings,
    load_values,
    require,
    setting,
    settings_help,
)
from ..core.values import require_count
from ..options import DecodeOptions, decode_options
from ..target.load import BUNDLED
from ..training.recipe import Recipe, bundled_recipes

TRAINED = "trained"
MAX_TOKENS = 256
DRAFTER_SETTINGS = ("drafter", "block_size", "draft_bits", "draft_window")
"""Settings of decoding that choose the drafter, and are no field of :class:`~dflash.DecodeOptions`."""

DECODE_SETTINGS = (*DRAFTER_SETTINGS, *(option.name for option in dataclasses.fields(DecodeOptions)))

_LEAST = {"block_size": 2, "draft_bits": 2, "draft_window": 1, "max_tokens": 1}
"""The least that decoding takes: a block of one position drafts nothing, and plain decoding needs a token."""

_DECODE, _TRAIN = "decode.", "train."
_PARTS = tuple(f"{_DECODE}{name}" for name in ("drafter", "verify", "policy", "sampler"))
"""Factors whose values are registered parts, which have options."""


@dataclass(frozen=True)
class PromptSet(Checked):
    """Requests that every cell answers; ``chat: false`` takes each text as it stands."""

    file: str = setting(BUNDLED, "a JSONL file or a hub dataset; bundled: held-out requests of the bundled models")
    limit: int | None = setting(None, "only the first N", above=0)
    template: str | None = setting(None, "makes the prompt from a line's keys: 'Question: {question}'")
    chat: bool = setting(True, "put each through the target's chat template")


@dataclass(frozen=True)
class Study(Checked):
    """A grid of cells over settings of decoding and of training, on the same prompts.

    Raises :class:`~dflash.core.settings.SettingsError`, naming the key, for what cannot be.
    """

    folder: Path = setting(meaning="where the study leaves its files")
    vary: dict[str, Any] = setting(meaning="factors: {decode.block_size: [4, 8]}, {train.objective.gamma: [3, 7]}")
    target: str | None = setting(None, "folder or hub name; default: the recipe's, or the bundled one")
    prompts: dict[str, Any] = setting(meaning="sets by name: {inside: {file: q.jsonl, limit: 20}}", factory=dict)
    decode: dict[str, Any] = setting(meaning="settings of decoding that all cells share", factory=dict)
    recipe: str | dict[str, Any] | None = setting(
        None, "the recipe of the cells' drafters: a file, a bundled name, or its keys; default: nothing is trained"
    )
    cache_features: bool = setting(
        False, "compute the target's features once for all cells that read the same layers, onto the disk"
    )
    train: dict[str, Any] = setting(meaning="settings in the recipe's place: {run.steps: 200}", factory=dict)
    design: Literal["product", "one_at_a_time"] = setting(
        "product", "all combinations, or each factor alone around the first value of all"
    )
    seeds: tuple[int, ...] = setting((0,), "each cell once with each: weights, data, and sampling if there is any")
    plain: bool = setting(
        True, "decode plainly too, to compare speed and text; false: greedy cells with policy full are not timed"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.seeds), "seeds is empty; give at least one, such as [0].")
        require(len(set(self.seeds)) == len(self.seeds), f"seeds must differ, got {list(self.seeds)}.")
        require(self.recipe is not None or not self.train, "train changes a recipe, and there is none; give recipe.")
        _ = self.prompt_sets, self.factors  # mistakes in them show now

    @property
    def prompt_sets(self) -> dict[str, PromptSet]:
        """The sets of prompts by name; without any, the held-out requests of the bundled models."""
        given = self.prompts or {BUNDLED: {}}
        return {str(name): from_dict(PromptSet, values or {}, f"prompts: {name}") for name, values in given.items()}

    @property
    def factors(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The settings of each level, by factor and label."""
        return {str(name): _levels(str(name), values) for name, values in self.vary.items()}


@dataclass(frozen=True)
class Cell:
    """One combination: its level of each factor, its seed, and the settings that follow.

    Args:
        levels: The label of each factor's level.
        seed: Of weights, data and sampling.
        drafter: Settings of :data:`DRAFTER_SETTINGS`, as far as they are given.
        options: Options of decoding, checked.
        recipe: Trains the drafter; its ``run.folder`` is that of the study. ``None``: the drafter exists.
    """

    levels: dict[str, str]
    seed: int
    drafter: dict[str, Any]
    options: dict[str, Any]
    recipe: Recipe | None = field(default=None, repr=False)

    @property
    def greedy(self) -> bool:
        """Whether its text must be that of plain decoding; with sampling a rounding may change a token."""
        return decode_options(self.options).greedy


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study; ``overrides`` are settings such as ``"folder=runs/again"``.

    Raises :class:`~dflash.core.settings.SettingsError`, naming file and key.
    """
    study = load_settings(Study, Path(path), overrides)
    try:
        make_cells(study)
    except DFlashError as error:
        raise SettingsError(f"{path}: {error}") from error
    return study


def make_cells(study: Study) -> list[Cell]:
    """The cells of a study, in the order of their combinations, seeds next to each other.

    Raises ``DFlashError`` for a setting that is unknown or cannot be.
    """
    base = _base_recipe(study)
    return [_cell(study, base, levels, seed) for levels in combinations(study) for seed in study.seeds]


def combinations(study: Study) -> list[dict[str, str]]:
    """Labels by factor: all combinations, or the first levels and, factor by factor, each other level alone."""
    labels = {name: list(levels) for name, levels in study.factors.items()}
    if study.design == "product":
        return [dict(zip(labels, chosen, strict=True)) for chosen in itertools.product(*labels.values())]
    first = {name: known[0] for name, known in labels.items()}
    return [first, *(first | {name: label} for name, known in labels.items() for label in known[1:])]


def target_of(study: Study) -> str:
    """The target of all cells: the study's, else the recipe's, else the bundled one."""
    base = _base_recipe(study)
    return study.target or BUNDLED if base is None else str(base["target"])


def short_name(factor: str) -> str:
    """How tables name a factor."""
    return factor.removeprefix(_DECODE).removeprefix(_TRAIN)


# --- levels ---------------------------------------------------------------------------------------------------


def _levels(factor: str, values: Any) -> dict[str, dict[str, Any]]:
    where = f"vary: {factor}"
    if isinstance(values, dict) and not factor.startswith((_DECODE, _TRAIN)):
        levels = {str(label): group for label, group in values.items()}
        for label, group in levels.items():
            if not isinstance(group, dict) or not group:
                raise SettingsError(f"{where}: {label} must hold settings such as decode.block_size, got {group!r}.")
    elif isinstance(values, list) or (isinstance(values, dict) and factor in _PARTS):
        given = values if isinstance(values, list) else [values]
        chosen = [level for value in given for level in (_parts(where, value) if factor in _PARTS else [value])]
        levels = {label_of(value): {factor: value} for value in chosen}
        require(len(levels) == len(chosen), f"{where} names a value twice: {values}.")
    else:
        raise SettingsError(f"{where} must be a list of values, got {values!r}.")
    require(bool(levels), f"{where} has no values; give at least one.")
    return levels


def _parts(where: str, value: Any) -> list[Any]:
    """Of ``{name: typical, options: {epsilon: [0.05, 0.1]}}`` a text for each combination of the options' values."""
    if not isinstance(value, dict):
        return [value]
    try:
        part = Part.of(value)
    except DFlashError as error:
        raise SettingsError(f"{where}: {error}") from error
    values = [v if isinstance(v, list) else [v] for v in part.options.values()]
    return [str(Part(part.name, dict(zip(part.options, chosen, strict=True)))) for chosen in itertools.product(*values)]


def _as_text(name: str, value: Any) -> Any:
    """A part's name and options as one text, the same for the same options; other values as they are."""
    named = isinstance(value, str) and name != "drafter"  # that can be a path
    return str(Part.of(value)) if _DECODE + name in _PARTS and (named or isinstance(value, dict)) else value


def label_of(value: Any) -> str:
    """How tables name a value: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _cell(study: Study, base: dict[str, Any] | None, levels: dict[str, str], seed: int) -> Cell:
    decode, train = dict(study.decode), dict[str, Any]()
    for factor, label in levels.items():
        for name, value in study.factors[factor][label].items():
            section, _, key = name.partition(".")
            if section == "train" and base is None:
                raise SettingsError(f"vary: {name} changes a recipe, and there is none; train.* needs recipe.")
            if not key or section not in ("decode", "train"):
                hint = did_you_mean(name, _known_settings(study))
                raise SettingsError(f"vary: unknown setting {name!r}; {hint}")
            (decode if section == "decode" else train)[key] = value
    recipe = None if base is None else _recipe(study, base, train, seed)
    return Cell(levels, seed, *_decoding(study, decode, seed), recipe)


def _known_settings(study: Study) -> list[str]:
    """What a factor may be called, for suggestions."""
    train = [line.key for line in settings_help(Recipe)] if study.recipe is not None else []
    return [*(_DECODE + name for name in DECODE_SETTINGS), *(_TRAIN + name for name in dict.fromkeys(train))]


def _decoding(study: Study, decode: Mapping[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The drafter's settings, and the options of decoding."""
    for name in decode:
        if name not in DECODE_SETTINGS and name not in all_names(DecodeOptions):
            raise SettingsError(f"decode: unknown key {name!r}; {did_you_mean(name, DECODE_SETTINGS)}")
    given = {name: _as_text(name, value) for name, value in decode.items() if value is not None}
    for name, least in _LEAST.items():
        if name in given:
            require_count(f"decode.{name}", given[name], least)
    drafter = {name: given.pop(name) for name in DRAFTER_SETTINGS if name in given}
    if study.recipe is not None and drafter.setdefault("drafter", TRAINED) != TRAINED:
        raise SettingsError("decode.drafter and recipe both say who drafts; leave one of them out.")
    drafter.setdefault("drafter", BUNDLED)
    options = {"max_tokens": MAX_TOKENS} | named(DecodeOptions, given)
    if not decode_options(options).greedy:
        options = {"seed": seed} | options
    return drafter, options


# --- recipes --------------------------------------------------------------------------------------------------


def _base_recipe(study: Study) -> dict[str, Any] | None:
    """Plain values of the recipe that all cells share, with the study's target."""
    if study.recipe is None:
        return None
    if isinstance(study.recipe, str):
        path = Path(study.recipe)
        values = load_values(path if path.exists() else bundled_recipes().get(study.recipe, path))
    else:
        values = json.loads(json.dumps(study.recipe))
    for name, value in study.train.items():
        _replace(values, name, value)
    if study.target is not None or "target" not in values:
        values["target"] = study.target or BUNDLED
    return values


def _recipe(study: Study, base: dict[str, Any], train: Mapping[str, Any], seed: int) -> Recipe:
    values = json.loads(json.dumps(base, default=str))
    seeds = {f"{section}.seed": seed for section in ("drafter", "data") if not _fixes_seed(study.train, section)}
    for name, value in {**seeds, **train, "run.folder": str(study.folder)}.items():
        _replace(values, name, value)
    return from_dict(Recipe, values, "recipe")


def _fixes_seed(train: Mapping[str, Any], section: str) -> bool:
    nested = train.get(section)
    return f"{section}.seed" in train or (isinstance(nested, dict) and "seed" in nested)


def _replace(values: Any, name: str, value: Any) -> None:
    """Set the dotted key ``name`` in nested dicts, in place.

    Of a section only the given keys change, unless they name another ``kind``, which has other settings.
    """
    *parents, last = name.split(".")
    for parent in parents:
        values = values.setdefault(parent, {}) if isinstance(values, dict) else values
    if not isinstance(values, dict):
        raise SettingsError(f"train: {'.'.join(parents)} holds no keys, so {name} cannot be set.")
    there: Any = values.get(last)
    merged = isinstance(value, dict) and isinstance(there, dict)
    if merged and value.get("kind", there.get("kind")) == there.get("kind"):
        for key, inner in value.items():
            _replace(there, key, inner)
    else:
        values[last] = value
