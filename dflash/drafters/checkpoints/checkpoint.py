"""Drafter checkpoints, read in every published packaging and written in z-lab's."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from ...core.backend import compute_dtype, to_compute_dtype
from ...core.errors import CheckpointError, DFlashError
from ...core.files import flat, read_json, read_safetensors, resolve_checkpoint, write_arrays, write_json
from ...core.parts import make
from ...target import load_target
from ..autoregressive import AutoregressiveDrafter
from ..combined import PREFIX as COMBINED
from ..combined import CombinedDrafter, own_name
from ..kinds import config_of, drafter_class, drafters, is_language_model, kind_in, needs_no_files
from .quantized import description, quantize_drafter
from .tensors import HEAD, Weights, load_weights, published_weights, reduced_vocabulary, vocabulary_tables


def load_drafter(path_or_hub_name: str | Path, bits: int | None = None, window: int | None = None) -> Any:
    """Load a drafter from a folder or a hub name: a ``DFlashDraftModel``, or the kind that its config names.

    Args:
        path_or_hub_name: A checkpoint, the name of a drafter without files (``"ngram"``, ``"mtp"``, a plug-in's), with
            options as in ``"ngram:block_size=8"`` or without, or ``"ngram+NAME"``.
        bits: Quantise the linear layers of a DFlash drafter to this many bits per weight, in groups of 64
            (:func:`~dflash.drafters.checkpoints.quantized.quantize_drafter`); head and embedding are the target's.
        window: How many of the newest context tokens full attention of a DFlash drafter sees
            (:meth:`~dflash.drafters.dflash.DFlashDraftModel.limit_context`).

    ``"mtp"`` is the layer ``mtp.*`` in the target's own files (:class:`~dflash.drafters.mtp.MTPDrafter`).
    ``"ngram"`` is an :class:`~dflash.drafters.ngram.NgramDrafter`. Write ``./ngram`` for a folder that has the name of
    a drafter without files. ``"ngram+NAME"`` combines it with the drafter ``NAME``
    (:class:`~dflash.drafters.combined.CombinedDrafter`). A whole language model becomes an
    :class:`~dflash.drafters.autoregressive.AutoregressiveDrafter`. Every packaging of :mod:`.formats` and
    :mod:`.tensors` is read, quantised or not. Drafters compute in float32 on the CPU; elsewhere float16 weights become
    bfloat16, since the target's features overflow float16.

    Raises ``CheckpointError`` for missing or damaged files, for unsupported ones (by name), and for weights that are
    missing, unknown, of the wrong shape or type, or not finite; ``DFlashError`` for ``bits`` or a ``window`` that the
    drafter cannot have.
    """
    if str(path_or_hub_name).startswith(COMBINED):
        return CombinedDrafter(load_drafter(own_name(path_or_hub_name), bits, window))
    model = _load(path_or_hub_name)
    if window is not None:
        if not hasattr(model, "limit_context"):
            raise DFlashError(f"A window limits the context of DFlash drafters; this is a {type(model).__name__}.")
        model.limit_context(window)
    if bits is not None:
        quantize_drafter(model, bits)
        _to_wide_dtype(model)
        mx.eval(model.parameters())
    return model


def _load(path_or_hub_name: str | Path) -> Any:
    """The drafter as stored in its files."""
    if isinstance(path_or_hub_name, str) and needs_no_files(path_or_hub_name):
        return make(drafters, path_or_hub_name)
    path = resolve_checkpoint(path_or_hub_name)
    _refuse_run(path)
    values = read_json(path / "config.json")
    if is_language_model(values):
        return AutoregressiveDrafter(load_target(path))
    cls = drafter_class(kind_in(values))
    _refuse_mask_embedding(path)
    own_tables = getattr(cls, "own_tables", ())
    weights = published_weights(read_safetensors(path), path, own_tables)
    config = cls.config_class.from_dict(_with_head_dim(values, weights))
    model = cls(config)
    ids = reduced_vocabulary(weights, config.draft_vocab_size, config.vocab_size, path, own_tables)
    if ids is not None:
        model.reduce_vocabulary(ids, own_head=any(name.startswith(HEAD) for name in weights))
    if own_tables:
        model.keep_tables({name.partition(".")[0] for name in weights})
    load_weights(model, weights, values, path)
    _to_wide_dtype(model)
    mx.eval(model.parameters())
    return model


def save_drafter(model: Any, path: str | Path, dtype: mx.Dtype = mx.bfloat16) -> None:
    """Write ``model`` to the folder ``path`` in the published format; each file is written whole or not at all.

    Weights are written in ``dtype``, quantised layers without loss; ``config.json`` then describes their
    ``quantization``.

    Raises ``CheckpointError`` if the class is not registered (:func:`~dflash.register_drafter`), ``OSError`` if the
    folder cannot be written to or the disk is full.
    """
    path, config = Path(path), config_of(model) | {"dtype": str(dtype).removeprefix("mlx.core.")}
    quantization = description(model)
    if quantization is not None:
        config |= {"quantization": quantization, "quantization_config": quantization}
    weights = _stored(flat(model.parameters()), dtype)
    ids = getattr(model, "token_ids", None)
    if ids is not None:
        weights |= vocabulary_tables(ids, model.config.vocab_size)
    write_arrays(path / "model.safetensors", weights, metadata={"format": "pt"})
    write_json(path / "config.json", config)


def _stored(weights: Weights, dtype: mx.Dtype) -> Weights:
    """The weights to write: quantised layers without loss, all others in ``dtype``."""

    def stored(name: str, w: mx.array) -> mx.array:
        if not mx.issubdtype(w.dtype, mx.floating):
            return w
        rounded = w.astype(dtype)
        layer, _, part = name.rpartition(".")
        packed = part in ("scales", "biases") and f"{layer}.scales" in weights
        return w if packed and not mx.array_equal(rounded.astype(w.dtype), w).item() else rounded

    return {name: stored(name, w) for name, w in weights.items()}


def _refuse_run(path: Path) -> None:
    """Refuse a run of ``dflash train``, which holds a config and weights too, but not as a checkpoint."""
    if not (path / "recipe.json").exists():
        return
    inside = path / "drafter"
    found = (inside / "config.json").exists()
    where = f"its drafter is {inside}" if found else f"make its drafter with: dflash export {path} {inside}"
    raise CheckpointError(f"{path} is a run; {where}")


def _refuse_mask_embedding(path: Path) -> None:
    """Refuse a mask embedding in a file of its own: no index lists it, and it would change every draft."""
    for file in path.glob("mask_embedding*"):
        raise CheckpointError(f"{file} is not supported; it means a mask embedding of the drafter's own.")


def _with_head_dim(values: dict[str, Any], weights: Weights) -> dict[str, Any]:
    """``values`` with the head size; if the config does not name it, it is the size of a head's norm."""
    sections = [values, *map(values.get, ("text_config", "transformer_layer_config", "dflash_config"))]
    norm = weights.get("layers.0.self_attn.q_norm.weight")
    if norm is None or any(isinstance(section, dict) and section.get("head_dim") for section in sections):
        return values
    return values | {"head_dim": norm.size}


def _to_wide_dtype(model: Any) -> None:
    to_compute_dtype(model)
    if compute_dtype(mx.float16) == mx.float16:
        model.apply(lambda w: w.astype(mx.bfloat16) if w.dtype == mx.float16 else w)
