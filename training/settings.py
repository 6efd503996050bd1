"""Recipe files: YAML into dataclasses, checked once, where they enter.

Knows dataclasses and YAML. Must not know what any setting means.
"""

import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


class SettingsError(ValueError):
    """A recipe names an unknown key, lacks one, or holds a value of the wrong type."""


def load_settings(cls: type[T], path: Path) -> T:
    """Read a YAML file into the dataclass ``cls``. Raises :class:`SettingsError`, naming file and key."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(f"There is no recipe at {path}.") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from error
    return from_dict(cls, values, str(path))


def from_dict(cls: type[T], values: Any, where: str) -> T:
    """Build the dataclass ``cls`` from nested dicts; ``where`` names the place in error messages."""
    if not isinstance(values, dict):
        raise SettingsError(f"{where}: expected keys and values, got {values!r}.")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            near = difflib.get_close_matches(str(name), list(fields), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}."
            raise SettingsError(f"{where}: unknown key {name!r}; {hint}")
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SettingsError(f"{where}: {', '.join(missing)} missing.")
    hints = typing.get_type_hints(cls)
    return cls(**{name: _convert(hints[name], value, f"{where}: {name}") for name, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], item, where) for item in value)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise SettingsError(f"{where} must be of type {getattr(hint, '__name__', hint)}, got {value!r}.")
    return value
