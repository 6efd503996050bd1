"""A dataset on disk: shards, the manifest that describes them, and the checks at opening.

    plan.json                     the plan, written before the first shard
    shards/000000.safetensors     `tokens`, `loss_mask`, `lengths` of sequences, and a `digest` of each opening
    shards/000000.jsonl           the same sequences as text, one a line: {"messages": [...], ...}
    manifest.json                 what was made and which digests are held out, written after the last shard

Each file is complete or absent. A record of ``dflash serve`` (:mod:`dflash.serving.record`) is a dataset that still
grows, so it is counted as it is opened. Version 1 had the folders `train` and `heldout` instead of `shards`, without
digests or text. Such a dataset still opens, with its fixed split.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash import LoadedTargetModel
from dflash.core.errors import CheckpointError, DataError, one_line
from dflash.core.files import atomic_write, exclusive_lock, read_arrays, read_json, write_arrays, write_json
from dflash.prompts.conversations import Conversation
from dflash.serving import record
from dflash.target.identity import target_fingerprint, tokenizer_fingerprint

from .sequences import Ints, Sequences
from .split import SPLITS, HeldoutRule, Split, is_heldout, opening_digest

FORMAT, VERSION = "dflash-dataset", 2
PLAN, MANIFEST, SHARDS = "plan.json", "manifest.json", "shards"


@dataclass(frozen=True)
class Example:
    """One sequence of a shard: ``tokens [L]``, ``loss_mask [L]``, the digest of its opening, and its text."""

    tokens: Ints
    loss_mask: Ints
    digest: int
    text: dict[str, Any]


# --- fingerprints -------------------------------------------------------------------------------------------


def dataset_fingerprint(sequences: Sequences) -> dict[str, int]:
    """Identifies a dataset."""
    tokens, mask = (zlib.crc32(array.tobytes()) for array in (sequences.tokens, sequences.loss_mask))
    return {"sequences": len(sequences), "tokens": len(sequences.tokens), "crc": tokens ^ (mask << 1)}


# --- writing ------------------------------------------------------------------------------------------------


def shard_path(folder: Path, number: int) -> Path:
    """The file with the sequences of shard ``number``."""
    return folder / SHARDS / f"{number:06d}.safetensors"


def text_path(folder: Path, number: int) -> Path:
    """The file with the text of shard ``number``."""
    return shard_path(folder, number).with_suffix(".jsonl")


def write_shard(folder: Path, number: int, examples: Sequence[Example]) -> None:
    """Write both files of a shard, the sequences last; ``examples`` may be empty."""
    lines = "".join(json_line(example.text) for example in examples)
    atomic_write(text_path(folder, number), lambda file: file.write_text(lines, encoding="utf-8"))
    arrays = {name: mx.array(array) for name, array in _arrays(examples).items()}
    write_arrays(shard_path(folder, number), arrays)


def _arrays(examples: Sequence[Example]) -> dict[str, Ints]:
    return {
        "tokens": np.concatenate([np.zeros(0, np.int32), *(example.tokens for example in examples)]),
        "loss_mask": np.concatenate([np.zeros(0, bool), *(example.loss_mask for example in examples)]),
        "lengths": np.asarray([len(example.tokens) for example in examples], np.int32),
        "digest": np.asarray([example.digest for example in examples], np.uint64),
    }


def json_line(text: dict[str, Any]) -> str:
    """One line of JSONL; values that JSON lacks, such as dates in a hub dataset, become text."""
    line = json.dumps(text, ensure_ascii=False, default=str)
    try:
        line.encode()
    except UnicodeEncodeError:  # a lone surrogate in some unchecked key
        line = json.dumps(text, default=str)
    return line + "\n"


def write_manifest(folder: Path, description: dict[str, Any], rule: HeldoutRule) -> dict[str, Any]:
    """Count the sequences of each split, and write the manifest if it changed; returns it.

    ``description`` must hold ``shards``, their number, and ``stop_tokens``, the target's.
    """
    manifest = _counted(folder, description | {"heldout": asdict(rule)})
    if not (folder / MANIFEST).exists() or read_manifest(folder) != manifest:
        write_json(folder / MANIFEST, manifest)
    return manifest


def change_split(folder: Path, rule: HeldoutRule) -> dict[str, Any]:
    """Change which conversations of a finished dataset are held out; returns its manifest.

    Raises ``DataError`` for a dataset of version 1, whose split is fixed.
    """
    with exclusive_lock(folder):
        manifest = read_manifest(folder)
        if manifest["version"] == 1:
            raise DataError(
                f"The dataset in {folder} has format version 1, whose split is fixed. It can still be trained on; for "
                "another split, give its 'dflash prepare' command with an empty folder."
            )
        return write_manifest(folder, manifest, rule)


def require_only_a_dataset(folder: Path) -> None:
    """Raise ``DataError`` if ``folder`` has files but no plan of a dataset."""
    others = [] if (folder / PLAN).exists() else sorted(path.name for path in folder.glob("[!.]*"))
    if {MANIFEST, SHARDS, *SPLITS} & set(others):
        raise DataError(f"{folder} holds a dataset without its {PLAN}; choose an empty folder.")
    if others:
        raise DataError(f"{folder} holds other files, such as {others[0]!r}; choose an empty folder for the dataset.")


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that a killed process was writing."""
    for name in (".plan-*.json", ".manifest-*.json", f"{SHARDS}/.[0-9]*-*.safetensors", f"{SHARDS}/.[0-9]*-*.jsonl"):
        for file in list(folder.glob(name)):
            file.unlink()


def _counted(folder: Path, description: dict[str, Any]) -> dict[str, Any]:
    """A description with the sizes of its splits."""
    shards, splits = shards_with_split(folder, description), {}
    for split in SPLITS:
        parts = Sequences.concatenate(part.select(held == (split == "heldout")) for part, held in shards)
        splits[split] = _count(parts, description["stop_tokens"])
    return description | {"splits": splits}


def _count(sequences: Sequences, stops: Sequence[int]) -> dict[str, int]:
    """Sizes of a split; ``cut`` are sequences whose last response does not end with a stop token."""
    responses = np.flatnonzero(sequences.loss_mask)
    last = sequences.tokens[responses[np.searchsorted(responses, np.cumsum(sequences.lengths)) - 1]]
    return {
        "sequences": len(sequences),
        "tokens": len(sequences.tokens),
        "response_tokens": int(sequences.loss_mask.sum()),
        "cut": int((~np.isin(last, list(stops))).sum()),
    }


# --- reading ------------------------------------------------------------------------------------------------


def open_dataset(folder: Path, split: Split, target: LoadedTargetModel | None) -> Sequences:
    """All sequences of one split, in the order of preparation.

    Checks first that ``target`` wrote them, unless it is ``None``. The check reads every weight, so a caller that opens
    both splits needs it only once. Raises ``DataError`` for an unfinished or damaged dataset, an empty split, and a
    dataset of another target or tokenizer.
    """
    manifest = read_manifest(folder)
    if target is not None:
        check_target(manifest, target, folder)
    expected = manifest["splits"][split]
    if not expected["sequences"]:
        raise DataError(
            f"The dataset in {folder} has no sequences in its split {split!r}; choose another share with "
            f"'dflash data split {folder} --heldout-percent P', or prepare more conversations."
        )
    sequences = Sequences.concatenate(_split_shards(folder, manifest, split))
    for name, number in (("sequences", len(sequences)), ("tokens", len(sequences.tokens))):
        if number != expected[name] and not manifest.get("recorded"):
            raise DataError(
                f"Split {split!r} of {folder} holds {number} {name}, but its manifest says {expected[name]}: a shard "
                "was exchanged. Prepare the dataset again in an empty folder."
            )
    return sequences


def shard_sizes(folder: Path, split: Split) -> list[int]:
    """How many sequences of a split each shard holds, in the order of :func:`open_dataset`."""
    return [len(part) for part in _split_shards(folder, read_manifest(folder), split)]


def _split_shards(folder: Path, manifest: dict[str, Any], split: Split) -> list[Sequences]:
    """Each shard's sequences that belong to ``split``."""
    if manifest["version"] == 1:
        numbers = range(manifest["splits"][split]["shards"])
        return [read_shard(folder / split / f"{number:06d}.safetensors")[0] for number in numbers]
    return [part.select(held == (split == "heldout")) for part, held in shards_with_split(folder, manifest)]


def shards_with_split(folder: Path, manifest: dict[str, Any]) -> list[tuple[Sequences, Ints]]:
    """Each shard's sequences and which of them are held out, a boolean ``[N]``; for datasets of version 2."""
    parts = [_read(folder, manifest, number) for number in shard_numbers(folder, manifest)]
    held = is_heldout(np.concatenate([digests for _, digests in parts]), HeldoutRule(**manifest["heldout"]))
    ends = np.cumsum([len(sequences) for sequences, _ in parts])[:-1]
    return [(sequences, part) for (sequences, _), part in zip(parts, np.split(held, ends), strict=True)]


def shard_numbers(folder: Path, manifest: dict[str, Any]) -> Sequence[int]:
    """The numbers of a dataset's shards; a record may have lost its first ones."""
    return record.shard_numbers(folder) if manifest.get("recorded") else range(manifest["shards"])


def _read(folder: Path, manifest: dict[str, Any], number: int) -> tuple[Sequences, Ints]:
    if not manifest.get("recorded"):
        return read_shard(shard_path(folder, number))
    arrays = _arrays(recorded_examples(folder, number))
    return Sequences.from_arrays(arrays), arrays["digest"]


def recorded_examples(folder: Path, number: int) -> list[Example]:
    """The requests of a record's shard, each with its answer."""
    examples, path = [], record.recorded_path(folder, number)
    for text in record.recorded(path):
        prompt, answer = text.pop("prompt_tokens"), text.pop("answer_tokens")
        digest = opening_digest(Conversation(tuple(text["messages"]), str(path)))
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        examples.append(Example(np.asarray(prompt + answer, np.int32), mask, digest, text))
    return examples


def read_shard(path: Path) -> tuple[Sequences, Ints]:
    """A shard's sequences and their digests ``[N]``, which are zeros in version 1.

    Raises ``DataError`` if the file is missing or damaged.
    """
    if not path.exists():
        raise DataError(f"{path} is missing; restore it, or prepare the dataset again in an empty folder.")
    try:
        arrays = {name: np.array(array) for name, array in read_arrays(path)[0].items()}
        sequences = Sequences.from_arrays(arrays)
        return sequences, arrays.get("digest", np.zeros(len(sequences), np.uint64))
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is damaged: {one_line(error, 200)}; remove it and give the 'dflash prepare' command again."
        ) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished dataset. Raises ``DataError`` if there is none."""
    if not (folder / MANIFEST).exists():
        if (folder / PLAN).exists():
            raise DataError(f"The dataset in {folder} is not finished; give its 'dflash prepare' command again.")
        raise DataError(f"{folder} holds no dataset ({MANIFEST} is missing); make one with 'dflash prepare'.")
    manifest = read_description(folder / MANIFEST, (1, VERSION))
    if manifest.get("recorded"):
        if not any(record.recorded(record.recorded_path(folder, number)) for number in record.shard_numbers(folder)):
            raise DataError(f"No request is in the record {folder} yet.")
        manifest = _counted(folder, manifest | {"shards": len(record.shard_numbers(folder))})
    try:
        for split in SPLITS:
            counts = manifest["splits"][split]
            _require_integers(counts, "sequences", "tokens", *(["shards"] if manifest["version"] == 1 else []))
        if manifest["version"] == VERSION:
            _require_integers(manifest, "shards")
            HeldoutRule(**manifest["heldout"])
        whole = {"target", "tokenizer"} <= manifest.keys()
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise DataError(f"{folder / MANIFEST} is damaged; prepare the dataset again in an empty folder.")
    return manifest


def _require_integers(values: dict[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(values[name], int):
            raise TypeError(name)


def read_description(path: Path, versions: Sequence[int] = (VERSION,)) -> dict[str, Any]:
    """A plan or a manifest, required to be of this format and one of ``versions``."""
    try:
        value = read_json(path)
    except CheckpointError as error:
        raise DataError(str(error)) from error
    if value.get("format") != FORMAT or value.get("version") not in versions:
        raise DataError(
            f"{path} is of format {value.get('format')!r}, version {value.get('version')!r}; expected {FORMAT!r}, "
            f"version {' or '.join(map(str, versions))}. Choose an empty folder to prepare a new dataset."
        )
    return value


def check_target(manifest: dict[str, Any], target: LoadedTargetModel, folder: Path) -> None:
    """Raise ``DataError`` unless ``target`` wrote the dataset described by ``manifest``."""
    found = {"tokenizer": tokenizer_fingerprint(target), "target": target_fingerprint(target)}
    for part, fingerprint in found.items():
        if manifest[part] != fingerprint:
            raise DataError(
                f"The dataset in {folder} was made with another {part} (fingerprint {str(manifest[part])[:12]}, not "
                f"{fingerprint[:12]}): a drafter learns only from what its own target writes. "
                "Give that target, or prepare a dataset with this one."
            )
