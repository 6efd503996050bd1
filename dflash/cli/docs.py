"""The page ``dflash/docs/cli.md``: every command with its options, from the same help that ``--help`` prints.

``python -m dflash.cli.docs`` prints the page.
"""

from typing import Any

import typer

from . import app

HEAD = """# Command line

Written by `python -m dflash.cli.docs > dflash/docs/cli.md` from what `--help` prints. `--debug` (tracebacks) and
`--plugin FILE.py|MODULE` go before or after the name of any command.
"""


def page() -> str:
    """The whole page as Markdown."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("dflash", [], resilient_parsing=True)
    return HEAD + "".join(_section(command, context) for command in group.commands.values() if not command.hidden)


def _section(command: Any, parent: Any) -> str:
    """One command, or the commands of a group."""
    context = command.make_context(command.name, [], parent=parent, resilient_parsing=True)
    if hasattr(command, "commands"):
        return "".join(_section(sub, context) for sub in command.commands.values())
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    lines = [f"\n## {context.command_path}\n", *map(_paragraph, command.help.strip().split("\n\n")), f"    {usage}\n"]
    rows = [_row(parameter, context) for parameter in command.params if parameter.name != "help"]
    if any(rows):
        lines += ["| option | what it does |", "|---|---|", *filter(None, rows), ""]
    return "\n".join(lines)


def _paragraph(text: str) -> str:
    """A paragraph of a command's help; examples become a block of code."""
    lines = text.strip("\b\n").splitlines()
    if lines[0].lstrip().startswith("dflash "):
        lines = [f"    {line.strip()}" for line in lines]
    return "\n".join(lines) + "\n"


def _row(parameter: Any, context: Any) -> str | None:
    record = parameter.get_help_record(context)
    if record is None:
        return None
    names, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
    return f"| `{names}` | {text} |"


if __name__ == "__main__":
    print(page(), end="")
