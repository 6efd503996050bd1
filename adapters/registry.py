"""From an mlx-lm ``model_type`` to its adapter class.

Knows names only, its own and those that other packages announce under the entry-point group
``dflash.adapters``. Must not know what adapters do.
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points

import mlx.nn as nn

from dflash.errors import IncompatibleModelsError

from .base import TargetAdapter
from .generic import GenericAdapter

ENTRY_POINTS = "dflash.adapters"
"""Entry-point group: a module to import, or an adapter class named after the ``model_type`` it serves."""

_ADAPTERS: dict[str, type[TargetAdapter]] = {}


def register_adapter(*model_types: str) -> Callable[[type[TargetAdapter]], type[TargetAdapter]]:
    """Class decorator: this adapter serves the given mlx-lm ``model_type`` names."""

    def register(adapter: type[TargetAdapter]) -> type[TargetAdapter]:
        _ADAPTERS.update(dict.fromkeys(model_types, adapter))
        return adapter

    return register


@cache
def _load_entry_points() -> None:
    """Import what other packages announce, once."""
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            loaded = entry.load()
        except Exception as error:
            raise IncompatibleModelsError(
                f"The adapter {entry.name!r} ({entry.value}) of another package cannot be loaded: "
                f"{type(error).__name__}: {error}. Repair or uninstall that package."
            ) from error
        if isinstance(loaded, type) and issubclass(loaded, TargetAdapter):
            _ADAPTERS.setdefault(entry.name, loaded)


def registered_adapters() -> dict[str, type[TargetAdapter]]:
    """All known ``model_type`` names with their adapter classes, sorted by name."""
    _load_entry_points()
    return dict(sorted(_ADAPTERS.items()))


def adapter_for_model_type(model_type: str) -> type[TargetAdapter]:
    """The adapter class registered for ``model_type``.

    Raises :class:`~dflash.errors.IncompatibleModelsError` for an architecture without one.
    """
    known = registered_adapters()
    if model_type not in known:
        raise IncompatibleModelsError(
            f"No adapter for model_type {model_type!r}. Known: {', '.join(known)}. "
            "Write one with dflash.adapters.register_adapter."
        )
    return known[model_type]


def detect_model_architecture(model: nn.Module) -> str:
    """The ``model_type`` of a loaded mlx-lm model."""
    model_type = getattr(model, "model_type", None)
    if not isinstance(model_type, str):
        raise IncompatibleModelsError(f"{type(model).__name__} has no model_type; expected a model loaded by mlx_lm.")
    return model_type


def find_adapter(model: nn.Module) -> TargetAdapter:
    """The adapter of a loaded mlx-lm model: its family's, else the generic one if that finds the model's parts.

    A generic adapter is believed only after the quick part of the conformance check.

    Raises :class:`~dflash.errors.IncompatibleModelsError` saying what the check found.
    """
    model_type = detect_model_architecture(model)
    known = registered_adapters()
    if model_type in known:
        return known[model_type](model)
    from .conformance import quick_failure  # a check of adapters needs targets, which need adapters

    try:
        adapter = GenericAdapter(model)
        failure = quick_failure(adapter)
    except IncompatibleModelsError as error:
        failure = str(error)
    if failure is not None:
        raise IncompatibleModelsError(
            f"model_type {model_type!r} has no adapter, and the generic one does not fit: {failure} "
            "Write an adapter with dflash.adapters.register_adapter."
        )
    return adapter
