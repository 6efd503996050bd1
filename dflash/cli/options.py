"""Parameters of commands, made from the records that state each option, with the checks of a command line."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..core.errors import DataError, DFlashError
from ..models import ModelOptions
from ..options import ANSWERS, DecodeOptions

MAX_TOKENS = 512
LARGEST_SEED = 2**64 - 1
TEMPLATE_CONFIG = '{"enable_thinking": false}'


# --- checks, made as options are read ------------------------------------------------------------------


def not_empty(ctx: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Refuse an option that was given as an empty text, as an unset shell variable gives it."""
    values = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(v, str) and not v.strip() for v in values):
        raise DFlashError(f"{parameter.opts[0]} is empty; give a value, or leave the option out.")
    return value


def is_text(ctx: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Refuse an argument whose bytes are not text in the terminal's encoding."""
    for text in value if isinstance(value, list | tuple) else [value]:
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise DFlashError(f"{_shown(parameter)} is not UTF-8 text (character {error.start + 1}).") from error
    return value


def stop_strings(ctx: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Refuse an empty stop string, and one that is not text."""
    if any(not text for text in value or ()):
        raise DFlashError("--stop must not be empty: every text contains the empty text.")
    return is_text(ctx, parameter, value)


def seed_in_range(ctx: typer.Context, parameter: typer.CallbackParam, value: int | None) -> int | None:
    """Refuse a seed that MLX's random state cannot hold."""
    if value is not None and not 0 <= value <= LARGEST_SEED:
        raise DFlashError(f"--seed must be a whole number from 0 to {LARGEST_SEED}, got {value}.")
    return value


def in_a_folder(ctx: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuse a file to be written whose folder is not there: most such paths are mistyped."""
    if value is not None and not value.parent.is_dir():
        raise DFlashError(f"{parameter.opts[-1]} {value}: there is no folder {value.parent}; make it, or name another.")
    return value


def can_be_made(ctx: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuse a path below a file, where no folder can be made."""
    there = next((path for path in value.parents if path.exists()), None) if value is not None else None
    if there is not None and not there.is_dir():
        raise DFlashError(f"{_shown(parameter)} {value}: {there} is a file, not a folder; name another place.")
    return value


def existing_cache(ctx: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Refuse a prompt cache that is not there."""
    if value is not None and not Path(value).is_file():
        raise DFlashError(f"{parameter.opts[0]}: {value} is no prompt cache; there is no such file.")
    return value


def new_cache(ctx: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """Refuse a prompt cache to be written whose folder is not there, or that mlx-lm would not read."""
    if Path(value).suffix != ".safetensors":
        raise DFlashError(f"{parameter.opts[0]}: a prompt cache is a .safetensors file, got {value!r}.")
    return str(in_a_folder(ctx, parameter, Path(value)))


def a_picture(ctx: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuse a picture whose name does not tell its kind."""
    if value is not None and value.suffix not in (".svg", ".png", ".pdf"):
        raise DFlashError(f"{parameter.opts[-1]} must end in .svg, .png or .pdf, got {value}.")
    return in_a_folder(ctx, parameter, value)


def new_trace(ctx: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuse a trace that would replace one, which may have taken hours."""
    if value is not None:
        require_new(value)
    return in_a_folder(ctx, parameter, value)


def require_new(trace: Path) -> None:
    """Raise ``DFlashError`` if the trace is there already."""
    if trace.is_file() and trace.stat().st_size:
        raise DFlashError(f"--trace {trace} exists and is not empty; remove it, or name another file.")


def two_positions(ctx: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Refuse a block of the anchor alone, which drafts nothing."""
    for size in value if isinstance(value, list | tuple) else [value]:
        if size is not None and size < 2:
            raise DFlashError(f"{parameter.opts[0]} must be at least 2, the anchor and one draft; got {size}.")
    return value


def _shown(parameter: typer.CallbackParam) -> str:
    name = parameter.opts[0]
    return name if name.startswith("-") else f"The {name}"


# --- from records to parameters ------------------------------------------------------------------------


def json_object(text: str | None, option: str, example: str = TEMPLATE_CONFIG) -> dict[str, Any]:
    """A JSON object given on the command line. Raises ``DataError`` for anything else."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise DataError(f"{option} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise DataError(f"{option} must be a JSON object such as {example}, got {text}.")
    return value


def _logit_bias(text: str) -> dict[int, Any]:
    bias = json_object(text, "--logit-bias", '{"7": -100}')
    unknown = next((token for token in bias if not token.isdecimal()), None)
    if unknown is not None:
        raise DFlashError(f"--logit-bias must name token ids, got {unknown!r}.")
    return {int(token): value for token, value in bias.items()}


_CHECKS = {
    "block_size": two_positions,
    "prefill_response": is_text,
    "prompt_cache": existing_cache,
    "seed": seed_in_range,
    "stop_strings": stop_strings,
    "system": is_text,
    "trace": new_trace,
}
"""By the name of a field; any other text must not be empty."""

_READ: dict[str, Callable[[str], Any]] = {
    "chat_template_config": lambda text: json_object(text, "--chat-template-config"),
    "logit_bias": _logit_bias,
    "policy": lambda text: int(text) if text.removeprefix("-").isdecimal() else text,
}
"""What a field's text on the command line stands for."""


def option_of(record: type, name: str) -> Any:
    """The typer option of the field ``name`` of ``record``."""
    return _option(next(field for field in fields(record) if field.name == name), {})


def _option(field: "Field[Any]", changed: Mapping[str, Any]) -> Any:
    known = field.metadata
    check = _CHECKS.get(field.name, not_empty if known["kind"] in (str, list[str]) else None)
    given = {"help": known["meaning"], "metavar": known["metavar"], "callback": check} | dict(changed)
    return typer.Option(*flags_of(field), **given)


def flag_of(field: "Field[Any]") -> str:
    """What an option is called on the command line."""
    return field.metadata["flag"] or _as_flag(field.name)


def flags_of(field: "Field[Any]") -> list[str]:
    """The same, and all other names there."""
    return list(dict.fromkeys([flag_of(field), *map(_as_flag, field.metadata["also"])]))


def _as_flag(name: str) -> str:
    return name if "-" in name else f"--{name.replace('_', '-')}"


def answer(error: Exception) -> str | None:
    """What to do in place of an option that mlx_lm.generate has and DFlash has not, if that is the ``error``."""
    option = getattr(error, "option_name", "")
    known = ANSWERS.get(option.lstrip("-").replace("-", "_"))
    return None if known is None else f"{option} is not here: {known}"


class Group(NamedTuple):
    """Parameters of a command line that a command receives as one value, which ``make`` builds."""

    parameters: list[inspect.Parameter]
    make: Callable[..., Any]


def group(
    record: type,
    *only: str,
    without: Sequence[str] = (),
    default: Mapping[str, Any] | None = None,
    **changed: Mapping[str, Any],
) -> Group:
    """The fields of ``record``, or ``only`` some of them, as parameters that come back as a ``record``.

    Args:
        record: A dataclass whose fields are made by :func:`~dflash.core.option.option`.
        only: Names of the fields to take; by default all.
        without: Names of fields to leave out.
        default: Values, by field, of what is not given.
        changed: Arguments of ``typer.Option``, by field, that this command states differently.
    """
    chosen = {_parameter_name(f): f for f in fields(record) if f.name in (only or (f.name,)) and f.name not in without}
    defaults = {name: (default or {}).get(field.name) for name, field in chosen.items()}

    def make(**values: Any) -> Any:
        found = {}
        for name, field in chosen.items():
            value = defaults[name] if values[name] is None else values[name]
            found[field.name] = _READ[field.name](value) if field.name in _READ and value is not None else value
        return record(**found)

    def parameter(name: str, field: "Field[Any]") -> inspect.Parameter:
        kind, value = field.metadata["kind"], field.default if defaults[name] is None else defaults[name]
        if kind not in (int, float, bool) or value is None:  # the help says what happens by default
            kind, value = kind | None, None
        typed: Any = Annotated[kind, _option(field, changed.get(field.name, {}))]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=typed)

    parameters = [parameter(name, field) for name, field in chosen.items()]
    return Group(parameters, make)


def _parameter_name(field: "Field[Any]") -> str:
    return flag_of(field).partition("/")[0].lstrip("-").replace("-", "_")


def grouped(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take each of ``groups`` as one parameter of that name, and as its options on the command line.

    A command with a parameter ``asked`` gets a dict of all that was asked for, by the names of the parameters.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        parameters = []
        for name, parameter in own.items():
            as_keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)] if name != "asked" else []
            parameters += groups[name].parameters if name in groups else as_keyword

        def run(**values: Any) -> None:
            asked = {"asked": dict(values)} if "asked" in own else {}
            for name, group in groups.items():
                values[name] = group.make(**{p.name: values.pop(p.name) for p in group.parameters})
            command(**values, **asked)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


# --- options of their own ------------------------------------------------------------------------------

Prompt = Annotated[
    str | None,
    typer.Argument(help="The request; - reads it from standard input.", callback=is_text, show_default=False),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        help=r"The same as mlx_lm takes it: \n and \t stand for white space.",
        callback=is_text,
    ),
]
TrustRemoteCode = Annotated[bool, option_of(ModelOptions, "trust_remote_code")]
RunSeed = Annotated[int, option_of(DecodeOptions, "seed")]
Prompts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.jsonl|FOLDER|HUB",
        help='Lines such as {"prompt": "..."} or {"messages": [...]}, or what a dataset holds out. '
        "Default: held-out requests of the bundled models.",
        callback=not_empty,
    ),
]
Template = Annotated[
    str | None, typer.Option(help="Makes the prompt from a line's keys: 'Question: {question}'.", callback=is_text)
]
Begin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="Words to begin requests with, in turn; '' for none. Repeatable.", callback=is_text
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting of the recipe; repeatable."),
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Take only the first N prompts.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
