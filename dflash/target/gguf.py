"""A GGUF file of llama.cpp, read by its own package ``gguf``: metadata, and tensors as MLX arrays.

Where a quantisation has what MLX's has, a scale and a bias for every 32 weights, the weights stay packed, and the same.
All others become plain numbers.

Shapes: R rows, N blocks, W weights, G groups of 32 weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..core.errors import CheckpointError, install_extra, one_line

GROUP_SIZE = 32
"""Weights that share a scale and a bias where they stay packed."""

_CHUNK = 2**17
"""Weights converted at a time: few enough for a CPU's caches."""

_PLAIN = {"F32": mx.float32, "BF16": mx.bfloat16}
"""What plain numbers are stored as; anything else becomes float16."""


@dataclass(frozen=True)
class GGUF:
    """Metadata by key, as Python values, and the tensors by name, as ``gguf.GGUFReader`` has them."""

    path: Path
    metadata: dict[str, Any]
    stored: dict[str, Any]

    def require(self, key: str, kind: type = object) -> Any:
        """A value of the metadata. Raises ``CheckpointError`` if it is not there."""
        value = self.metadata.get(key)
        if value is None or not isinstance(value, kind):
            raise CheckpointError(f"{self.path} has no {key} in its metadata; convert or download the model again.")
        return value

    def matrix_kinds(self) -> set[str]:
        """How matrices are stored, such as ``F16`` and ``Q4_K``."""
        return {tensor.tensor_type.name for tensor in self.stored.values() if len(tensor.shape) > 1}

    def tensors(self, dtype: mx.Dtype | None = None) -> dict[str, mx.array]:
        """Every tensor by name; a packed one as mlx-lm has it: ``weight``, ``scales`` and ``biases``.

        With ``dtype`` no tensor is packed, and matrices have that type. Raises ``CheckpointError`` for a quantisation
        that the package ``gguf`` cannot decode.
        """
        arrays: dict[str, mx.array] = {}
        for name, tensor in self.stored.items():
            kind = tensor.tensor_type.name
            try:
                if dtype is None and kind in _LAYOUTS:
                    arrays |= _packed(name.removesuffix(".weight"), tensor)
                else:
                    floats = dtype if dtype and len(tensor.shape) > 1 else _PLAIN.get(kind, mx.float16)
                    parts = [mx.array(_decoded(rows, kind)).astype(floats) for rows in _chunks(tensor)]
                    arrays[name] = _joined(parts).reshape(*reversed(tensor.shape.tolist()))
            except NotImplementedError as error:
                raise CheckpointError(f"{self.path} holds {name} in {kind}: {one_line(error)}.") from error
        return arrays


def read_gguf(path: Path) -> GGUF:
    """Metadata and places of tensors of a GGUF file. Raises ``CheckpointError`` if it is not one, or damaged."""
    if not path.is_file():
        what = f"{path} is a folder" if path.is_dir() else f"There is no file {str(path)!r}"
        raise CheckpointError(f"{what}; expected a GGUF file of llama.cpp.")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(f"GGUF files need llama.cpp's package gguf; {install_extra('gguf')}.") from error
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise CheckpointError(f"{path} is no GGUF file, damaged or truncated; download it again.") from error
    return GGUF(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def _chunks(tensor: Any) -> Iterator[np.ndarray]:
    """Some rows of a tensor at a time, as they are stored: ``[R, bytes]`` or, if plain, ``[R, W]``."""
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    step = max(1, _CHUNK // int(tensor.shape[0]))
    for start in range(0, len(rows), step):
        yield np.asarray(rows[start : start + step])


def _decoded(rows: np.ndarray, kind: str) -> np.ndarray:
    """Weights ``[R, W]``. As one row: the package decodes 16 rows at a time, which is slow for short ones."""
    from gguf import GGMLQuantizationType, dequantize

    return dequantize(rows.reshape(1, -1), GGMLQuantizationType[kind]).reshape(len(rows), -1)


def _joined(parts: list[mx.array]) -> mx.array:
    mx.eval(parts)
    return mx.concatenate(parts)


# --- weights that stay packed -------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """A block: ``bits`` of each level, bytes before the levels, the byte of lowest levels, where an offset is."""

    bits: int
    head: int
    lowest: int = 0x00
    offset: int | None = None


_LAYOUTS = {
    "Q4_0": _Layout(4, 2),
    "Q4_1": _Layout(4, 4, offset=2),
    "Q5_0": _Layout(5, 2),
    "Q5_1": _Layout(5, 4, offset=2),
    "Q8_0": _Layout(8, 2, lowest=0x80),
    "Q4_K": _Layout(4, 16, offset=2),
    "Q5_K": _Layout(5, 16, offset=2),
}
"""Quantisations with weights ``scale * level + bias`` in groups of 32 or, in the K types, eight such groups."""


def _packed(stem: str, tensor: Any) -> dict[str, mx.array]:
    from gguf import GGML_QUANT_SIZES

    kind, (_, size) = tensor.tensor_type.name, GGML_QUANT_SIZES[tensor.tensor_type]
    parts = [
        [mx.array(array.reshape(len(rows), -1)) for array in _pack(rows.reshape(-1, size), kind)]
        for rows in _chunks(tensor)
    ]
    fields = zip(("weight", "scales", "biases"), zip(*parts, strict=True), strict=True)
    return {f"{stem}.{field}": _joined(list(arrays)) for field, arrays in fields}


def _pack(blocks: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks ``[N, bytes]`` as MLX's words ``[G, bits]``, scales and biases ``[G, 1]``, which give the same weights.

    Blocks whose levels are all the lowest, or the highest, tell bias and scale; float32 holds the products exactly.
    """
    layout = _LAYOUTS[kind]

    def groups(blocks: np.ndarray, levels: int | None = None, offset: int | None = None) -> np.ndarray:
        changed = blocks.copy()
        if levels is not None:
            changed[:, layout.head :] = levels
        if offset is not None:
            changed[:, offset : offset + 2] = 0
        return _decoded(changed, kind).reshape(-1, GROUP_SIZE)

    lowest, highest = (groups(blocks, byte, layout.offset)[:, :1] for byte in (layout.lowest, layout.lowest ^ 0xFF))
    scale = (highest - lowest) / (2**layout.bits - 1)
    levels = np.round((groups(blocks, offset=layout.offset) - lowest) / np.where(scale == 0, 1, scale))
    return _words(levels.astype(np.uint64), layout.bits), scale, groups(blocks, layout.lowest)[:, :1]


def _words(levels: np.ndarray, bits: int) -> np.ndarray:
    """Levels ``[G, 32]`` as MLX packs them, ``[G, bits]`` of uint32: a stream of bits, the lowest first."""
    eights = (levels.reshape(-1, 8) << np.arange(0, 8 * bits, bits, dtype=np.uint64)).sum(-1, dtype=np.uint64)
    return np.ascontiguousarray(eights.view(np.uint8).reshape(-1, 8)[:, :bits]).reshape(len(levels), -1).view(np.uint32)
