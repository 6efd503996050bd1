"""The registry of drafter kinds, and how a ``config.json`` names its kind."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..core.errors import CheckpointError
from ..core.registry import Registry
from .checkpoints.formats import as_names, signs

T = TypeVar("T", bound=type)

DEFAULT = "dflash"
KIND = "drafter_kind"
"""The key of ``config.json`` that names the kind; published files lack it."""

_DRAFTER_KEYS = ("dflash_config", "speculators_config", "target_layer_ids", "num_target_layers", "mask_token_id")

drafters: Registry[type] = Registry("drafter", "dflash.drafters", ours=["dflash.drafters"])


def register_drafter(kind: str) -> Callable[[T], T]:
    """Class decorator: register a drafter class as ``kind``, for ``config.json``, recipes and the command line.

    A class that follows :class:`~dflash.drafters.protocol.Drafter` and has no ``config_class`` needs no files: its name
    alone makes it, with the options that follow the name (``ngram:block_size=8``) as keywords of its constructor.

    Any other is a subclass of :class:`~dflash.drafters.dflash.DFlashDraftModel`, or an ``mlx.nn.Module`` that follows
    :class:`~dflash.drafters.protocol.Drafter` and is constructed from its config alone. It has an attribute ``config``
    and a class attribute ``config_class``: :class:`~dflash.DFlashConfig`, or a frozen dataclass derived from it whose
    further fields (with defaults) are the kind's own options in ``config.json``. If published files name the kind
    in another way, a class method ``recognises(signs) -> bool`` identifies them
    (:func:`~dflash.drafters.checkpoints.formats.signs`).

    A package announces its kinds under the entry-point group ``dflash.drafters``. Raises ``TypeError`` unless
    ``kind`` is a name.
    """
    return drafters.register(kind)  # type: ignore[return-value]


def drafter_class(kind: str) -> type[Any]:
    """The class registered as ``kind``. Raises ``DFlashError`` for an unknown kind, and for one that needs no files."""
    if needs_no_files(kind):
        raise CheckpointError(f"The drafter {kind!r} needs no files and no training; give its name: --drafter {kind}.")
    return drafters.get(kind)


def needs_no_files(name: str) -> bool:
    """Whether ``name``, with or without options, is that of a drafter that is made without a config and weights."""
    known = drafters.find(name.partition(":")[0])
    return known is not None and not hasattr(known, "config_class")


def kind_of(model: object) -> str:
    """The kind of ``model``. Raises ``CheckpointError`` if its class is not registered, and so could not be loaded."""
    found = [name for name, known in drafters.all().items() if known is type(model)]
    if not found:
        name = type(model).__name__
        raise CheckpointError(
            f'{name} is not registered, so a saved one could not be loaded; put @register_drafter("...") on it.'
        )
    return found[0]


def config_of(model: Any) -> dict[str, Any]:
    """The ``config.json`` of ``model``: config, and kind unless it is ``"dflash"``. Raises as :func:`kind_of`."""
    kind, config = kind_of(model), model.config.to_dict()
    return config if kind == DEFAULT else config | {KIND: kind, "architectures": [type(model).__name__]}


def kind_in(config: Mapping[str, Any]) -> str:
    """The kind of a ``config.json``: by ``drafter_kind``, else by ``model_type`` or ``architectures``.

    A config that names none belongs to the first kind that recognises its keys, else to ``"dflash"``. Raises
    ``CheckpointError`` if ``drafter_kind`` is not registered.
    """
    known = drafters.all()
    explicit = config.get(KIND)
    if explicit is not None:
        if drafters.find(str(explicit)) is None and explicit != DEFAULT:
            raise CheckpointError(
                f"config.json: {KIND} {explicit!r} is not registered here; {drafters.advice(str(explicit))}"
            )
        return str(explicit)
    names = [config.get("model_type"), *as_names(config.get("architectures"))]
    named = next((name for name in names if isinstance(name, str) and name in known), None)
    if named is not None:
        return named
    found = signs(config)
    return next(
        (name for name, kind in known.items() if hasattr(kind, "recognises") and kind.recognises(found)), DEFAULT
    )


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` belongs to a drafter: it has a key that only drafters have, or another kind's sign."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    return any(key in part for part in parts for key in (KIND, *_DRAFTER_KEYS)) or kind_in(config) != DEFAULT


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` belongs to a whole language model, which can draft token by token.

    It names such an architecture, or only a ``model_type``, and is no drafter's.
    """
    if is_drafter(config):
        return False
    names = as_names(config.get("architectures"))
    whole = any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in names)
    return whole or (not names and "model_type" in config)
