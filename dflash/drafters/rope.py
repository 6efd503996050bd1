"""Rotary position embeddings of a drafter, by every recipe that published configs name.

Recipes are computed as in the transformers library (version 5), with which drafters are trained.

Sources: RoPE (arXiv:2104.09864), linear and dynamic NTK scaling as in transformers, YaRN (arXiv:2309.00071), LongRoPE
(arXiv:2402.13753), Llama 3.1's frequency bands, Gemma's proportional rotation.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..core.errors import CheckpointError, did_you_mean

Parameters = Mapping[str, Any]
"""One ``rope_parameters`` of a config: ``rope_type`` (or ``type``), ``rope_theta`` and what the type needs."""


def rope_type(parameters: Parameters) -> str:
    """The recipe that ``parameters`` name; ``"default"`` if they name none."""
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def build_rope(head_dim: int, parameters: Parameters, max_positions: int, traditional: bool = False) -> nn.Module:
    """A module that rotates ``[.., L, head_dim]`` at positions ``offset ..`` (one offset, or one per row).

    Args:
        head_dim: Size of a head.
        parameters: The recipe; ``rope_theta`` is required.
        max_positions: The default of ``original_max_position_embeddings``.
        traditional: Rotate adjacent pairs instead of halves (``rope_is_neox_style: false``).

    Raises ``CheckpointError`` for an unknown recipe, and for a missing or impossible number.
    """
    kind = rope_type(parameters)
    if kind not in _RECIPES:
        raise CheckpointError(f"config.json: rope_type {kind!r} is not supported; {did_you_mean(kind, _RECIPES)}")
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd; rotary positions rotate pairs of numbers.")
    try:
        return _RECIPES[kind](head_dim, parameters, max_positions, traditional)
    except KeyError as error:
        raise CheckpointError(f"config.json: rope_type {kind!r} needs {error.args[0]!r}.") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"config.json: rope_type {kind!r} cannot use {dict(parameters)}: {error}.") from error


class Rope(nn.Module):
    """Rotates each pair once in ``2 pi * freqs`` positions, and multiplies it by ``scale``."""

    def __init__(self, dims: int, freqs: mx.array, scale: float, traditional: bool):
        super().__init__()
        self.dims, self.scale, self.traditional = dims, scale, traditional
        self._freqs = freqs

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        freqs = self.freqs(offset + x.shape[-2])
        x = x if self.scale == 1.0 else x * self.scale
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=None, scale=1.0, offset=offset, freqs=freqs
        )

    def freqs(self, length: int | mx.array) -> mx.array:
        """The wavelengths for sequences of ``length`` tokens (one number, or one per row: the longest counts)."""
        return self._freqs


class DynamicRope(Rope):
    """NTK scaling that grows with the sequence once it is longer than ``max_positions``."""

    def __init__(self, dims: int, theta: float, factor: float, max_positions: int, traditional: bool):
        super().__init__(dims, mx.array(_wavelengths(dims, theta)), 1.0, traditional)
        self.theta, self.factor, self.max_positions = theta, factor, max_positions

    def freqs(self, length: int | mx.array) -> mx.array:
        longest = mx.maximum(mx.max(mx.array(length)), self.max_positions).astype(mx.float32)
        grown = self.factor * longest / self.max_positions - (self.factor - 1)
        base = self.theta * grown ** (self.dims / (self.dims - 2))
        return base ** (mx.arange(0, self.dims, 2, dtype=mx.float32) / self.dims)


class LongRope(Rope):
    """Two sets of wavelengths: one up to the pretraining length, one for longer sequences."""

    def __init__(self, dims: int, short: mx.array, long: mx.array, limit: int, scale: float, traditional: bool):
        super().__init__(dims, short, scale, traditional)
        self._long, self.limit = long, limit

    def freqs(self, length: int | mx.array) -> mx.array:
        return mx.where(mx.max(mx.array(length)) > self.limit, self._long, self._freqs)


def _wavelengths(dims: int, theta: float) -> list[float]:
    return [theta ** (i / dims) for i in range(0, dims, 2)]


def _number(parameters: Parameters, name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise KeyError(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def _whole(head_dim: int, parameters: Parameters) -> int:
    """``head_dim``, after checking that all of a head is rotated."""
    part = _number(parameters, "partial_rotary_factor", 1.0)
    if part != 1.0:
        raise ValueError(f"partial_rotary_factor {part} with scaled rotary positions is not implemented")
    return head_dim


def _original(parameters: Parameters, max_positions: int) -> float:
    return _number(parameters, "original_max_position_embeddings", float(max_positions))


def _default(head_dim: int, parameters: Parameters, max_positions: int, traditional: bool) -> nn.Module:
    # As in Qwen3, whose attention drafters have: a partial_rotary_factor, copied from the target, is ignored.
    return nn.RoPE(head_dim, traditional=traditional, base=_number(parameters, "rope_theta"))


def _linear(head_dim: int, parameters: Parameters, max_positions: int, traditional: bool) -> nn.Module:
    dims, factor = _whole(head_dim, parameters), _number(parameters, "factor")
    return nn.RoPE(dims, traditional=traditional, base=_number(parameters, "rope_theta"), scale=1 / factor)


def _dynamic(head_dim: int, parameters: Parameters, max_positions: int, traditional: bool) -> nn.Module:
    theta, factor = _number(parameters, "rope_theta"), _number(parameters, "factor")
    return DynamicRope(_whole(head_dim, parameters), theta, factor, max_positions, traditional)


def _llama3(head_dim: int, parameters: Parameters, max_positions: int, traditional: bool) -> nn.Module:
    factor, original = _number(parameters, "factor"), _original(parameters, max_positions)
    low, high = _number(parameters, "low_freq_factor", 1.0), _number(parameters, "high_freq_factor", 4.0)
    if low >= high:
        raise ValueError(f"low_freq_factor {low} must be below high_freq_factor {high}")

    def stretched(wavelength: float) -> float:
        turns = original / (2 * math.pi * wavelength)  # within the pretraining length
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        return wavelength / ((1 - smooth) / factor + smooth)

    dims = _whole(head_dim, parameters)
    freqs = [stretched(w) for w in _wavelengths(dims, _number(parameters, "rope_theta"))]
    return Rope(dims, mx.array(freqs), 1.0, traditional)


def _yarn(head_dim: int, parameters: Parameters, max_positions: int, traditional: bool) -> nn.Module:
    theta, original = _number(parameters, "rope_theta"), _original(parameters, max_positions)
    factor = _number(parameters, "factor", max_positions / original)
    dims = _whole(head_dim, parameters)

    def pair_of(turns: float) -> float:
        """The (fractional) index of the pair that makes ``turns`` rotations within the pretraining length."""
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(_number(parameters, "beta_fast", 32.0)), pair_of(_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high = high + 0.001 if low == high else high
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dims // 2)]
    plain = _wavelengths(dims, theta)
    freqs = [wave / (blend / factor + 1 - blend) for wave, blend in zip(plain, ramp, strict=True)]
    return Rope(dims, mx.array(freqs), _yarn_scale(parameters, factor), traditional)


def _yarn_scale(parameters: Parameters, factor: float) -> float:
    """The factor on queries and keys that keeps attention sharp over stretched positions."""
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    both = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(float(both[0])) / scale(float(both[1])) if both[0] and both[1] else scale(1.0)


def _longrope(head_dim: int, parameters: Parameters, max_positions: int, traditional: bool) -> nn.Module:
    original = _original(parameters, max_positions)
    factor = _number(parameters, "factor", max_positions / original)
    natural = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    dims = _whole(head_dim, parameters)
    plain = mx.array(_wavelengths(dims, _number(parameters, "rope_theta")))
    sets = [mx.array(parameters[name], mx.float32) for name in ("short_factor", "long_factor")]
    if any(s.shape != plain.shape for s in sets):
        raise ValueError(f"short_factor and long_factor need {dims // 2} numbers each")
    scale = _number(parameters, "attention_factor", natural)
    return LongRope(dims, plain * sets[0], plain * sets[1], int(original), scale, traditional)


def _proportional(head_dim: int, parameters: Parameters, max_positions: int, traditional: bool) -> nn.Module:
    turned = int(_number(parameters, "partial_rotary_factor", 1.0) * head_dim // 2)
    factor, plain = _number(parameters, "factor", 1.0), _wavelengths(head_dim, _number(parameters, "rope_theta"))
    freqs = [wave * factor if i < turned else math.inf for i, wave in enumerate(plain)]  # infinite: never rotated
    return Rope(head_dim, mx.array(freqs), 1.0, traditional)


_RECIPES: dict[str, Callable[[int, Parameters, int, bool], nn.Module]] = {
    "default": _default,
    "mrope": _default,  # its sections are the axes of images; text has the same position on all of them
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its first name
    "proportional": _proportional,
}
