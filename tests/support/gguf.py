"""GGUF files as llama.cpp writes them, for the tests of the import.

The writer is independent of MLX's, so that what is read back is the format and not one library's idea of it.
"""

import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from support.models import byte_tokenizer

_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q2_K": 10}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of one of mlx-lm's weights."""
    stem, part = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{part}"
    _, _, layer, kind = stem.split(".", 3)
    short = kind.replace("self_attn.", "attn_").replace("mlp.", "ffn_").replace("_proj", "")
    return f"blk.{layer}.{_NAMES.get(kind, short)}.{part}"


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """A model's weights in llama.cpp's names and, for a LLaMA, its order of query and key rows."""
    args, tensors = model.args, {}
    for name, weight in tree_flatten(model.parameters()):
        array = np.array(weight)
        heads = {"q_proj": args.num_attention_heads, "k_proj": args.num_key_value_heads}.get(name.split(".")[-2])
        if heads and args.model_type == "llama":  # as its converter's `permute` does
            array = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
            array = array.swapaxes(1, 2).reshape(weight.shape)
        tensors[gguf_name(name)] = array
    return tensors


def gguf_metadata(model: Any) -> dict[str, Any]:
    """What llama.cpp notes of a model, and of the tests' tokenizer."""
    args, tokenizer = model.args, byte_tokenizer()
    core = tokenizer.backend_tokenizer
    names = [core.id_to_token(i) or f"[PAD{i}]" for i in range(args.vocab_size)]
    special = set(tokenizer.get_added_vocab())
    values = {
        "embedding_length": args.hidden_size,
        "block_count": args.num_hidden_layers,
        "feed_forward_length": args.intermediate_size,
        "attention.head_count": args.num_attention_heads,
        "attention.head_count_kv": args.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(args.rms_norm_eps),
        "context_length": args.max_position_embeddings,
        "rope.freq_base": float(args.rope_theta),
    }
    if getattr(args, "head_dim", None):
        values |= {"attention.key_length": args.head_dim, "attention.value_length": args.head_dim}
    return {
        "general.architecture": args.model_type,
        **{f"{args.model_type}.{key}": value for key, value in values.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3 if name in special else 5 if name.startswith("[PAD") else 1 for name in names],
        "tokenizer.ggml.merges": ["ð Ł", "a b", "Ġ t"],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, Any], stored: str = "F32", **others: str
) -> Path:
    """A GGUF file of version 3; matrices are stored as ``stored`` or as ``others`` has it, vectors as F32."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _typed(value) for key, value in metadata.items())
    offset, blobs = 0, []
    for name, array in tensors.items():
        kind = others.get(name.removesuffix(".weight"), stored) if array.ndim == 2 else "F32"
        head += _text(name) + struct.pack(f"<I{array.ndim}Q", array.ndim, *reversed(array.shape))
        head += struct.pack("<IQ", _TYPES[kind], offset)
        blob = _blob(array, kind)
        blobs.append(blob + bytes(-len(blob) % 32))
        offset += len(blobs[-1])
    path.write_bytes(head + bytes(-len(head) % 32) + b"".join(blobs))
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        kind, item = (8, _text) if isinstance(value[0], str) else (5, lambda n: struct.pack("<i", n))
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(item, value))
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def _blob(array: np.ndarray, kind: str) -> bytes:
    if kind in ("F32", "F16"):
        return array.astype(np.float32 if kind == "F32" else np.float16).tobytes()
    if kind == "Q2_K":
        return bytes(84 * -(-array.size // 256))
    blocks = array.reshape(-1, 32).astype(np.float32)
    return b"".join(_block(block, kind) for block in blocks)


def _block(block: np.ndarray, kind: str) -> bytes:
    """32 weights: their scale (and lowest value), then low nibbles of the first 16 with high ones of the others."""
    if kind == "Q8_0":
        scale = np.float16(np.abs(block).max() / 127)
        return scale.tobytes() + np.clip(np.round(block / np.float32(scale)), -127, 127).astype(np.int8).tobytes()
    low = np.float16(block.min() if kind == "Q4_1" else -8 * np.abs(block).max() / 7)
    scale = np.float16((block.max() - np.float32(low)) / 15 if kind == "Q4_1" else -np.float32(low) / 8)
    q = np.clip(np.round((block - np.float32(low)) / np.float32(scale)), 0, 15).astype(np.uint8)
    header = scale.tobytes() + (low.tobytes() if kind == "Q4_1" else b"")
    return header + (q[:16] | q[16:] << 4).tobytes()


def save_by_mlx(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> Path:
    """The same in F32 by MLX's own writer."""
    kinds = {bool: mx.bool_, int: mx.uint32, float: mx.float32}
    values = {
        key: mx.array(value, kinds[type(value)])
        if type(value) in kinds
        else mx.array(value, mx.int32)
        if isinstance(value, list) and isinstance(value[0], int)
        else value
        for key, value in metadata.items()
    }
    mx.save_gguf(str(path), {name: mx.array(array) for name, array in tensors.items()}, values)
    return path
