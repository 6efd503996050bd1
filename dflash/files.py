"""Checkpoint folders: finding them, reading safetensors, writing whole files or nothing.

Knows paths, the hub and the safetensors format. Must not know what the tensors mean.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from filelock import FileLock, Timeout
from mlx.utils import tree_flatten, tree_unflatten

from .errors import CheckpointError, DFlashError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]


def resolve_checkpoint(path_or_hub_name: str | Path) -> Path:
    """The local folder of a checkpoint; a hub name ``org/name`` that is no local path is downloaded.

    Raises :class:`~dflash.errors.CheckpointError` if it is neither, or the download fails.
    """
    path = Path(path_or_hub_name)
    if path.is_dir():
        return path
    name = str(path_or_hub_name)
    if path.exists() or not is_hub_name(name):
        raise CheckpointError(
            f"No checkpoint folder at {name!r}; expected a folder with config.json and *.safetensors, "
            "or a hub name such as 'org/model'."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # the hub client raises many unrelated kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"No folder {name!r} here, and it could not be downloaded from the hub: {reason}"
        ) from error


def is_hub_name(name: str) -> bool:
    """Whether ``name`` has the form ``org/name``."""
    return _HUB_NAME.fullmatch(name) is not None


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object. Raises :class:`~dflash.errors.CheckpointError` if it is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    atomic_write(path, lambda file: file.write_text(text, encoding="utf-8"))


def read_safetensors(folder: Path) -> dict[str, mx.array]:
    """All tensors of the ``*.safetensors`` files in ``folder``; pickled weights are never read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file (pickled weights are not loaded).")
    tensors: dict[str, mx.array] = {}
    for file in files:
        try:
            loaded = cast(dict[str, mx.array], mx.load(str(file)))
            mx.eval(loaded)
        except RuntimeError as error:
            raise CheckpointError(f"{file} is damaged or truncated: {str(error).splitlines()[0]}") from error
        tensors.update(loaded)
    return tensors


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for ``folder`` out of it; a process that is killed lets go of it.

    (Unless the disk has no locks that the system lets go of: then a killed one leaves ``.lock``, to be removed.)
    Raises :class:`~dflash.errors.DFlashError` if another process holds it, ``OSError`` if it cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise DFlashError(f"Another process is writing to {folder}; wait until it ends, or stop it.") from error
    try:
        yield
    finally:
        lock.release()


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on a temporary file beside ``path``, then rename: the file is whole or not there.

    The temporary name keeps the suffix of ``path`` (MLX picks a format by it). Raises ``OSError`` if the
    folder cannot be written to or the disk is full, and says how much is free.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)
        with open(name, "rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave the new name with old or no bytes
        os.replace(name, path)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise OSError(f"{path} was not taken by the disk, with {free / 1e6:.0f} MB free ({error})") from error
    finally:
        Path(name).unlink(missing_ok=True)


def remove_unfinished(path: Path) -> None:
    """Remove what processes that were killed inside :func:`atomic_write` left beside ``path``."""
    for leftover in path.parent.glob(f".{path.stem}-????????{path.suffix}"):
        leftover.unlink(missing_ok=True)


def flat(tree: Any) -> dict[str, mx.array]:
    """Every array of a nested tree by its dotted name."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(tree)))


def nested(arrays: dict[str, mx.array]) -> Any:
    """The inverse of :func:`flat`."""
    return tree_unflatten(list(arrays.items()))


def write_arrays(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all. Raises ``OSError`` if the disk does not take it."""
    mx.eval(arrays)

    def write(file: Path) -> None:
        try:
            mx.save_safetensors(str(file), arrays, metadata=metadata or {})
        except RuntimeError as error:  # how MLX reports that nothing more can be written
            raise OSError(str(error)) from error

    atomic_write(path, write)


def read_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays and metadata of a safetensors file."""
    arrays, metadata = cast("tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(path), return_metadata=True))
    mx.eval(arrays)
    return arrays, metadata
