"""A dataset on disk: token shards, the manifest that describes them, and the fingerprints it is checked by.

Knows files and what identifies a target. Must not know prompts, chat templates or training.

    plan.json                    what is to be made, written before the first shard
    train/000000.safetensors     shards (`Sequences.save`), each whole or not there
    heldout/000000.safetensors
    manifest.json                what has been made, written after the last shard
"""

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import numpy as np

from dflash import LoadedTargetModel
from dflash.errors import CheckpointError, DataError
from dflash.files import flat, read_json

from .sequences import Ints, Sequences

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)
FORMAT, VERSION = "dflash-dataset", 1
PLAN, MANIFEST = "plan.json", "manifest.json"

_VALUES = 64  # looked at in each weight: a fine-tuned copy differs in some, a cast to float32 in none
_PROBE = "Hello, world! 3.14159\n\tdef f(x):\n        return x ** 2  # naïve — Ωß 漢字 🙂\n<|im_end|></s>"


# --- fingerprints -------------------------------------------------------------------------------------------


def target_fingerprint(target: LoadedTargetModel) -> str:
    """SHA-256 over a loaded target: its type, its config, and every weight's name, shape and some values.

    Of the config those fields count that differ from mlx-lm's defaults, so that a newer mlx-lm with more fields
    changes nothing. Of each weight some 64 values, evenly spread and as float32: fine-tuned copies have files of
    equal names and sizes, hashing gigabytes takes minutes, and half precision becomes float32 on a CPU.
    """
    total = hashlib.sha256()
    args = getattr(target.model, "args", None)
    total.update(json.dumps([getattr(target.model, "model_type", ""), _own_fields(args)], sort_keys=True).encode())
    weights = dict(sorted(flat(target.model.parameters()).items()))
    values = [w.reshape(-1)[:: max(1, w.size // _VALUES)] for w in weights.values()]
    values = [v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v for v in values]
    mx.eval(values)
    for (name, weight), value in zip(weights.items(), values, strict=True):
        total.update(f"{name} {weight.shape}".encode())
        total.update(np.array(value).tobytes())
    return total.hexdigest()


def _own_fields(args: Any) -> dict[str, str]:
    if not dataclasses.is_dataclass(args):
        return {}
    values = {f.name: (getattr(args, f.name), f.default) for f in dataclasses.fields(args)}
    return {name: repr(value) for name, (value, default) in values.items() if value != default}


def tokenizer_fingerprint(target: LoadedTargetModel) -> str:
    """SHA-256 over a tokenizer: its vocabulary, the tokens that end an answer, and its tokens for one text."""
    if target.tokenizer is None:
        raise DataError("This target was loaded without a tokenizer; load it from a folder that has one.")
    vocabulary = sorted(target.tokenizer.get_vocab().items())
    tokens = target.tokenizer.encode(_PROBE)
    return hashlib.sha256(json.dumps([vocabulary, sorted(target.stop_token_ids()), tokens]).encode()).hexdigest()


def dataset_fingerprint(sequences: Sequences) -> dict[str, int]:
    """What tells one dataset from another."""
    tokens, response = (zlib.crc32(array.tobytes()) for array in (sequences.tokens, sequences.loss_mask))
    return {"sequences": len(sequences), "tokens": len(sequences.tokens), "crc": tokens ^ (response << 1)}


# --- writing ------------------------------------------------------------------------------------------------


def shard_path(folder: Path, split: Split, number: int) -> Path:
    """Where shard ``number`` of a split is kept."""
    return folder / split / f"{number:06d}.safetensors"


def write_shard(path: Path, sequences: Sequence[tuple[Ints, Ints]]) -> None:
    """Write sequences, each its tokens ``[L]`` and which are responses ``[L]``, whole or not at all; maybe none."""
    tokens = np.concatenate([np.zeros(0, np.int32), *(tokens for tokens, _ in sequences)])
    response = np.concatenate([np.zeros(0, bool), *(response for _, response in sequences)])
    Sequences(tokens, response, np.asarray([len(tokens) for tokens, _ in sequences], np.int32)).save(path)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process was writing: files under temporary names."""
    names = [".plan-*.json", ".manifest-*.json", *(f"{split}/.[0-9]*-*.safetensors" for split in SPLITS)]
    for file in [file for name in names for file in folder.glob(name)]:
        file.unlink()


def count(sequences: Sequences, stops: Iterable[int]) -> dict[str, int]:
    """Sizes of a shard; ``cut`` are sequences whose last response was not ended by the target."""
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
    """All sequences of one split, after checking that ``target`` (unless ``None``) is the one that wrote them.

    Raises :class:`~dflash.errors.DataError` for an unfinished, damaged or empty dataset, and for one of another
    target or tokenizer.
    """
    manifest = read_manifest(folder)
    if target is not None:
        check_target(manifest, target, folder)
    expected = manifest["splits"][split]
    if not expected["sequences"]:
        raise DataError(
            f"{folder} has no sequences in its split {split!r}; prepare more, or another --heldout-percent."
        )
    parts = [read_shard(shard_path(folder, split, i)) for i in range(expected["shards"])]
    sequences = Sequences(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.loss_mask for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )
    for name, number in (("sequences", len(sequences)), ("tokens", len(sequences.tokens))):
        if number != expected[name]:
            raise DataError(
                f"{folder / split} holds {number} {name}, but its manifest says {expected[name]}: a shard was "
                "exchanged. Prepare the dataset again in an empty folder."
            )
    return sequences


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished dataset. Raises :class:`~dflash.errors.DataError` if there is none."""
    if not (folder / MANIFEST).exists():
        if (folder / PLAN).exists():
            raise DataError(f"The dataset in {folder} is not finished; give its 'dflash prepare' command again.")
        raise DataError(f"{folder} holds no dataset ({MANIFEST} is missing); make one with 'dflash prepare'.")
    manifest = read_description(folder / MANIFEST)
    try:
        whole = all(
            isinstance(manifest["splits"][s][n], int) for s in SPLITS for n in ("shards", "sequences", "tokens")
        )
    except (KeyError, TypeError):
        whole = False
    if not whole or not {"target", "tokenizer"} <= manifest.keys():
        raise DataError(f"{folder / MANIFEST} is damaged; prepare the dataset again in an empty folder.")
    return manifest


def read_description(path: Path) -> dict[str, Any]:
    """A plan or a manifest of this format and version."""
    try:
        value = read_json(path)
    except CheckpointError as error:
        raise DataError(str(error)) from error
    if value.get("format") != FORMAT or value.get("version") != VERSION:
        raise DataError(
            f"{path} is of format {value.get('format')!r}, version {value.get('version')!r}; "
            f"expected {FORMAT!r}, version {VERSION}."
        )
    return value


def check_target(manifest: dict[str, Any], target: LoadedTargetModel, folder: Path) -> None:
    """Raise :class:`~dflash.errors.DataError` unless ``target`` wrote the dataset described by ``manifest``."""
    found = {"tokenizer": tokenizer_fingerprint(target), "target": target_fingerprint(target)}
    for part, fingerprint in found.items():
        if manifest[part] != fingerprint:
            raise DataError(
                f"The dataset in {folder} was made with another {part} (fingerprint {str(manifest[part])[:12]}, not "
                f"{fingerprint[:12]}): a drafter learns only from what its own target writes. "
                "Give that target, or prepare a dataset with this one."
            )


def read_shard(path: Path) -> Sequences:
    """One shard. Raises :class:`~dflash.errors.DataError` if it is missing or damaged."""
    if not path.exists():
        raise DataError(f"{path} is missing; restore it, or prepare the dataset again in an empty folder.")
    try:
        return Sequences.load(path)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path} is damaged: {reason}; remove it and give the 'dflash prepare' command again."
        ) from error
