"""Join several datasets of one target, such as greedy and sampled responses or the work of two machines."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash.core.errors import DataError
from dflash.core.files import atomic_write, exclusive_lock

from .dataset import (
    FORMAT,
    SHARDS,
    VERSION,
    read_manifest,
    recorded_examples,
    shard_numbers,
    shard_path,
    text_path,
    write_manifest,
    write_shard,
)
from .split import HeldoutRule


def join(folders: Sequence[Path], out: Path, heldout: HeldoutRule | None = None, times: int = 1) -> dict[str, Any]:
    """Copy the shards of the datasets in ``folders``, in order, into the new dataset ``out``; returns its manifest.

    ``heldout`` decides which conversations are held out; ``None`` keeps the first dataset's rule. It depends on a
    conversation's opening alone, so the same request is in the same split in every dataset. If the first dataset is a
    server's record, its requests are repeated ``times``.

    Raises ``DataError`` for a dataset that is unfinished, of format version 1, or of another target or tokenizer than
    the first, and if ``out`` is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is not an empty folder; choose another name for the joined dataset.")
    manifests = [read_manifest(folder) for folder in folders]
    for folder, manifest in zip(folders, manifests, strict=True):
        _check_fits(folder, manifest, folders[0], manifests[0])
    parts = [(f, made, i) for f, made in zip(folders, manifests, strict=True) for i in shard_numbers(f, made)]
    with exclusive_lock(out):
        (out / SHARDS).mkdir()
        for number, (folder, manifest, i) in enumerate(parts):
            if manifest.get("recorded"):
                write_shard(out, number, recorded_examples(folder, i) * (times if folder == folders[0] else 1))
                continue
            _copy(text_path(folder, i), text_path(out, number))
            _copy(shard_path(folder, i), shard_path(out, number))
        first = manifests[0]
        description = {
            "format": FORMAT,
            "version": VERSION,
            **{name: first[name] for name in ("target", "tokenizer", "stop_tokens")},
            "joined": [{name: manifest.get(name) for name in ("source", "settings")} for manifest in manifests],
            "shards": len(parts),
        }
        return write_manifest(out, description, heldout or HeldoutRule(**first["heldout"]))


def _check_fits(folder: Path, manifest: dict[str, Any], first_folder: Path, first: dict[str, Any]) -> None:
    if manifest["version"] != VERSION:
        raise DataError(f"{folder} has format version {manifest['version']}, whose split is fixed: not joined.")
    for what in ("target", "tokenizer"):
        if manifest[what] != first[what]:
            raise DataError(f"{folder} was made with another {what} than {first_folder}; join datasets of one target.")


def _copy(source: Path, to: Path) -> None:
    atomic_write(to, lambda file: shutil.copyfile(source, file))
