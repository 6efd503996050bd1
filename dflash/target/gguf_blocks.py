"""The quantisations of GGUF files: blocks of bytes become weights that share scales, as MLX packs them, or plain ones.

Knows llama.cpp's blocks (``ggml-common.h`` there) and MLX's packing. Must not know files, names or models.

A block holds 32 weights, or 256 in the K types. MLX's own reader leaves several of these types out, unpacks others,
and reads Q4_K wrongly (0.32 uses one scale for two groups).

Shapes: N blocks, G groups of 32 weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Bytes = np.ndarray
GROUP_SIZE = 32
"""Weights that share a scale and a bias where they stay packed."""


@dataclass(frozen=True)
class Packed:
    """Weights ``scale * q + bias`` with ``q [G, 32]`` of so many ``bits``; ``scale`` and ``bias`` are ``[G, 1]``."""

    q: np.ndarray
    scale: np.ndarray
    bias: np.ndarray
    bits: int

    def words(self) -> np.ndarray:
        """The ``q`` as MLX packs them, ``[G, bits]`` of uint32: a stream of bits, the lowest first."""
        if self.bits == 8:
            packed = self.q
        elif self.bits == 4:
            packed = self.q[:, ::2] | self.q[:, 1::2] << 4
        else:
            bits = np.unpackbits(self.q[..., None], axis=-1, count=self.bits, bitorder="little")
            packed = np.packbits(bits.reshape(len(bits), -1), axis=-1, bitorder="little")
        return np.ascontiguousarray(packed).view(np.uint32)


@dataclass(frozen=True)
class BlockType:
    """How many weights and bytes a block has, and what becomes of blocks ``[N, size]``.

    ``bits`` is 0 where the weights become plain float32 ``[N, weights]``.
    """

    weights: int
    size: int
    bits: int
    read: Callable[[Bytes], Any]


def _float16(blocks: Bytes, at: int) -> np.ndarray:
    """The number at byte ``at`` of each block, ``[N, 1]`` in float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(quarters: Bytes) -> np.ndarray:
    """All low halves of some bytes, then all high ones."""
    return np.concatenate([quarters & 15, quarters >> 4], axis=-1)


def _fifth_bits(blocks: Bytes, at: int) -> np.ndarray:
    return np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little") << 4


def _q4_0(blocks: Bytes) -> Packed:
    scale = _float16(blocks, 0)
    return Packed(_nibbles(blocks[:, 2:]), scale, -8 * scale, 4)


def _q4_1(blocks: Bytes) -> Packed:
    return Packed(_nibbles(blocks[:, 4:]), _float16(blocks, 0), _float16(blocks, 2), 4)


def _q5_0(blocks: Bytes) -> Packed:
    scale = _float16(blocks, 0)
    return Packed(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), scale, -16 * scale, 5)


def _q5_1(blocks: Bytes) -> Packed:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return Packed(q, _float16(blocks, 0), _float16(blocks, 2), 5)


def _q8_0(blocks: Bytes) -> Packed:
    scale = _float16(blocks, 0)
    return Packed(blocks[:, 2:] ^ 128, scale, -128 * scale, 8)  # from -128..127 to 0..255


def _k_scales(blocks: Bytes) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias ``[8 N, 1]`` of the groups of Q4_K and Q5_K: twice eight numbers of 6 bits in 12 bytes."""
    first, second, mixed = np.split(blocks[:, 4:16], 3, axis=-1)
    scales = np.concatenate([first & 63, mixed & 15 | first >> 6 << 4], axis=-1)
    lowest = np.concatenate([second & 63, mixed >> 4 | second >> 6 << 4], axis=-1)
    return (_float16(blocks, 0) * scales).reshape(-1, 1), (-_float16(blocks, 2) * lowest).reshape(-1, 1)


def _q4_k(blocks: Bytes) -> Packed:
    return Packed(_nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, GROUP_SIZE), *_k_scales(blocks), 4)


def _q5_k(blocks: Bytes) -> Packed:
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, GROUP_SIZE)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit j of each byte is group j's
    return Packed((low | high << 4).reshape(-1, GROUP_SIZE), *_k_scales(blocks), 5)


def _q6_k(blocks: Bytes) -> np.ndarray:
    """Sixteen weights share a scale, fewer than MLX's groups have."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(low.shape)
    q = (low | high << 4).reshape(-1, 16, 16).astype(np.int8) - 32
    scales = _float16(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return (q * scales[..., None]).reshape(len(blocks), 256)


def _bfloat16(blocks: Bytes) -> np.ndarray:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


BLOCK_TYPES = {
    "F32": BlockType(1, 4, 0, lambda blocks: blocks.view(np.float32)),
    "F16": BlockType(1, 2, 0, lambda blocks: blocks.view(np.float16).astype(np.float32)),
    "BF16": BlockType(1, 2, 0, _bfloat16),
    "Q4_0": BlockType(32, 18, 4, _q4_0),
    "Q4_1": BlockType(32, 20, 4, _q4_1),
    "Q5_0": BlockType(32, 22, 5, _q5_0),
    "Q5_1": BlockType(32, 24, 5, _q5_1),
    "Q8_0": BlockType(32, 34, 8, _q8_0),
    "Q4_K": BlockType(256, 144, 4, _q4_k),
    "Q5_K": BlockType(256, 176, 5, _q5_k),
    "Q6_K": BlockType(256, 210, 0, _q6_k),
}
"""By llama.cpp's name."""
