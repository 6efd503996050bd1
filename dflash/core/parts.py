"""Parts by name with options: ``typical:epsilon=0.1,most=4`` names a registered part and two options of it."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .errors import DFlashError, did_you_mean, one_line
from .registry import Registry


@dataclass(frozen=True)
class Part:
    """The name of a registered part, and its options by their names."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> "Part":
        """What ``name:key=value,key=value`` says; a value is JSON, or YAML where it is no JSON.

        Raises :class:`DFlashError` for options in another form.
        """
        name, colon, rest = text.partition(":")
        options: dict[str, Any] = {}
        for part in re.split(r",(?=\s*\w+\s*=)", rest) if colon else ():  # a list's commas have no = after them
            key, _, value = (piece.strip() for piece in part.partition("="))
            if not key.isidentifier() or not value or value.endswith(",") or key in options:
                raise DFlashError(f"{text!r}: expected {name}:key=value,key=value with each key once, got {part!r}.")
            options[key] = _value(value)
        return cls(name, options)

    @classmethod
    def of(cls, given: str | Mapping[str, Any]) -> "Part":
        """From such a text, or from a study's ``{name: typical, options: {epsilon: 0.1}}``.

        Raises :class:`DFlashError` for other keys.
        """
        if isinstance(given, str):
            return cls.read(given)
        name, options = given.get("name"), given.get("options") or {}
        if not isinstance(name, str) or not isinstance(options, Mapping) or given.keys() - {"name", "options"}:
            raise DFlashError(f"expected a name, or {{name: NAME, options: {{KEY: VALUE}}}}, got {dict(given)}.")
        return cls(name, {str(key): _value(v) if isinstance(v, str) else v for key, v in options.items()})

    def __str__(self) -> str:
        """The text that :meth:`read` reads; equal options make equal texts."""
        shown = [f"{key}={_text(value)}" for key, value in sorted(self.options.items())]
        return f"{self.name}:{','.join(shown)}" if shown else self.name


def _value(text: str) -> Any:
    import yaml

    try:
        return json.loads(text)  # 1e-4 is a number here, and text in YAML 1.1
    except json.JSONDecodeError:
        pass
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float | list | dict | None) else text


def _text(value: Any) -> str:
    bare = isinstance(value, str) and "," not in value and _value(value.strip()) == value != ""
    return value if bare else json.dumps(value, default=str)  # YAML knows dates


def make(registry: Registry[Any], text: str) -> Any:
    """What the registered class or factory ``text`` makes of its options.

    Raises :class:`DFlashError`, in one line, for an unknown name, options that do not fit, and whatever it raises.
    """
    named = Part.read(text)
    factory, what = registry.get(named.name), f"{registry.what} {named.name!r}"
    check_options(what, factory, named.options)
    try:
        return factory(**named.options)
    except DFlashError:
        raise
    except Exception as error:  # another package's code: anything can happen
        raise DFlashError(f"The {what} cannot be made: {type(error).__name__}: {one_line(error)}") from error


def with_options(registry: Registry[Any], text: str, arguments: int) -> Any:
    """The function of ``arguments`` arguments that ``text`` names, its options given; of a class, what it makes.

    Raises :class:`DFlashError` as :func:`make` does.
    """
    named = Part.read(text)
    found, what = registry.get(named.name), f"{registry.what} {named.name!r}"
    if inspect.isclass(found):
        return make(registry, text)
    if named.options and callable(found) and not inspect.isroutine(found):  # its methods would be hidden by a partial
        raise DFlashError(f"The {what} is an object and takes no options; a class takes those of its constructor.")
    check_options(what, found, named.options, arguments)
    return partial(found, **named.options) if named.options else found


def check_options(what: str, part: Callable[..., Any], options: Mapping[str, Any], arguments: int = 0) -> None:
    """Raise :class:`DFlashError` unless ``part`` takes ``options`` as keywords beside its ``arguments`` others."""
    if not callable(part):
        raise DFlashError(f"The {what} is of type {type(part).__name__}; expected a class or a function.")
    try:
        signature = inspect.signature(part)
    except ValueError:  # compiled code; it tells when it is called
        return
    try:
        signature.bind(*[None] * arguments, **options)
    except TypeError as error:
        own = list(signature.parameters.values())[arguments:]
        known = {p.name: p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        unknown = [name for name in options if name not in known]
        missing = [name for name, p in known.items() if p.default is p.empty and name not in options]
        if unknown:
            hint = did_you_mean(unknown[0], known) if known else "it takes none."
            raise DFlashError(f"The {what} has no option {unknown[0]!r}; {hint}") from error
        fault = f"needs a value for its option {missing[0]!r}" if missing else f"cannot be called: {error}"
        raise DFlashError(f"The {what} {fault}.") from error
