"""``dflash import``: a GGUF file of llama.cpp becomes a folder that mlx-lm loads.

llama.cpp stores a LLaMA's query and key rows in the order of interleaved rotary embedding. The hub and mlx-lm rotate
halves, so :func:`_halves` restores that order. Qwen's rows are stored unchanged.
"""

import logging
import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..core.errors import CheckpointError
from ..core.files import exclusive_lock, flat, write_arrays, write_json
from .gguf import GGUF, GROUP_SIZE, read_gguf
from .gguf_tokenizer import save_tokenizer

logger = logging.getLogger(__name__)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""``general.architecture``, which is also mlx-lm's ``model_type``."""

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_READ_KEYS = {
    "embedding_length", "block_count", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon", "context_length",
    "vocab_size", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
}  # fmt: skip


def import_gguf(path: Path, folder: Path, dtype: str | None = None) -> dict[str, Any]:
    """Write the model of a GGUF file to ``folder``; returns its config.

    Weights that MLX can hold packed stay packed, the rest keeps its precision. With ``dtype`` (``float32``, ``float16``
    or ``bfloat16``) all become plain weights of that type. ``config.json`` is written last: a folder without it is
    unfinished.

    Raises ``CheckpointError`` for other architectures, and for every tensor or setting that would be lost, by name.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    gguf = read_gguf(path)
    config = _config(gguf)
    tensors = gguf.tensors(None if dtype is None else DTYPES[dtype])
    if _ROPE_FACTORS in tensors:
        config["rope_scaling"] = _llama3_scaling(gguf, config, tensors.pop(_ROPE_FACTORS))
    weights = _weights(gguf, config, tensors)
    config |= _quantization(weights)
    floats = _usual_dtype(gguf) if dtype is None else DTYPES[dtype]
    weights = {n: w.astype(floats) if mx.issubdtype(w.dtype, mx.floating) else w for n, w in weights.items()}
    _check_complete(gguf, config, weights)
    with exclusive_lock(folder):
        if (folder / "config.json").exists():
            raise CheckpointError(f"{folder} holds a model already; choose a new folder.")
        write_arrays(folder / "model.safetensors", weights, {"format": "mlx"})  # first: a full disk keeps nothing
        save_tokenizer(gguf, folder, config["max_position_embeddings"])
        write_json(folder / "generation_config.json", _token_ids(gguf))
        write_json(folder / "config.json", config)
    return config


# --- config -------------------------------------------------------------------------------------------------


def _config(gguf: GGUF) -> dict[str, Any]:
    """The config in mlx-lm's names, without quantisation."""
    architecture = gguf.require("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{gguf.path} is a model of architecture {architecture!r}; expected {', '.join(ARCHITECTURES)}."
        )
    values = {
        key.removeprefix(architecture + "."): value
        for key, value in gguf.metadata.items()
        if key.startswith(architecture + ".")
    }
    unknown = next((key for key, value in values.items() if key not in _READ_KEYS and value), None)
    if unknown is not None:
        raise CheckpointError(
            f"{gguf.path} sets {architecture}.{unknown} to {str(values[unknown])[:40]}, which this import does not "
            "know, so that the model might write other text. Take its weights from the hub instead."
        )

    def number(key: str, default: Any = None) -> Any:
        value = values.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:  # one per layer
            value = value[0]
        if value is None or isinstance(value, list | str):
            raise CheckpointError(f"{gguf.path}: {architecture}.{key} must be one number, got {value}.")
        return value

    heads, width = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", width // max(1, heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{gguf.path}: {architecture}.{key} is {values[key]}, but a head has {head_dim} numbers."
            )
    return {
        "model_type": architecture,
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        # float32 in the file: 1e-05 is 9.999999747378752e-06 there
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        "max_position_embeddings": number("context_length"),
        "vocab_size": number("vocab_size", len(gguf.require("tokenizer.ggml.tokens", list))),
        "rope_theta": float(f"{number('rope.freq_base', 10_000.0):.7g}"),
        "rope_scaling": _linear_scaling(gguf, values),
        "tie_word_embeddings": "output.weight" not in gguf.stored,
        "attention_bias": architecture == "qwen2" or "blk.0.attn_output.bias" in gguf.stored,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.stored,
        **_token_ids(gguf),
    }


def _linear_scaling(gguf: GGUF, values: dict[str, Any]) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise CheckpointError(f"{gguf.path} scales its rotary embedding by {kind!r}; expected 'linear' or none.")
    return {"rope_type": "linear", "factor": values.get("rope.scaling.factor", 1.0)}


def _llama3_scaling(gguf: GGUF, config: dict[str, Any], factors: mx.array) -> dict[str, Any]:
    """LLaMA 3's scaling of the rotary embedding, which the file stores as one factor per frequency ``[D/2]``."""
    from mlx_lm.models.rope_utils import Llama3RoPE

    scaling = {"rope_type": "llama3", "factor": float(f"{mx.max(factors).item():.6g}")}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    dims, base = config["head_dim"], config["rope_theta"]
    expected = Llama3RoPE(dims, base=base, scaling_config=scaling)._freqs / base ** (mx.arange(0, dims, 2) / dims)
    if expected.shape != factors.shape or not mx.allclose(expected, factors, rtol=1e-3).item():
        raise CheckpointError(
            f"{gguf.path} holds {_ROPE_FACTORS}, whose factors are not those of LLaMA 3 with its usual settings. "
            "Take this model's weights from the hub instead."
        )
    return scaling


def _token_ids(gguf: GGUF) -> dict[str, Any]:
    """The ids that ``config.json`` and ``generation_config.json`` share; several tokens may end a response."""
    ids = {role: gguf.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "eot", "padding")}
    ends = sorted({number for role in ("eos", "eot") if (number := ids[role]) is not None})
    found = {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"]}
    return {name: value for name, value in found.items() if value is not None} | {
        "eos_token_id": ends[0] if len(ends) == 1 else ends
    }


# --- weights ------------------------------------------------------------------------------------------------


def _weights(gguf: GGUF, config: dict[str, Any], tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """The tensors in mlx-lm's names and order of rows."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    interleaved = heads if config["model_type"] == "llama" else {}
    weights = {}
    for name, array in tensors.items():
        stem, _, part = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        kind = layer[2] if layer else stem
        if kind not in (_LAYER if layer else _OUTSIDE):
            raise CheckpointError(
                f"{gguf.path} holds the tensor {name}, which a {config['model_type']} model has no use for here. "
                "Take this model's weights from the hub instead."
            )
        new = f"model.layers.{layer[1]}.{_LAYER[kind]}" if layer else _OUTSIDE[kind]
        weights[f"{new}.{part}"] = _halves(array, interleaved[kind]) if kind in interleaved else array
    return weights


def _halves(rows: mx.array, heads: int) -> mx.array:
    """Rows ``[heads * D, ...]`` from the order of interleaved rotary embedding (0, D/2, 1, ...) to that of halves."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _packed(weights: dict[str, mx.array]) -> dict[str, int]:
    """Bits of every packed layer."""
    stems = [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]
    return {
        stem: 32 * weights[f"{stem}.weight"].shape[1] // (GROUP_SIZE * weights[f"{stem}.scales"].shape[1])
        for stem in stems
    }


def _quantization(weights: dict[str, mx.array]) -> dict[str, Any]:
    """The config's entry for packed weights: the usual bits, and the layers that have others."""
    bits = _packed(weights)
    if not bits:
        return {}
    usual = Counter(bits.values()).most_common(1)[0][0]
    others = {name: {"group_size": GROUP_SIZE, "bits": of} for name, of in bits.items() if of != usual}
    return {"quantization": {"group_size": GROUP_SIZE, "bits": usual, **others}}


def _usual_dtype(gguf: GGUF) -> mx.Dtype:
    """The type of plain matrices, float16 if there are several: mixed ones make the whole model compute in float32."""
    kinds = gguf.matrix_kinds()
    return mx.float32 if kinds == {"F32"} else mx.bfloat16 if kinds == {"BF16"} else mx.float16


def _check_complete(gguf: GGUF, config: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """Raise unless the weights are exactly those of mlx-lm's model of this config, in names and shapes."""
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    bits = _packed(weights)

    def packing(name: str, _: nn.Module) -> bool | dict[str, int]:
        return {"group_size": GROUP_SIZE, "bits": bits[name]} if name in bits else False

    nn.quantize(model, class_predicate=packing)
    expected = flat(model.parameters())
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights:
            raise CheckpointError(f"{gguf.path} lacks the tensor for {name}; download it again.")
        if name not in expected:
            raise CheckpointError(
                f"{gguf.path} holds a tensor for {name}, which mlx-lm's {config['model_type']} has no use for."
            )
        if expected[name].shape != weights[name].shape:
            raise CheckpointError(
                f"{gguf.path}: the tensor for {name} has shape {weights[name].shape}, expected {expected[name].shape}."
            )
