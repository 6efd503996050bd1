"""From an mlx-lm ``model_type`` to its adapter class.

Knows names only. Must not know what adapters do.
"""

from collections.abc import Callable

import mlx.nn as nn

from dflash.errors import IncompatibleModelsError

from .base import TargetAdapter

_ADAPTERS: dict[str, type[TargetAdapter]] = {}


def register_adapter(*model_types: str) -> Callable[[type[TargetAdapter]], type[TargetAdapter]]:
    """Class decorator: this adapter serves the given mlx-lm ``model_type`` names."""

    def register(adapter: type[TargetAdapter]) -> type[TargetAdapter]:
        _ADAPTERS.update(dict.fromkeys(model_types, adapter))
        return adapter

    return register


def registered_adapters() -> dict[str, type[TargetAdapter]]:
    """All known ``model_type`` names with their adapter classes, sorted by name."""
    return dict(sorted(_ADAPTERS.items()))


def adapter_for_model_type(model_type: str) -> type[TargetAdapter]:
    """The adapter class of ``model_type``.

    Raises :class:`~dflash.errors.IncompatibleModelsError` for an architecture without one.
    """
    if model_type not in _ADAPTERS:
        raise IncompatibleModelsError(
            f"No adapter for model_type {model_type!r}. Known: {', '.join(registered_adapters())}. "
            "Write one with dflash.adapters.register_adapter."
        )
    return _ADAPTERS[model_type]


def detect_model_architecture(model: nn.Module) -> str:
    """The ``model_type`` of a loaded mlx-lm model."""
    model_type = getattr(model, "model_type", None)
    if not isinstance(model_type, str):
        raise IncompatibleModelsError(f"{type(model).__name__} has no model_type; expected a model loaded by mlx_lm.")
    return model_type
