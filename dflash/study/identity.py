"""What makes one cell another: keys of what is trained and of what is decoded, by content.

Knows settings, datasets and the files of models. Must not know how anything is carried out.

Equal keys mean equal results: whatever may change a drafter or an answer is in its key, and nothing else (no folder,
no name). The code is not, so what a plug-in's name stands for must not change between runs of one study.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..core.files import resolve_checkpoint
from ..core.settings import key_of, to_dict
from ..drafters.kinds import drafter_class
from ..drafters.mtp import NAME as MTP
from ..drafters.ngram import NAME as NGRAM
from ..generate import PAIR
from ..target import LoadedTargetModel
from ..training.data.dataset import dataset_fingerprint, open_dataset, read_manifest
from ..training.drafters.init import drafter_config, new_drafter
from ..training.recipe import DataSettings, Recipe
from .settings import BUNDLED, Cell

VERSION = 1

_NOT_OF_THE_WEIGHTS = {
    "run": ("folder", "log_every", "checkpoint_every", "peer_timeout", "callbacks", "max_loss_spike"),
    "data": ("folder", "cached_features"),
}
"""Settings of a recipe that do not change the drafter that comes of it."""


def training_key(recipe: Recipe, target: str) -> str:
    """Of the drafter that ``recipe`` trains for the target of fingerprint ``target``.

    Raises ``DFlashError`` for a dataset or drafter that cannot be read.
    """
    values = _given(recipe) | {"target": target}
    for section, names in _NOT_OF_THE_WEIGHTS.items():
        values[section] = {key: value for key, value in values[section].items() if key not in names}
    if recipe.drafter.from_ is not None:
        values["drafter"]["from"] = drafter_identity(recipe.drafter.from_)
    return _digest({"version": VERSION, "recipe": values, "dataset": _dataset(recipe.data.folder)})


class FeaturesRead(NamedTuple):
    """What a training reads of the target: the features of layers and, for its logits, the final hidden states."""

    layer_ids: tuple[int, ...]
    with_hidden: bool

    @property
    def amount(self) -> tuple[bool, int]:
        """Greater for what serves more trainings."""
        return self.with_hidden, len(self.layer_ids)


def features_read(recipe: Recipe, target: LoadedTargetModel) -> FeaturesRead:
    """What the training of ``recipe`` reads of ``target``.

    Raises ``DFlashError`` for a drafter that cannot be made for it or read.
    """
    shape = recipe.drafter
    if shape.from_ is not None:
        drafter: Any = new_drafter(shape, target)
    else:
        drafter = drafter_class(shape.kind)(drafter_config(shape, target))  # its weights are never computed
    with_hidden = recipe.objective.needs_target_logits or drafter.needs_target_logits
    return FeaturesRead(drafter.target_layer_ids, with_hidden)


def features_key(data: DataSettings, layer_ids: Sequence[int], with_hidden: bool) -> str:
    """Of a cache of the target's features, by what is in it; the order of the layers is not, since any can be read."""
    target, dataset = read_manifest(data.folder)["target"], _dataset(data.folder)["train"]
    return _digest([target, dataset, data.max_length, sorted(layer_ids), with_hidden])


def _given(settings: Any) -> dict[str, Any]:
    """Those settings that are not the defaults, so that a later version with more of them changes no key."""
    given = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            given[key_of(field)] = _given(value)
        elif field.name == "kind" or value != _default(field):
            given[key_of(field)] = to_dict(value)
    return given


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def decoding_key(cell: Cell, target: str, drafter: str) -> str:
    """Of the answers of ``cell`` by the drafter of identity ``drafter``, whatever the prompts."""
    who = {name: value for name, value in cell.drafter.items() if name != "drafter"}
    return _digest({"version": VERSION, "target": target, "drafter": [drafter, who], "options": cell.options})


def plain_options(cell: Cell) -> dict[str, Any]:
    """Those of the cell's options that plain decoding has too."""
    mine = ("max_tokens", "temp", "top_p", "min_p", "top_k", "seed", "sampler", "logits_processors", "logit_bias")
    penalties = ("penalty", "context_size")
    return {name: value for name, value in cell.options.items() if name in mine or name.endswith(penalties)}


def plain_key(cell: Cell, target: str) -> str:
    """Of the answers that plain mlx_lm gives with the cell's options of sampling."""
    return _digest({"version": VERSION, "target": target, "drafter": "plain mlx_lm", "options": plain_options(cell)})


def prompt_key(tokens: Sequence[int]) -> str:
    """Of a prompt, by its token ids."""
    return _digest(list(tokens))


@lru_cache(maxsize=256)
def drafter_identity(name: str) -> str:
    """Of a drafter that exists: the name of one without files of its own, else a hash of its config and weights."""
    if name in (NGRAM, MTP):
        return name
    if name.startswith(f"{NGRAM}+"):
        return f"{NGRAM}+{drafter_identity(name.removeprefix(f'{NGRAM}+'))}"
    folder = PAIR / "drafter" if name == BUNDLED else resolve_checkpoint(name)
    total = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        total.update(path.name.encode())
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


@lru_cache(maxsize=256)
def _dataset(folder: Path) -> dict[str, dict[str, int]]:
    splits = ("train", "heldout")  # the heldout part chooses the best checkpoint
    return {split: dataset_fingerprint(open_dataset(folder, split, None)) for split in splits}  # type: ignore[arg-type]


def _digest(value: Mapping[str, Any] | Sequence[Any]) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
