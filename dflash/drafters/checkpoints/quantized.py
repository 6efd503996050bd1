"""Quantised drafters: mlx-lm's ``quantization`` in a config, read and written, and quantising a drafter."""

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...core.errors import CheckpointError, DFlashError
from ...core.values import short

logger = logging.getLogger(__name__)

MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
"""MLX's modes with their default group size and bits, which are fixed for all but ``affine``."""

PREFIXES = re.compile(r"^((model|module|_orig_mod|draft|draft_model|drafter)\.)+")
"""What wrappers put before the names of a drafter's weights."""

_DESCRIPTION = ("group_size", "bits", "mode")
_SUFFIX = ".scales"


def usual(mode: str) -> tuple[int, int]:
    """The default group size and bits of ``mode``. Raises ``CheckpointError`` for an unknown mode."""
    if mode not in MODES:
        raise CheckpointError(f"The quantisation mode is {mode!r}; expected one of {', '.join(MODES)}.")
    return MODES[mode]


def quantize_like(model: nn.Module, config: Mapping[str, Any], weights: Collection[str]) -> None:
    """Quantise the layers of ``model`` whose scales are among ``weights``, as ``config`` describes.

    ``config["quantization"]`` (or ``quantization_config``) holds ``group_size``, ``bits`` and ``mode``, and the
    exceptions under the names of layers. Layers without scales stay as they are. Raises ``CheckpointError`` for
    another library's quantisation, and for a missing or wrong description.
    """
    scaled = {name.removesuffix(_SUFFIX) for name in weights if name.endswith(_SUFFIX)}
    if not scaled:
        return
    described = _description(config)
    if not described:
        raise CheckpointError(
            f"The weights are quantised ({min(scaled)}{_SUFFIX}), but config.json holds no quantization with "
            "group_size, bits and mode."
        )
    shared = {name: described[name] for name in _DESCRIPTION if described.get(name) is not None}
    by_layer = {PREFIXES.sub("", name): value for name, value in described.items() if isinstance(value, dict)}

    def options(name: str, layer: nn.Module) -> bool | dict[str, Any]:
        if name not in scaled or not hasattr(layer, "to_quantized"):
            return False
        return _checked(shared | {k: v for k, v in by_layer.get(name, {}).items() if v is not None}, name)

    try:
        nn.quantize(model, class_predicate=options)
    except ValueError as error:
        raise CheckpointError(f"config.json: this quantization cannot be used: {error}") from error


def description(model: nn.Module) -> dict[str, Any] | None:
    """The ``quantization`` of a config that describes ``model``; ``None`` if no layer is quantised."""
    layers = {
        name: {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        for name, layer in model.named_modules()
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding)
    }
    if not layers:
        return None
    all_of_them = list(layers.values())
    shared = max(all_of_them, key=all_of_them.count)
    return shared | {name: layer for name, layer in sorted(layers.items()) if layer != shared}


def quantize_drafter(
    model: nn.Module, bits: int = 4, group_size: int = 64, mode: str = "affine", leave_out: Collection[str] = ()
) -> list[str]:
    """Quantise the linear layers of ``model`` in place; returns the names of those left unquantised.

    These are layers whose name contains a part in ``leave_out`` (``fc``, ``layers.0``, ``o_proj``), the drafter's own
    head, and layers whose inputs do not divide into groups. All other weights become bfloat16. Raises ``DFlashError``
    for options that MLX does not have, for a drafter without weights, and if no layer would be quantised.
    """
    options = _checked({"bits": bits, "group_size": group_size, "mode": mode}, "the drafter")
    if not isinstance(model, nn.Module):
        raise DFlashError(f"{type(model).__name__} has no weights of its own; expected a DFlash drafter.")
    if description(model) is not None:
        raise DFlashError("The drafter is quantised already; quantise the one that it was made from.")
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    unknown = [part for part in leave_out if not any(_names(name, part) for name in linear)]
    if unknown:
        raise DFlashError(
            f"No layer of the drafter is named {unknown[0]!r}; its layers are {', '.join(sorted(linear))}."
        )
    kept = {
        name
        for name, layer in linear.items()
        if layer.weight.shape[-1] % group_size or name == "lm_head" or any(_names(name, part) for part in leave_out)
    }
    if kept == linear.keys():
        raise DFlashError(f"No layer's inputs divide into groups of {group_size}; choose a smaller group size.")
    model.apply(lambda w: w.astype(mx.bfloat16) if mx.issubdtype(w.dtype, mx.floating) else w)
    nn.quantize(model, class_predicate=lambda name, _: options if name in linear and name not in kept else False)
    mx.eval(model.parameters())
    return sorted(kept)


def _names(layer: str, part: str) -> bool:
    """Whether ``part`` is one or more whole components of the dotted name ``layer``."""
    return f".{part}." in f".{layer}."


def _description(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("quantization", "quantization_config"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {key} must be an object, got {value!r}.")
        method = value.get("quant_method")
        if method is not None and method not in MODES:
            raise CheckpointError(
                f"config.json: quant_method {method!r} is not supported; it is not MLX's quantisation. Convert the "
                "published weights in half precision with `dflash quantize`."
            )
        if "bits" in value or "mode" in value:
            return value
    return {}


def _checked(options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Complete and check options of :func:`mlx.core.quantize`; missing ones are the mode's own."""
    mode = options.get("mode", "affine")
    group_size, bits = usual(mode)
    scheme = {"group_size": options.get("group_size", group_size), "bits": options.get("bits", bits), "mode": mode}
    given = scheme["group_size"], scheme["bits"]
    whole = all(type(size) is int for size in given)
    fits, expected = whole and given == MODES[mode], f"bits {bits} and group size {group_size}"
    if mode == "affine":
        fits = whole and given[0] in (32, 64, 128) and given[1] in (2, 3, 4, 5, 6, 8)
        expected = "bits 2, 3, 4, 5, 6 or 8 and a group size of 32, 64 or 128"
    if not fits:
        raise CheckpointError(
            f"The quantisation of {what} has bits {short(given[1])} and group size {short(given[0])}; "
            f"mode {mode!r} needs {expected}."
        )
    return scheme
