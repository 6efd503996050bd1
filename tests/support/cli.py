"""The command line in tests: one call, and what an error must look like."""

import re
from collections.abc import Iterator
from typing import Any

import typer
from click.testing import CliRunner, Result

from dflash import cli

COMMAND = typer.main.get_command(cli.app)  # made once: it takes longer than most calls in tests


def command_names(group: Any = COMMAND) -> Iterator[tuple[str, ...]]:
    """The words of every command but hidden ones."""
    for name, command in group.commands.items():
        if not command.hidden:
            rest = command_names(command) if hasattr(command, "commands") else [()]
            yield from ((name, *words) for words in rest)


def invoke(*args: object, stdin: str | bytes | None = None) -> Result:
    """``dflash ARGS`` in this process, its streams kept apart."""
    return CliRunner().invoke(COMMAND, [str(arg) for arg in args], input=stdin)


def assert_one_error(result: Result, message: str, code: int = 1) -> None:
    """Exit code ``code`` and exactly one line on stderr, ``error: ...``, in which ``message`` (a pattern) is found."""
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert re.search(message, result.stderr), result.stderr
