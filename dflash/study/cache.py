"""What a study keeps, each thing under a key: a hash of everything that decides it.

    features/KEY/       the target's features, where the study caches them
    trained/KEY/        the run of dflash train that made a drafter, with ``finished.json`` once it is complete
    answers/KEY.json    the answers of one way of decoding, or of plain mlx_lm, by the key of the prompt

Equal keys mean equal results. Folders and names are not in a key, nor is this package's code. What a plug-in registers
is in it by its source (:mod:`.plugins`).
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from ..core.files import atomic_write, read_json, remove_unfinished, resolve_checkpoint
from ..core.parts import Part
from ..core.settings import key_of, to_dict
from ..drafters.combined import PREFIX as COMBINED
from ..drafters.combined import own_name
from ..drafters.kinds import needs_no_files
from ..evaluation.acceptance import Drafted
from ..evaluation.runs import Run
from ..evaluation.texts import Text
from ..generate import PAIR
from ..options import option_names
from ..training.data.dataset import dataset_fingerprint, open_dataset, read_manifest
from ..training.recipe import DataSettings, Recipe
from .plugins import Sources
from .settings import BUNDLED, Cell

FEATURES, TRAINED, ANSWERS, FINISHED = "features", "trained", "answers", "finished.json"
VERSION = 1

_NOT_OF_THE_WEIGHTS = {
    "run": ("folder", "log_every", "checkpoint_every", "peer_timeout", "callbacks", "max_loss_spike"),
    "data": ("folder", "cached_features"),
}
"""Settings of a recipe that do not change the drafter."""


# --- keys -----------------------------------------------------------------------------------------------------


def training_key(recipe: Recipe, target: str, plugins: Sources) -> str:
    """The key of the drafter that ``recipe`` trains with ``plugins`` for the target of fingerprint ``target``.

    Raises ``DFlashError`` for a dataset or drafter that cannot be read.
    """
    values = _given(recipe) | {"target": target}
    for section, names in _NOT_OF_THE_WEIGHTS.items():
        values[section] = {key: value for key, value in values[section].items() if key not in names}
    if recipe.drafter.from_ is not None:
        values["drafter"]["from"] = drafter_identity(recipe.drafter.from_)
    return _digest({"version": VERSION, "recipe": values, "dataset": _dataset(recipe.data.folder)} | _known(plugins))


def features_key(data: DataSettings, layer_ids: Sequence[int], with_hidden: bool) -> str:
    """The key of a cache of the target's features. Any order of the layers can be read from it."""
    target, dataset = read_manifest(data.folder)["target"], _dataset(data.folder)["train"]
    return _digest([target, dataset, data.max_length, sorted(layer_ids), with_hidden])


def decoding_key(cell: Cell, target: str, drafter: str, plugins: Sources) -> str:
    """The key of the answers of ``cell``, with ``plugins``, by the drafter of identity ``drafter``."""
    who = {name: value for name, value in cell.drafter.items() if name != "drafter"}
    decided = {"version": VERSION, "target": target, "drafter": [drafter, who], "options": cell.options}
    return _digest(decided | _known(plugins))


def plain_key(cell: Cell, target: str, plugins: Sources) -> str:
    """The key of the answers of plain mlx_lm with the cell's sampling options, of ``plugins`` in part."""
    decided = {"version": VERSION, "target": target, "drafter": "plain mlx_lm", "options": plain_options(cell)}
    return _digest(decided | _known(plugins))


def _known(plugins: Sources) -> dict[str, Any]:
    return {"plugins": plugins} if plugins else {}  # without plug-ins, keys are those of earlier versions


def plain_options(cell: Cell) -> dict[str, Any]:
    """The cell's options that plain decoding has too."""
    return {name: value for name, value in cell.options.items() if name in option_names("sampling")}


def prompt_key(tokens: Sequence[int]) -> str:
    """The key of a prompt of token ids."""
    return _digest(list(tokens))


def _given(settings: Any) -> dict[str, Any]:
    """The settings that differ from their defaults, so that settings added later change no key."""
    given = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if dataclasses.is_dataclass(value):
            given[key_of(field)] = _given(value)
        elif field.name == "kind" or value != default:
            given[key_of(field)] = to_dict(value)
    return given


@lru_cache(maxsize=256)
def drafter_identity(name: str) -> str:
    """The name of a drafter without files of its own, or a hash of its config and weights."""
    if name.startswith(COMBINED):
        return f"{COMBINED}{drafter_identity(own_name(name))}"
    if needs_no_files(name):
        return str(Part.read(name))
    folder = PAIR / "drafter" if name == BUNDLED else resolve_checkpoint(name)
    total = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        total.update(path.name.encode())
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


@lru_cache(maxsize=256)
def _dataset(folder: Path) -> dict[str, dict[str, int]]:
    splits = ("train", "heldout")  # the held-out part chooses the best checkpoint
    return {split: dataset_fingerprint(open_dataset(folder, split, None)) for split in splits}  # type: ignore[arg-type]


def _digest(value: Mapping[str, Any] | Sequence[Any]) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- answers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One prompt's :class:`~dflash.evaluation.Run` as it is kept, or what a text of the target says of it, untimed.

    ``at`` names the process that measured it. Speeds measured by one process can be compared.
    """

    tokens: list[int]
    seconds: float | None
    committed: list[int]
    drafted: list[int]
    accepted: list[int]
    at: str

    @classmethod
    def of(cls, run: Run, at: str) -> "Answer":
        """The answer of a timed run."""
        return cls(run.tokens, round(run.seconds, 6), run.committed, run.drafted, run.accepted, at)

    @classmethod
    def on_text(cls, text: Text, blocks: Sequence[Drafted], at: str) -> "Answer":
        """The target's text, with the blocks that decoding would verify; none accepts drafts after its end."""
        committed, drafted = [block.committed for block in blocks], [block.drafted for block in blocks]
        return cls(text.answer, None, committed, drafted, [block.right for block in blocks], at)

    @property
    def speed(self) -> float:
        """Tokens after the first per second since the first; not a number for one token, or where nothing was timed."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 and self.seconds else float("nan")


class Answers(dict[str, Answer]):
    """The answers in a study's file by the key of the prompt; ``about`` says in the file how they were decoded.

    Raises ``CheckpointError`` for a file that holds no answers.
    """

    def __init__(self, study: Path, key: str, about: dict[str, Any]):
        self.path, self.about = study / ANSWERS / f"{key}.json", about
        kept = read_json(self.path) if self.path.exists() else {"answers": {}}
        try:
            super().__init__({prompt: Answer(**answer) for prompt, answer in kept["answers"].items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path} holds no answers; remove it, and they are made again.") from error

    def keep(self, prompt: str, answer: Answer) -> None:
        """Add an answer and write the file."""
        self[prompt] = answer
        remove_unfinished(self.path)
        text = json.dumps(self.about | {"answers": {key: dataclasses.asdict(own) for key, own in self.items()}})
        atomic_write(self.path, lambda file: file.write_text(text, encoding="utf-8"))
