"""The ``dflash`` command: options in, calls to the package, text, tables or JSON out.

Heavy modules are imported by the commands that need them.

Exit codes: 0, 1 for an error (one line on stderr), a difference or a failed check, 2 for wrong usage,
130 for Ctrl-C.
"""

import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..core.errors import DFlashError, StopTraining, one_line
from ..core.registry import plugin_error
from . import (
    adapt,
    adapters,
    bench,
    chat,
    data,
    decode,
    doctor,
    evaluate,
    fit,
    imports,
    prompt_cache,
    quantize,
    report,
    serve,
    study,
    texts,
    training,
)
from .options import answer

LONGEST_ERROR = 2000  # characters


class _OneLineErrors(TyperGroup):
    """Turns the errors that users can cause into one line and an exit code, unless ``--debug`` is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, global_options_first(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as `head`, has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except KeyboardInterrupt as stop:
            if stop.args:  # what is there
                print(stop, file=sys.stderr)
            raise typer.Exit(130) from None
        except StopTraining:  # the log says it, with what to do
            raise typer.Exit(0) from None
        except (DFlashError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            print("error:", one_line(error, LONGEST_ERROR), file=sys.stderr)
            raise typer.Exit(1) from None
        except Exception as error:
            if (told := answer(error)) is not None:
                print("error:", told, file=sys.stderr)
                raise typer.Exit(2) from None
            where = plugin_error(error)
            if where is None or ctx.params.get("debug"):
                raise
            print(f"error: {where} (--debug shows more)", file=sys.stderr)
            raise typer.Exit(1) from None
        return result


def global_options_first(args: list[str]) -> list[str]:
    """``--debug`` and ``--plugin VALUE`` before the command, wherever they stood, but for what follows ``--``."""
    end = args.index("--") if "--" in args else len(args)
    ours: list[str] = []
    others: list[str] = []
    rest = iter(args[:end])
    for arg in rest:
        if arg == "--plugin":
            ours += [arg, *(value for value in [next(rest, None)] if value is not None)]
        else:
            (ours if arg == "--debug" or arg.startswith("--plugin=") else others).append(arg)
    return ours + others + args[end:]


app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (
    decode, chat, serve, prompt_cache, bench, doctor, evaluate, texts, imports, data, fit, adapt, training, study,
    report, quantize,
):  # fmt: skip
    app.add_typer(part.app)  # without a name: its commands stand next to each other
app.add_typer(adapters.app, name="adapters")


def main() -> None:
    """Run the command that ``sys.argv`` names. A closed standard stream is as good as ``/dev/null``."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # as long as the process lives
    app(prog_name="dflash")


def _print_version(wanted: bool) -> None:
    if wanted:
        print("dflash-research", version("dflash-research"))
        raise typer.Exit


@app.callback()
def dflash(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py|MODULE",
            help="Import this first: it may register adapters, drafters, policies, objectives and more. Repeatable.",
        ),
    ] = None,
) -> None:
    """Your language model's own text, faster: speculative decoding with a block-diffusion drafter, on MLX.

    Without --target and --drafter every command uses the bundled models; with
    --target alone, the bundled drafter for that target.
    """
    from ..core import backend
    from ..core.registry import load_plugin

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character shows its code
            stream.reconfigure(errors="backslashreplace")
    backend.require_mlx()
    for module in plugin or ():
        load_plugin(module)
