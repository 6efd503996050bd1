"""Blocks of GGUF quantisations say what llama.cpp's definition of them says, packed as MLX reads it."""

import mlx.core as mx
import numpy as np
import pytest

from dflash.target.gguf_blocks import BLOCK_TYPES, GROUP_SIZE


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def k_scale(block: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum of group ``j`` of a K block."""
    q = block[4:16]
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return q[j + 4] & 15 | q[j - 4] >> 6 << 4, q[j + 4] >> 4 | q[j] >> 6 << 4


def weight(kind: str, block: bytes, i: int) -> float:
    """Weight ``i`` of a block, one at a time."""
    j, place = divmod(i, 32)
    if kind in ("Q4_K", "Q5_K"):
        scale, lowest = k_scale(block, j)
        q = block[(16 if kind == "Q4_K" else 48) + 32 * (j // 2) + place]
        q = q >> 4 if j % 2 else q & 15
        if kind == "Q5_K":
            q |= (block[16 + place] >> j & 1) << 4
        return half(block, 0) * scale * q - half(block, 2) * lowest
    if kind == "Q6_K":
        part, rest = divmod(i, 128)
        low = block[64 * part + rest % 64]
        high = block[128 + 32 * part + rest % 32] >> 2 * (rest // 32) & 3
        q = (low >> 4 if rest >= 64 else low & 15) | high << 4
        return half(block, 208) * int(np.int8(np.uint8(block[192 + i // 16]))) * (q - 32)
    if kind == "Q8_0":
        return half(block, 0) * int(np.int8(np.uint8(block[2 + i])))
    start = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}[kind]
    q = block[start + i % 16]
    q = q >> 4 if i >= 16 else q & 15
    if kind.startswith("Q5"):
        q |= (int.from_bytes(block[start - 4 : start], "little") >> i & 1) << 4
    return (
        half(block, 0) * (q - 8 * (1 + kind.startswith("Q5")))
        if kind.endswith("0")
        else half(block, 0) * q + half(block, 2)
    )


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_TYPES if kind.startswith("Q")])
def test_random_blocks_are_read_as_they_are_defined(kind):
    of = BLOCK_TYPES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (6, of.size), np.uint8)
    for at in (208,) if kind == "Q6_K" else (0, 2):  # numbers that are not too large, of both signs
        blocks[:, at : at + 2] = np.linspace(-0.03, 0.05, 6).astype(np.float16)[:, None].view(np.uint8)
    expected = [[weight(kind, block.tobytes(), i) for i in range(of.weights)] for block in blocks]
    read = of.read(blocks)
    if of.bits:
        words, scale, bias = (mx.array(array) for array in (read.words(), read.scale, read.bias))
        read = np.array(mx.dequantize(words, scale, bias, GROUP_SIZE, of.bits)).reshape(len(blocks), -1)
    np.testing.assert_allclose(read, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_numbers_are_read_as_they_are(kind):
    numbers = np.array([0.0, -1.5, 2.0**-7, 192.0], np.float32)
    stored = {"F32": numbers, "F16": numbers.astype(np.float16), "BF16": (numbers.view(np.uint32) >> 16).astype("<u2")}
    of = BLOCK_TYPES[kind]
    np.testing.assert_array_equal(of.read(stored[kind].view(np.uint8).reshape(-1, of.size)).ravel(), numbers)
