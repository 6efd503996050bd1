"""The target of the pair: a small Qwen3 that learns to answer the requests of the world.

Knows Qwen3's modules (through mlx-lm) and how to save them as an mlx-lm folder. Must not know drafters.

Shapes: B batch, L length, H query heads, K key-value heads, G query heads a key-value head, D head size,
E hidden size, T answer tokens.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from einops import rearrange
from mlx.utils import tree_map
from mlx_lm.models.qwen3 import Model, ModelArgs

from dflash.files import write_json

from .arrays import flat, write_arrays
from .data import Ints, Sequences, padded, plan_batches
from .fastmath import cross_entropy, softmax, swiglu
from .fit import FitSettings


@dataclass(frozen=True)
class TargetSettings:
    """Shape of the target, what it learns from, and how."""

    fit: FitSettings
    samples: int
    data_seed: int = 1
    batch_tokens: int = 2048
    seed: int = 0
    hidden_size: int = 256
    num_hidden_layers: int = 10
    intermediate_size: int = 512
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6


def model_config(settings: TargetSettings, vocab_size: int, end: int) -> dict[str, object]:
    """``config.json`` of the target."""
    shape = asdict(settings)
    names = (
        "hidden_size num_hidden_layers intermediate_size num_attention_heads num_key_value_heads head_dim "
        "rope_theta max_position_embeddings rms_norm_eps"
    ).split()
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "eos_token_id": end,
        **{name: shape[name] for name in names},
    }


def build_target(settings: TargetSettings, vocab_size: int, end: int) -> Model:
    """A new target with weights drawn from ``settings.seed``: normal, smaller where they feed the residual."""
    mx.random.seed(settings.seed)
    model = Model(ModelArgs.from_dict(model_config(settings, vocab_size, end)))
    out_scale = (2 * settings.num_hidden_layers) ** -0.5

    def draw(name: str, value: mx.array) -> mx.array:
        if value.ndim < 2:
            return value
        if "embed" in name:
            return mx.random.normal(value.shape, scale=0.02)
        scale = value.shape[-1] ** -0.5
        return mx.random.normal(value.shape, scale=scale * (out_scale if ("o_proj" in name or "down" in name) else 1.0))

    model.load_weights([(name, draw(name, value)) for name, value in flat(model.parameters()).items()])
    mx.eval(model.parameters())
    return model


def causal_attention(queries_BHLD: mx.array, keys_BKLD: mx.array, values_BKLD: mx.array) -> mx.array:
    """Causal attention with grouped heads, ``[B, H, L, D]``."""
    heads, length, size = queries_BHLD.shape[1:]
    groups = heads // keys_BKLD.shape[1]
    queries = rearrange(queries_BHLD * size**-0.5, "B (K G) L D -> B K (G L) D", G=groups)
    scores = queries @ keys_BKLD.swapaxes(-1, -2)
    hidden = mx.where(mx.tri(length, dtype=mx.bool_), 0.0, -1e9)
    weights = softmax(scores + mx.tile(hidden, (groups, 1)))
    return rearrange(weights @ values_BKLD, "B K (G L) D -> B (K G) L D", G=groups)


def layer_outputs(model: Model, tokens_BL: mx.array) -> Iterator[mx.array]:
    """Hidden states ``[B, L, E]`` behind each layer: mlx-lm's forward with the quick maths of `fastmath`."""
    x_BLE = model.model.embed_tokens(tokens_BL)
    for layer in model.layers:
        attention, mlp, y_BLE = layer.self_attn, layer.mlp, layer.input_layernorm(x_BLE)
        queries = rearrange(attention.q_proj(y_BLE), "B L (H D) -> B H L D", H=attention.n_heads)
        keys = rearrange(attention.k_proj(y_BLE), "B L (K D) -> B K L D", K=attention.n_kv_heads)
        values = rearrange(attention.v_proj(y_BLE), "B L (K D) -> B K L D", K=attention.n_kv_heads)
        queries, keys = attention.rope(attention.q_norm(queries)), attention.rope(attention.k_norm(keys))
        out = causal_attention(queries, keys, values)
        x_BLE = x_BLE + attention.o_proj(rearrange(out, "B H L D -> B L (H D)"))
        y_BLE = layer.post_attention_layernorm(x_BLE)
        x_BLE = x_BLE + mlp.down_proj(swiglu(mlp.gate_proj(y_BLE), mlp.up_proj(y_BLE)))
        yield x_BLE


def hidden_states(model: Model, tokens_BL: mx.array) -> mx.array:
    """Final normalised hidden states ``[B, L, E]``."""
    *_, last_BLE = layer_outputs(model, tokens_BL)
    return model.model.norm(last_BLE)


def features(model: Model, layer_ids: Sequence[int], tokens_BL: mx.array) -> mx.array:
    """Outputs of the layers ``layer_ids`` side by side, ``[B, L, F]``, as the drafter reads them."""
    outputs = list(layer_outputs(model, tokens_BL))
    return mx.concatenate([outputs[i] for i in layer_ids], axis=-1)


def answer_loss(model: Model, tokens_BL: mx.array, places_T: mx.array) -> mx.array:
    """Mean cross-entropy of the answers' tokens.

    ``places_T`` are the flat positions (into ``[B * L]``) whose next token belongs to an answer.
    """
    hidden_TE = hidden_states(model, tokens_BL).reshape(-1, model.args.hidden_size)[places_T]
    logits_TV = model.model.embed_tokens.as_linear(hidden_TE)
    return cross_entropy(logits_TV, tokens_BL.reshape(-1)[places_T + 1]).mean()


def answer_places(response: Ints) -> Ints:
    """Flat positions, into a mask ``[N, L]`` of the answers' tokens, just before each of them."""
    return (np.flatnonzero(response) - 1).astype(np.int32)


def target_batches(sequences: Sequences, settings: TargetSettings) -> Callable[[int], tuple[mx.array, mx.array]]:
    """``batch(number)`` over as many differently shuffled passes as the steps need."""
    starts = sequences.starts
    needed = settings.fit.steps * settings.fit.batches_per_step
    plan: list[Ints] = []
    for epoch in range(needed):
        if len(plan) >= needed:
            break
        plan += plan_batches(sequences.lengths, settings.batch_tokens, settings.seed + epoch)

    def batch(number: int) -> tuple[mx.array, mx.array]:
        tokens, response = padded(sequences, plan[number], starts)
        return mx.array(tokens), mx.array(answer_places(response))

    return batch


def save_target(model: nn.Module, config: dict[str, object], tokenizer: Path, folder: Path) -> None:
    """Write an mlx-lm folder: bfloat16 weights, ``config.json`` and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.astype(mx.bfloat16) for name, value in flat(model.parameters()).items()}
    for file in tokenizer.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    write_json(folder / "config.json", config | {"torch_dtype": "bfloat16"})
    write_arrays(folder / "model.safetensors", weights, {"format": "pt"})


def rounded_to_bfloat16(model: nn.Module) -> None:
    """Round the weights in place as saving will; they stay float32."""
    model.update(tree_map(lambda w: w.astype(mx.bfloat16).astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
