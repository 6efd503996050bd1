"""Fingerprints: one tells targets of the same shape apart, the other is common to all quantisations of one target."""

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ..core.errors import DataError
from ..core.files import flat

if TYPE_CHECKING:
    from . import LoadedTargetModel

_PROBE = "Hello, world! 3.14159\n\tdef f(x):\n        return x ** 2  # naïve — Ωß 漢字 🙂\n<|im_end|></s>"
_VALUES = 64  # read of each weight: a fine-tuned copy differs in some, a cast to float32 in none


def target_fingerprint(target: "LoadedTargetModel") -> str:
    """SHA-256 (hexadecimal) over a target: its type, its config, and every weight's name, shape and some values.

    Only the config's fields that differ from mlx-lm's defaults count, so that new fields of a newer mlx-lm change
    nothing. Each weight contributes some 64 values, evenly spread and as float32: fine-tuned copies have files of equal
    names and sizes, hashing gigabytes takes minutes, and half precision becomes float32 on a CPU.
    """
    return model_fingerprint(target.model)


def tokenizer_fingerprint(target: "LoadedTargetModel") -> str:
    """SHA-256 over a tokenizer: its vocabulary, its stop tokens, and its tokens for one sample text."""
    if target.tokenizer is None:
        raise DataError("This target was loaded without a tokenizer; load it from a folder that has one.")
    vocabulary = sorted(target.tokenizer.get_vocab().items())
    tokens = target.tokenizer.encode(_PROBE)
    return hashlib.sha256(json.dumps([vocabulary, sorted(target.stop_token_ids()), tokens]).encode()).hexdigest()


def norm_fingerprint(target: "LoadedTargetModel") -> str | None:
    """SHA-256 (hexadecimal) of what every quantisation of a target keeps: its norms, vocabulary and number of layers.

    Norms are the one-dimensional weights ``*norm.weight``, which no format packs. They are rounded to bfloat16, so that
    the hub's files, a GGUF file and a copy in float32 agree. Full fine-tuning changes the norms; an adapter of the
    matrices alone (LoRA) does not. ``None``: the target has no norms.
    """
    norms = {
        name: weight.astype(mx.bfloat16).astype(mx.float32)
        for name, weight in flat(target.model.parameters()).items()
        if name.endswith("norm.weight") and weight.ndim == 1
    }
    return _hashed(json.dumps([target.vocab_size, target.num_layers]), norms, norms) if norms else None


def model_fingerprint(model: nn.Module) -> str:
    """As :func:`target_fingerprint`, for any model."""
    fields = _own_fields(getattr(model, "args", None))
    described = json.dumps([getattr(model, "model_type", ""), fields], sort_keys=True)
    if scales := {name: layer.scale for name, layer in model.named_modules() if "lora_a" in layer}:
        described += json.dumps(scales, sort_keys=True)  # how much adapters count is among no weights
    weights = flat(model.parameters())
    values = {name: w.reshape(-1)[:: max(1, w.size // _VALUES)] for name, w in weights.items()}
    numbers = {n: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v for n, v in values.items()}
    return _hashed(described, weights, numbers)


def _hashed(described: str, weights: dict[str, mx.array], values: dict[str, mx.array]) -> str:
    """SHA-256 over a text, and over the name, the shape and the ``values`` of each weight."""
    total = hashlib.sha256(described.encode())
    mx.eval(values)
    for name in sorted(weights):
        total.update(f"{name} {weights[name].shape}".encode())
        total.update(memoryview(values[name]).tobytes())  # type: ignore[arg-type]  # arrays are buffers
    return total.hexdigest()


def _own_fields(args: Any) -> dict[str, str]:
    if not dataclasses.is_dataclass(args):
        return {}
    values = {f.name: (getattr(args, f.name), f.default) for f in dataclasses.fields(args)}
    return {name: repr(value) for name, (value, default) in values.items() if value != default}
