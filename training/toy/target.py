"""The toy target: how a small model that answers the requests of the toy tasks is made, trained and saved.

Shapes: B batch, L length, E hidden size, T answer tokens.
"""

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gemma3_text, qwen3

from dflash.adapters import find_adapter
from dflash.core.cpu_math import cross_entropy
from dflash.core.errors import did_you_mean
from dflash.core.files import flat, write_arrays, write_json

from ...core.settings import SettingsError, require
from ..cpu import has_quick_layers, quick_layer
from ..data.sequences import Ints, Sequences, pad_batch, plan_batches
from ..loop.settings import FitSettings

_ADDED = ("vocab_size", "tie_word_embeddings", "eos_token_id")
"""Keys of ``config.json`` that the recipe must not set: the tokenizer decides them."""


@dataclass(frozen=True)
class Family:
    """mlx-lm's module, and where a norm's weight starts, by its name and the scale of what feeds the residual."""

    module: ModuleType
    norm_start: Callable[[str, float], float]


FAMILIES = {
    "qwen3": Family(qwen3, lambda name, scale: 1.0),
    # Gemma's norms multiply by one more than their weight; those after a sublayer set the size of what it adds.
    "gemma3_text": Family(gemma3_text, lambda name, scale: scale - 1.0 if "post_" in name else 0.0),
}
"""What a target may be, by ``model_type``."""


@dataclass(frozen=True)
class TargetSettings:
    """What the target is, what it learns from, and how.

    ``config`` is its ``config.json``, to which the tokenizer adds the vocabulary; its ``model_type`` is one of
    :data:`FAMILIES`, its other keys are those of mlx-lm's ``ModelArgs``.
    """

    config: dict[str, Any]
    fit: FitSettings
    samples: int
    data_seed: int = 1
    batch_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        kind = self.config.get("model_type")
        family = FAMILIES.get(str(kind))
        if family is None:
            raise SettingsError(f"config: model_type must be one of {', '.join(FAMILIES)}, got {kind!r}.")
        sizes = {f.name: f for f in dataclasses.fields(family.module.ModelArgs) if f.name not in _ADDED}
        for name in self.config:
            require(
                name in sizes or name == "architectures", f"config: unknown key {name!r}; {did_you_mean(name, sizes)}"
            )
        for name, field in sizes.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            require(name in self.config or not required, f"config: {name} missing.")


def model_config(settings: TargetSettings, vocab_size: int, end: int) -> dict[str, Any]:
    """``config.json`` of the target."""
    return settings.config | {"vocab_size": vocab_size, "tie_word_embeddings": True, "eos_token_id": end}


def build_target(settings: TargetSettings, vocab_size: int, end: int) -> nn.Module:
    """A new target with weights sampled from ``settings.seed``: normal, smaller where they feed the residual."""
    mx.random.seed(settings.seed)
    family = FAMILIES[settings.config["model_type"]]
    model = family.module.Model(family.module.ModelArgs.from_dict(model_config(settings, vocab_size, end)))
    model.sanitize({})  # some families drop their untied head here
    out_scale = (2 * len(model.layers)) ** -0.5

    def weight(name: str, value: mx.array) -> mx.array:
        if value.ndim < 2:
            return mx.full(value.shape, family.norm_start(name, out_scale))
        if "embed" in name:
            return mx.random.normal(value.shape, scale=0.02)
        scale = value.shape[-1] ** -0.5
        return mx.random.normal(value.shape, scale=scale * (out_scale if ("o_proj" in name or "down" in name) else 1.0))

    model.load_weights([(name, weight(name, value)) for name, value in flat(model.parameters()).items()])
    mx.eval(model.parameters())
    return model


def hidden_states(model: nn.Module, tokens_BL: mx.array) -> mx.array:
    """Final normalised hidden states ``[B, L, E]``, by the quick layers of ``training.cpu`` where they exist."""
    adapter = find_adapter(model)
    return adapter.forward(tokens_BL, None, (), quick_layer if has_quick_layers(adapter) else None)[0]


def answer_loss(model: nn.Module, tokens_BL: mx.array, positions_T: mx.array) -> mx.array:
    """Mean cross-entropy of the answers' tokens.

    ``positions_T`` are the flat positions (into ``[B * L]``) whose next token belongs to an answer.
    """
    adapter = find_adapter(model)
    hidden_TE = hidden_states(model, tokens_BL).reshape(-1, adapter.hidden_size)[positions_T]
    return cross_entropy(adapter.head(hidden_TE), tokens_BL.reshape(-1)[positions_T + 1]).mean()


def answer_positions(loss_mask: Ints) -> Ints:
    """Flat positions, into ``loss_mask [N, L]``, one before each token of an answer."""
    return (np.flatnonzero(loss_mask) - 1).astype(np.int32)


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
        tokens, loss_mask = pad_batch(sequences, plan[number], starts)
        return mx.array(tokens), mx.array(answer_positions(loss_mask))

    return batch


def save_target(model: nn.Module, config: dict[str, object], tokenizer: Path, folder: Path) -> None:
    """Write an mlx-lm folder: bfloat16 weights, ``config.json`` and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.astype(mx.bfloat16) for name, value in flat(model.parameters()).items()}
    for file in tokenizer.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    write_json(folder / "config.json", config | {"torch_dtype": "bfloat16"})
    write_arrays(folder / "model.safetensors", weights, {"format": "pt"})
