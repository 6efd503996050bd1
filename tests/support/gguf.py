"""GGUF files as llama.cpp and as MLX write them, for the tests of the import."""

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from support.models import byte_tokenizer

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
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, *_types(value))
    for name, array in tensors.items():
        kind = others.get(name.removesuffix(".weight"), stored) if array.ndim == 2 else "F32"
        of = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, _blocks(array.astype(np.float32), of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _types(value: Any) -> tuple[gguf.GGUFValueType, gguf.GGUFValueType | None]:
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.get_type(value[0])
    kind = gguf.GGUFValueType.get_type(value)
    return (gguf.GGUFValueType.UINT32 if kind is gguf.GGUFValueType.INT32 else kind), None


def _blocks(array: np.ndarray, of: gguf.GGMLQuantizationType) -> np.ndarray:
    """The array quantised, or random bytes for the quantisations that the package only reads."""
    try:
        return gguf.quantize(array, of)
    except NotImplementedError:
        return random_blocks(of.name, array.size // gguf.GGML_QUANT_SIZES[of][0]).reshape(len(array), -1)


def random_blocks(kind: str, count: int) -> np.ndarray:
    """Random blocks ``[count, bytes]`` whose scales, the float16 numbers in them, are small and of both signs."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "IQ4_NL": (0,)}.get(kind, (0, 2)):
        blocks[:, at : at + 2] = np.linspace(-0.03, 0.05, count).astype(np.float16)[:, None].view(np.uint8)
    return blocks


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
