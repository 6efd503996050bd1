"""The kinds of drafters by name: the published ones, and those that other packages register.

Knows how a ``config.json`` names its kind. Must not know weights, targets or how any kind drafts.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..core.errors import CheckpointError
from ..core.registry import Registry
from .checkpoints.formats import signs

T = TypeVar("T", bound=type)

DEFAULT = "dflash"
KIND = "drafter_kind"
"""The key of ``config.json`` that names the kind; absent in published files, which are of the kind ``"dflash"``."""

_DRAFTER_KEYS = ("dflash_config", "speculators_config", "target_layer_ids", "num_target_layers", "mask_token_id")

drafters: Registry[type] = Registry("drafter", "dflash.drafters")


def register_drafter(kind: str) -> Callable[[T], T]:
    """Decorator: ``config.json``, recipes and the command line know this class of drafters as ``kind``.

    The class is a subclass of :class:`~dflash.drafters.dflash.DFlashDraftModel`, or an ``mlx.nn.Module`` that follows
    :class:`~dflash.drafters.protocol.Drafter`, is made from its config alone, and has two attributes: ``config`` and,
    on the class, ``config_class``. That is :class:`~dflash.DFlashConfig`, or a frozen dataclass
    derived from it whose further fields (with defaults) are the kind's own options in ``config.json``. Where published
    files of the kind name it in their own way, a class method ``recognises(signs) -> bool`` says so
    (:func:`~dflash.drafters.checkpoints.formats.signs`).

    A package announces its kinds under the entry-point group ``dflash.drafters``. Raises ``TypeError`` unless
    ``kind`` is a name.
    """
    return drafters.register(kind)  # type: ignore[return-value]


def drafter_class(kind: str) -> type[Any]:
    """The class that is registered as ``kind``. Raises ``DFlashError`` where none is."""
    return drafters.get(kind)


def kind_of(model: object) -> str:
    """The name under which the class of ``model`` is registered.

    Raises ``CheckpointError`` for a class that nothing could load again.
    """
    found = [name for name, known in drafters.all().items() if known is type(model)]
    if not found:
        name = type(model).__name__
        raise CheckpointError(
            f'{name} is not registered, so what is saved could not be loaded; put @register_drafter("...") on it.'
        )
    return found[0]


def config_of(model: Any) -> dict[str, Any]:
    """``config.json`` of ``model``: its config, and its kind unless that is the published one.

    Raises ``CheckpointError`` as :func:`kind_of` does.
    """
    kind, config = kind_of(model), model.config.to_dict()
    return config if kind == DEFAULT else config | {KIND: kind, "architectures": [type(model).__name__]}


def kind_in(config: Mapping[str, Any]) -> str:
    """The kind that a ``config.json`` names by ``drafter_kind``, else by ``model_type`` or ``architectures``.

    What names none is of the first kind that recognises it by its keys, else of the kind ``"dflash"``.

    Raises ``CheckpointError`` if ``drafter_kind`` names one that is not registered.
    """
    known = drafters.all()
    explicit = config.get(KIND)
    if explicit is not None:
        if drafters.find(str(explicit)) is None and explicit != DEFAULT:
            raise CheckpointError(
                f"config.json: {KIND} {explicit!r} is not registered here; {drafters.advice(str(explicit))}"
            )
        return str(explicit)
    names = [config.get("model_type"), *_architectures(config)]
    named = next((name for name in names if isinstance(name, str) and name in known), None)
    if named is not None:
        return named
    found = signs(config)
    return next(
        (name for name, kind in known.items() if hasattr(kind, "recognises") and kind.recognises(found)), DEFAULT
    )


def _architectures(config: Mapping[str, Any]) -> list[Any]:
    named = config.get("architectures")
    return [named] if isinstance(named, str) else named if isinstance(named, list) else []


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` has a key by which drafters are known, or is of a kind of them."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    return any(key in part for part in parts for key in (KIND, *_DRAFTER_KEYS)) or kind_in(config) != DEFAULT


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a whole language model, which can draft by itself, one token after another.

    It names such an architecture, or none beside its ``model_type``, and has no key by which drafters are known.
    """
    if is_drafter(config):
        return False
    names = _architectures(config)
    whole = any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in names)
    return whole or (not names and "model_type" in config)
