"""A GGUF file of llama.cpp: its metadata, and its tensors as MLX arrays.

Knows the file's format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Must not know what a block of a
quantisation holds, architectures, mlx-lm's names or tokenizers.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from ..core.errors import CheckpointError, one_line
from .gguf_blocks import BLOCK_TYPES

_VERSIONS = (2, 3)
_NUMBERS = dict(enumerate("B b H h I i f ?".split())) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_TENSOR_TYPES = dict(
    enumerate(
        "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S "
        "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 "
        "IQ4_NL_4_8 IQ4_NL_8_8 MXFP4".split()
    )
)
_CHUNK = 2**22
"""Weights decoded at a time, so that the work needs little memory beside them."""


@dataclass(frozen=True)
class TensorInfo:
    """How a tensor is stored: its quantisation, such as ``Q4_1``, its shape, and its place after the head."""

    kind: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GGUF:
    """Metadata by key, as Python values, and how every tensor is stored; ``data`` is where tensors begin."""

    path: Path
    metadata: dict[str, Any]
    infos: dict[str, TensorInfo]
    data: int = 0

    def require(self, key: str, kind: type = object) -> Any:
        """A value of the metadata. Raises ``CheckpointError`` if it is not there."""
        value = self.metadata.get(key)
        if value is None or not isinstance(value, kind):
            raise CheckpointError(f"{self.path} has no {key} in its metadata; convert or download the model again.")
        return value

    def tensors(self) -> dict[str, mx.array]:
        """Every tensor by name; a packed one as mlx-lm has it: ``weight``, ``scales`` and ``biases``.

        Raises ``CheckpointError`` for a quantisation that is not known, or a file that ends early.
        """
        unread = {name: info.kind for name, info in self.infos.items() if info.kind not in BLOCK_TYPES}
        if unread:
            name, kind = next(iter(unread.items()))
            raise CheckpointError(
                f"{self.path} holds {len(unread)} tensors in {', '.join(sorted(set(unread.values())))} (the first is "
                f"{name} in {kind}); expected {', '.join(BLOCK_TYPES)}. Choose another file of the model, such as the "
                "one in Q8_0 or Q4_K_M."
            )
        arrays: dict[str, mx.array] = {}
        stored = np.memmap(self.path, np.uint8, "r")
        for name, info in self.infos.items():
            arrays |= self._tensor(name, info, stored)
        return arrays

    def _tensor(self, name: str, info: TensorInfo, stored: np.ndarray) -> dict[str, mx.array]:
        of, count, start = BLOCK_TYPES[info.kind], math.prod(info.shape), self.data + info.offset
        size = count // of.weights * of.size
        if start + size > len(stored):
            raise CheckpointError(f"{self.path} is truncated: it ends within {name}; download it again.")
        blocks = stored[start : start + size].reshape(-1, of.size)
        step = _CHUNK // of.weights
        parts = [of.read(np.asarray(blocks[i : i + step])) for i in range(0, len(blocks), step)]
        if of.bits:
            fields = {
                f"{name.removesuffix('.weight')}.weight": [part.words() for part in parts],
                f"{name.removesuffix('.weight')}.scales": [part.scale for part in parts],
                f"{name.removesuffix('.weight')}.biases": [part.bias for part in parts],
            }
            return {field: _joined(arrays, info.shape[:-1], mx.float32) for field, arrays in fields.items()}
        return {name: _joined(parts, info.shape[:-1], _PLAIN.get(info.kind, mx.float16))}


_PLAIN = {"F32": mx.float32, "BF16": mx.bfloat16}


def _joined(parts: Sequence[np.ndarray], rows: tuple[int, ...], floats: mx.Dtype) -> mx.array:
    """Parts end to end as an array of so many ``rows``; numbers that are no integers as ``floats``."""
    arrays = [mx.array(part.reshape(-1)) for part in parts]
    arrays = [array.astype(floats) if array.dtype == mx.float32 else array for array in arrays]
    mx.eval(arrays)
    return mx.concatenate(arrays).reshape(*rows, -1)


def read_gguf(path: Path) -> GGUF:
    """The head of a GGUF file. Raises ``CheckpointError`` if it is not one, or damaged."""
    if not path.is_file():
        raise CheckpointError(f"There is no file {str(path)!r}; expected a GGUF file of llama.cpp.")
    with path.open("rb") as file, _complaining(path):
        magic, version = _unpack(file, "4sI")
        if magic != b"GGUF" or version not in _VERSIONS:
            raise CheckpointError(
                f"{path} is not a GGUF file of version 2 or 3"
                + (f" but of version {version}." if magic == b"GGUF" else ".")
            )
        tensors, values = _unpack(file, "QQ")
        metadata = {_string(file): _value(file, *_unpack(file, "I")) for _ in range(values)}
        infos = dict(_tensor_infos(file, tensors))
        alignment = metadata.get("general.alignment", 32)
        return GGUF(path, metadata, infos, -(-file.tell() // alignment) * alignment)


@contextmanager
def _complaining(path: Path) -> Iterator[None]:
    try:
        yield
    except (struct.error, KeyError, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged or truncated: {one_line(error)}; download it again.") from error


def _unpack(file: BinaryIO, format: str) -> tuple[Any, ...]:
    return struct.unpack("<" + format, file.read(struct.calcsize("<" + format)))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    text = file.read(length)
    if len(text) < length:
        raise struct.error("a text ends with the file")
    return text.decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _unpack(file, _NUMBERS[kind])[0]
    item, count = _unpack(file, "IQ")
    if item in _NUMBERS:
        return list(_unpack(file, f"{count}{_NUMBERS[item]}"))
    return [_value(file, item) for _ in range(count)]


def _tensor_infos(file: BinaryIO, count: int) -> Iterator[tuple[str, TensorInfo]]:
    for _ in range(count):
        name = _string(file)
        (axes,) = _unpack(file, "I")
        *shape, kind, offset = _unpack(file, f"{axes}QIQ")
        yield name, TensorInfo(_TENSOR_TYPES.get(kind, f"type {kind}"), tuple(reversed(shape)), offset)
