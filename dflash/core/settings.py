"""Recipe files: YAML into dataclasses, checked once, where they enter.

A field made by :func:`setting` has a meaning and limits, and a dataclass that derives from :class:`Checked` checks its
values against them whenever one is made. Rules that involve several fields are in ``__post_init__``, by
:func:`require`. In a union of dataclasses the key ``kind`` chooses one, by default the first. A field named after a
word of Python ends in an underscore that its key does not have: ``from_`` is ``from``.
"""

import dataclasses
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dflash.core.errors import DFlashError, did_you_mean

T = TypeVar("T")


class SettingsError(DFlashError):
    """A recipe names an unknown key, lacks one, or holds an impossible value."""


# --- declaring ----------------------------------------------------------------------------------------------


def setting(
    default: Any = dataclasses.MISSING,
    meaning: str = "",
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    factory: Any = dataclasses.MISSING,
    kw_only: Any = dataclasses.MISSING,
) -> Any:
    """A dataclass field with its meaning and the limits of its value; ``None`` is within all limits."""
    limits = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    metadata = {"meaning": meaning, "limits": {words: limit for words, limit in limits.items() if limit is not None}}
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata, kw_only=kw_only)
    return dataclasses.field(default=default, metadata=metadata, kw_only=kw_only)


class Checked:
    """Base of dataclasses whose values are within the limits of their fields."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, limits = getattr(self, field.name), field.metadata.get("limits", {})
            if value is not None and limits and not all(_within(value, words, limits[words]) for words in limits):
                expected = " and ".join(f"{words} {limit}" for words, limit in limits.items())
                raise SettingsError(f"{key_of(field)} must be {expected}, got {value}.")


def _within(value: Any, words: str, limit: float) -> bool:
    return bool(
        {"above": value > limit, "at least": value >= limit, "below": value < limit, "at most": value <= limit}[words]
    )


def require(condition: bool, message: str) -> None:
    """Raise :class:`SettingsError` unless ``condition``; for ``__post_init__``."""
    if not condition:
        raise SettingsError(message)


def key_of(field: "dataclasses.Field[Any]") -> str:
    """The key of a field in recipes."""
    return field.name.removesuffix("_")


@dataclasses.dataclass(frozen=True)
class SettingHelp:
    """One line of help: the key, what it may be, its default as YAML (``None`` where it must be given)."""

    key: str
    type: str
    default: str | None
    meaning: str


def settings_help(cls: type, prefix: str = "") -> list[SettingHelp]:
    """Every setting of the dataclass ``cls``, those of nested dataclasses by their dotted keys.

    A union of dataclasses lists every member, with its ``kind`` first.
    """
    lines: list[SettingHelp] = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = f"{prefix}{key_of(field)}", hints[field.name]
        nested = [h for h in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(h)]
        for member in nested:
            lines += settings_help(typing.cast(type, member), f"{key}.")
        if not nested:
            lines.append(SettingHelp(key, _type_name(hint), _default_of(field), field.metadata.get("meaning", "")))
    return lines


def _type_name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if a is type(None) else _type_name(a) for a in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", dict: "keys and values"}
    return names.get(origin or hint, str(hint))


def _default_of(field: "dataclasses.Field[Any]") -> str | None:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return None
    return yaml.safe_dump(to_dict(value), default_flow_style=True).partition("\n")[0]


# --- reading ------------------------------------------------------------------------------------------------


def load_settings(cls: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file into the dataclass ``cls``; ``overrides`` are ``key.sub=value`` with YAML values.

    Raises :class:`SettingsError`, naming file and key.
    """
    return from_yaml(cls, _read_text(path, cls.__name__.lower()), str(path), overrides)


def load_values(path: Path) -> Any:
    """Plain values of a recipe, unchecked. Raises :class:`SettingsError` if it cannot be read or parsed."""
    return _parse(_read_text(path, "recipe"), str(path))


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"Cannot read the {what} {path}: {reason}.") from error


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise SettingsError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def from_yaml(cls: type[T], text: str, where: str, overrides: Sequence[str] = ()) -> T:
    """As :func:`load_settings`, from a text; ``where`` names it in error messages."""
    values = _parse(text, where)
    for override in overrides:
        _override(values, override)
    return from_dict(cls, values, where)


def with_overrides(settings: T, overrides: Sequence[str], where: str) -> T:
    """``settings``, a dataclass, with ``overrides`` as in :func:`load_settings`; ``where`` names it in errors."""
    values = to_dict(settings)
    for override in overrides:
        _override(values, override)
    return from_dict(type(settings), values, where)


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


def to_dict(settings: Any) -> Any:
    """Plain data (for JSON and YAML) from which :func:`from_dict` makes the same dataclass again."""
    if dataclasses.is_dataclass(settings):
        return {key_of(field): to_dict(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
    if isinstance(settings, dict):
        return {key: to_dict(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [to_dict(value) for value in settings]
    return str(settings) if isinstance(settings, Path) else settings


def from_dict(cls: type[T], values: Any, where: str) -> T:
    """Build the dataclass ``cls`` from nested dicts; ``where`` names the place in error messages."""
    if not isinstance(values, dict):
        raise SettingsError(f"{where}: expected keys and values, got {values!r}.")
    fields = {key_of(field): field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise SettingsError(f"{where}: unknown key {key!r}; {did_you_mean(key, fields)}")
    missing = [
        key
        for key, field in fields.items()
        if key not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SettingsError(f"{where}: {', '.join(missing)} missing.")
    hints = typing.get_type_hints(cls)
    converted = {
        fields[key].name: _convert(hints[fields[key].name], value, f"{where}: {key}") for key, value in values.items()
    }
    try:
        return cls(**converted)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from error


def with_defaults(cls: type, values: Any) -> Any:
    """Plain data of an older ``cls``, with the defaults of the keys that it lacks; unknown keys stay."""
    if not isinstance(values, dict):
        return values
    filled, hints = dict(values), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = key_of(field), hints[field.name]
        if key not in filled:
            if field.default is not dataclasses.MISSING:
                filled[key] = to_dict(field.default)
            elif field.default_factory is not dataclasses.MISSING:
                filled[key] = to_dict(field.default_factory())
        elif member := _member_for(hint, filled[key]):
            filled[key] = with_defaults(member, filled[key])
    return filled


def _member_for(hint: Any, value: Any) -> type | None:
    """The dataclass whose plain data ``value`` is, if ``hint`` is one, or a union with one of its kind."""
    members = [m for m in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(m)]
    kind = value.get("kind") if isinstance(value, dict) else None
    of_kind = [m for m in members for f in dataclasses.fields(m) if f.name == "kind" and f.default == kind]
    return typing.cast("type | None", next(iter([*of_kind, *members]), None))


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
