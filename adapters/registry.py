"""The registry of adapters by mlx-lm ``model_type``, extended by the entry-point group ``dflash.adapters``."""

from collections.abc import Callable

import mlx.nn as nn

from dflash.core.errors import IncompatibleModelsError
from dflash.core.registry import Registry

from .base import TargetAdapter
from .generic import GenericAdapter

ADAPTERS: Registry[type[TargetAdapter]] = Registry("adapter", "dflash.adapters")
"""By ``model_type``. An entry point is a module to import, or an adapter class named after its ``model_type``."""


def register_adapter(*model_types: str) -> Callable[[type[TargetAdapter]], type[TargetAdapter]]:
    """Class decorator: register an adapter for the given mlx-lm ``model_type`` names.

    Raises ``TypeError`` without names: ``@register_adapter`` must be called.
    """
    return ADAPTERS.register(*model_types)


def registered_adapters() -> dict[str, type[TargetAdapter]]:
    """All known ``model_type`` names with their adapter classes, sorted by name."""
    return ADAPTERS.all()


def adapter_for_model_type(model_type: str) -> type[TargetAdapter]:
    """The adapter class registered for ``model_type``.

    Raises ``IncompatibleModelsError`` for an architecture without one.
    """
    found = ADAPTERS.find(model_type)
    if found is None:
        raise IncompatibleModelsError(
            f"No adapter for model_type {model_type!r}. Known: {', '.join(ADAPTERS.all())}. "
            "Write one with dflash.adapters.register_adapter."
        )
    return found


def detect_model_architecture(model: nn.Module) -> str:
    """The ``model_type`` of a loaded mlx-lm model. Raises ``IncompatibleModelsError`` if it has none."""
    model_type = getattr(model, "model_type", None)
    if not isinstance(model_type, str):
        raise IncompatibleModelsError(f"{type(model).__name__} has no model_type; expected a model loaded by mlx_lm.")
    return model_type


def find_adapter(model: nn.Module) -> TargetAdapter:
    """The adapter of a loaded mlx-lm model: its family's, or the generic one.

    The parts that the generic one found are not tried here: :class:`~dflash.LoadedTargetModel` does.

    Raises ``IncompatibleModelsError`` if parts are not found, and ``DFlashError`` if the package that announces this
    ``model_type`` cannot be loaded.
    """
    model_type = detect_model_architecture(model)
    found = ADAPTERS.find(model_type)
    if found is not None:
        return found(model)
    try:
        return GenericAdapter(model)
    except IncompatibleModelsError as error:
        raise generic_does_not_fit(model_type, str(error)) from error


def generic_does_not_fit(model_type: str, reason: str) -> IncompatibleModelsError:
    """The error for an architecture that needs an adapter of its own; it names packages that failed to load."""
    broken = "".join(f" {message}" for message in ADAPTERS.broken)
    return IncompatibleModelsError(
        f"model_type {model_type!r} has no adapter, and the generic one does not fit: {reason.rstrip('.')}. "
        f"Write an adapter with dflash.adapters.register_adapter.{broken}"
    )
