"""Named arrays: models and optimisers as flat dicts, and safetensors files that are whole or not there.

Knows names and files. Must not know what the arrays mean.
"""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from dflash.files import write_whole


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

    write_whole(path, write)


def read_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays and metadata of a safetensors file."""
    arrays, metadata = cast("tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(path), return_metadata=True))
    mx.eval(arrays)
    return arrays, metadata
