"""DFlash drafter checkpoints in the published format, both ways.

Knows the format: ``config.json`` and safetensors with the published weight names. Must not know
targets or decoding.
"""

from pathlib import Path

import mlx.core as mx

from ..backend import to_compute_dtype
from ..errors import CheckpointError
from ..files import flat, read_json, read_safetensors, resolve_checkpoint, write_arrays, write_json
from .config import DFlashConfig
from .dflash import DFlashDraftModel


def load_drafter(path_or_hub_name: str | Path) -> DFlashDraftModel:
    """Load a drafter from a folder or a hub name.

    Raises :class:`~dflash.errors.CheckpointError` for missing or damaged files, unknown config keys, and
    weights that are missing, left over or of the wrong shape.
    """
    path = resolve_checkpoint(path_or_hub_name)
    config = DFlashConfig.from_dict(read_json(path / "config.json"))
    try:
        model = DFlashDraftModel(config)
    except (KeyError, TypeError, ValueError) as error:  # mlx-lm's rope knows its own options
        raise CheckpointError(f"{path}: rope_scaling {config.rope_scaling} cannot be used: {error}.") from error
    weights = read_safetensors(path)
    _check_weights(model, weights, path)
    model.load_weights(list(weights.items()))
    to_compute_dtype(model)
    mx.eval(model.parameters())
    return model


def save_drafter(model: DFlashDraftModel, path: str | Path, dtype: mx.Dtype = mx.bfloat16) -> None:
    """Write ``model`` to the folder ``path`` in the published format, each file whole or not at all.

    Raises ``OSError`` if the folder cannot be written to or the disk is full.
    """
    path = Path(path)
    weights = {name: w.astype(dtype) for name, w in flat(model.parameters()).items()}
    config = model.config.to_dict() | {"dtype": str(dtype).removeprefix("mlx.core.")}
    write_arrays(path / "model.safetensors", weights, metadata={"format": "pt"})
    write_json(path / "config.json", config)


def _check_weights(model: DFlashDraftModel, weights: dict[str, mx.array], path: Path) -> None:
    expected = {name: w.shape for name, w in flat(model.parameters()).items()}
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise CheckpointError(f"{path} lacks {_some(missing)}; the file does not match its config.json.")
    extra = sorted(weights.keys() - expected.keys())
    if extra:
        raise CheckpointError(f"{path} holds {_some(extra)}, unknown to a DFlash drafter of its config.json.")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise CheckpointError(f"{path}: {name} has shape {weights[name].shape}, config.json asks for {shape}.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
