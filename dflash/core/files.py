"""Folders and files: find or download checkpoints, read JSON and safetensors, write files whole or not at all."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from filelock import FileLock, Timeout
from mlx.utils import tree_flatten, tree_unflatten

from .errors import CheckpointError, DFlashError, one_line

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]


def resolve_checkpoint(path_or_hub_name: str | Path) -> Path:
    """The local folder of a checkpoint; a hub name ``org/name`` that is no local path is downloaded.

    Raises ``CheckpointError`` if it is neither, is empty, or cannot be downloaded.
    """
    name = str(path_or_hub_name)
    if not name.strip() or not isinstance(path_or_hub_name, str | Path):
        got = repr(path_or_hub_name) if name.strip() else "an empty name"
        raise CheckpointError(f"A checkpoint is a folder, or a hub name such as 'org/model'; got {got}.")
    path = Path(path_or_hub_name)
    if path.is_dir():
        return path
    if path.exists() or not is_hub_name(name):
        raise CheckpointError(
            f"No checkpoint folder at {name!r}; expected a folder with config.json and *.safetensors, "
            "or a hub name such as 'org/model'."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # the hub client raises many unrelated kinds
        raise CheckpointError(
            f"There is no folder {name!r}, so it was looked for on the hub: {_hub_reason(error)}"
        ) from error


def _hub_reason(error: Exception) -> str:
    """Why the hub gave nothing; its own messages for these two errors are a paragraph each."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):
        return "it cannot be reached from here."
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        return "it has no such model, or a private one."
    return one_line(error)


def is_hub_name(name: str) -> bool:
    """Whether ``name`` has the form ``org/name``."""
    return _HUB_NAME.fullmatch(name) is not None


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object. Raises ``CheckpointError`` if it is missing or broken."""
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
    """All tensors of a checkpoint; pickled weights are never read.

    Reads the files that ``model.safetensors.index.json`` lists, or without an index every ``*.safetensors`` file.
    Raises ``CheckpointError`` if one is missing or damaged, or two files hold the same tensor.
    """
    tensors: dict[str, mx.array] = {}
    origin: dict[str, Path] = {}
    listed = _indexed(folder)
    for file in sorted({folder / name for name in listed.values()}) or _weight_files(folder):
        try:
            loaded = cast(dict[str, mx.array], mx.load(str(file)))
            mx.eval(loaded)
        except RuntimeError as error:
            if "unsupported dtype" in str(error):
                dtype = str(error).split()[-1]
                raise CheckpointError(
                    f"{file} holds {dtype} numbers, which MLX does not read; store bfloat16."
                ) from error
            raise CheckpointError(f"{file} is damaged or truncated: {one_line(error)}") from error
        for name in loaded:
            if name in origin:
                raise CheckpointError(f"{name} is in both {origin[name]} and {file.name}; remove the older file.")
            origin[name] = file
        tensors.update(loaded)
    for name, of in listed.items():
        if name not in tensors:
            raise CheckpointError(f"{folder / of} lacks {name}, which {INDEX} lists; copy the file again.")
    return tensors


INDEX = "model.safetensors.index.json"
"""Lists the file of each tensor where a checkpoint has several files."""


def _indexed(folder: Path) -> dict[str, str]:
    """The file of each tensor by the folder's index; empty without one."""
    if not (folder / INDEX).exists():
        return {}
    files = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f'{folder / INDEX} must hold a "weight_map" from tensors to files.')
    for name in sorted(set(files.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX} lists {name!r}; expected *.safetensors files of its own folder.")
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name} is missing; {INDEX} lists it. Copy or download it again.")
    return files


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file (pickled weights are not loaded).")
    return files


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other processes that lock it. The system releases the lock of a killed process.

    The folder is made if need be, and removed again if nothing was written to it. (On a disk without such locks a
    killed process leaves the file ``.lock``, which must be removed by hand.) Raises ``DFlashError`` if another process
    holds the lock, ``OSError`` if the folder cannot be written to.
    """
    made = _missing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise DFlashError(f"Another process is writing to {folder}; wait until it ends, or stop it.") from error
    try:
        yield
    finally:
        (folder / ".lock").unlink(missing_ok=True)  # while it is held, so that no other process can hold this file
        lock.release()
        _remove_empty(made)


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on a temporary file next to ``path``, then rename it: the file is whole or not there.

    The temporary name keeps the suffix of ``path`` (MLX picks a format by it). A new folder does not outlast a failure.
    Raises ``OSError`` with the reason, and with the free space if the disk may be full.
    """
    if path.exists() and not path.is_file():  # renaming would replace a device
        raise OSError(f"Cannot write {path}: it is no plain file.")
    made = _missing(path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    except OSError as error:
        raise OSError(f"Cannot write {path}: {error.strerror or one_line(error)}") from error
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)
        with open(name, "rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave the new name with old or no bytes
        os.replace(name, path)
    except (OSError, RuntimeError) as error:  # the second is how MLX reports that nothing more can be written
        free = shutil.disk_usage(path.parent).free
        reason = getattr(error, "strerror", None) or one_line(error)
        raise OSError(f"Cannot write {path}: {reason} ({free / 1e6:.0f} MB free)") from error
    finally:
        Path(name).unlink(missing_ok=True)
        _remove_empty(made)


def _missing(folder: Path) -> list[Path]:
    """``folder`` and those of its parents that are not there yet, the innermost first."""
    return [one for one in (folder, *folder.parents) if not one.exists()]


def _remove_empty(folders: list[Path]) -> None:
    """Remove ``folders``, the innermost first, up to one that something is in."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def remove_unfinished(path: Path) -> None:
    """Remove what processes that were killed inside :func:`atomic_write` left next to ``path``."""
    for leftover in path.parent.glob(f".{path.stem}-????????{path.suffix}"):
        leftover.unlink(missing_ok=True)


def flat(tree: Any) -> dict[str, mx.array]:
    """Every array of a nested tree by its dotted name."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(tree)))


def nested(arrays: dict[str, mx.array]) -> Any:
    """The inverse of :func:`flat`."""
    return tree_unflatten(list(arrays.items()))


def write_arrays(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all. Raises ``OSError`` if it cannot be written."""
    mx.eval(arrays)
    atomic_write(path, lambda file: mx.save_safetensors(str(file), arrays, metadata=metadata or {}))


def read_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays and metadata of a safetensors file."""
    arrays, metadata = cast("tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(path), return_metadata=True))
    mx.eval(arrays)
    return arrays, metadata
