"""Recipe files: YAML into dataclasses, checked once, where they enter.

Knows dataclasses and YAML. Must not know what any setting means.

A dataclass may refuse values that do not go together by raising :class:`SettingsError` in ``__post_init__``;
the place is put in front. A field that is a union of dataclasses is chosen by their ``kind``, the first
without one.
"""

import dataclasses
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dflash.errors import DFlashError, did_you_mean

T = TypeVar("T")


class SettingsError(DFlashError):
    """A recipe names an unknown key, lacks one, or holds a value that cannot be."""


def load_settings(cls: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file into the dataclass ``cls``; ``overrides`` are ``key.sub=value`` with YAML values.

    Raises :class:`SettingsError`, naming file and key.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        raise SettingsError(f"Cannot read the recipe {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    for override in overrides:
        _override(values, override)
    return from_dict(cls, values, str(path))


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML's safe loader, which by itself takes the last of equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in reversed(node.value):
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


def to_dict(settings: Any) -> dict[str, Any]:
    """Plain data (for JSON and YAML) of which :func:`from_dict` makes the same dataclass again."""
    return typing.cast("dict[str, Any]", _plain(dataclasses.asdict(settings)))


def from_dict(cls: type[T], values: Any, where: str) -> T:
    """Build the dataclass ``cls`` from nested dicts; ``where`` names the place in error messages."""
    if not isinstance(values, dict):
        raise SettingsError(f"{where}: expected keys and values, got {values!r}.")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise SettingsError(f"{where}: unknown key {name!r}; {did_you_mean(name, fields)}")
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SettingsError(f"{where}: {', '.join(missing)} missing.")
    hints = typing.get_type_hints(cls)
    converted = {name: _convert(hints[name], value, f"{where}: {name}") for name, value in values.items()}
    try:
        return cls(**converted)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from error


def require(condition: bool, message: str) -> None:
    """Raise :class:`SettingsError` unless ``condition``; for ``__post_init__``."""
    if not condition:
        raise SettingsError(message)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return value
    if origin is typing.Literal:
        if value not in arguments:
            raise SettingsError(f"{where} is {value!r}; {did_you_mean(value, arguments)}")
        return value
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, where)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 6e-4 as text
        try:
            return float(value)
        except ValueError:
            pass
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if origin is not None or not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        expected = getattr(hint, "__name__", hint)
        raise SettingsError(f"{where} must be of type {expected}, got {value!r}.")
    return value


def _convert_union(members: tuple[Any, ...], value: Any, where: str) -> Any:
    """``None`` where allowed, the dataclass that ``kind`` names, or the first simple type that ``value`` fits."""
    if value is None and type(None) in members:
        return None
    choices = [m for m in members if m is not type(None)]
    kinds = {
        f.default: m for m in choices if dataclasses.is_dataclass(m) for f in dataclasses.fields(m) if f.name == "kind"
    }
    if kinds and isinstance(value, dict):
        kind = value.get("kind", next(iter(kinds)))
        if kind not in kinds:
            raise SettingsError(f"{where}: kind is {kind!r}; {did_you_mean(kind, kinds)}")
        return _convert(kinds[kind], value, where)
    for choice in choices[:-1]:
        try:
            return _convert(choice, value, where)
        except SettingsError:
            continue
    return _convert(choices[-1], value, where)


def _override(values: Any, override: str) -> None:
    """Set one ``key.sub=value`` in nested dicts, in place."""
    path, equals, text = override.partition("=")
    *parents, name = path.strip().split(".")
    if not equals or not name or not all(parents):
        raise SettingsError(f"--set {override}: expected key.sub=value.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"--set {override}: the value is not valid YAML.") from error
    for parent in parents:
        if isinstance(values, dict):
            values = values.setdefault(parent, {})
    if not isinstance(values, dict):
        raise SettingsError(f"--set {override}: {'.'.join(parents) or 'the recipe'} holds no keys.")
    values[name] = value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value
