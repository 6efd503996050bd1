"""What holds for every command: help, wrong usage, one-line errors, Ctrl-C, a reader that goes away."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from support.cli import command_names, invoke

import dflash
from dflash.cli import global_options_first, loading


def test_every_command_has_help_with_an_example():
    for path in command_names():
        result = invoke(*path, "-h")
        assert result.exit_code == 0
        assert f"dflash {' '.join(path)}" in result.stdout.split("Examples:")[1]


@pytest.mark.parametrize("args", [["generate"], ["generate", "a", "--nope"], ["bench", "--runs", "x"], ["nope"]])
def test_wrong_usage_exits_2(args):
    assert invoke(*args).exit_code == 2


def test_debug_shows_the_traceback():
    result = invoke("--debug", "generate", "Hi", "--target", "only")
    assert isinstance(result.exception, dflash.DFlashError)


def test_ctrl_c_exits_130_quietly(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load_decoder", interrupted)
    result = invoke("generate", "Hi")
    assert (result.exit_code, result.stderr) == (130, "")


def test_a_reader_that_goes_away_is_no_error_message():
    command = [sys.executable, "-m", "dflash", "recipe", "qwen3-4b"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1


def test_closed_streams_are_as_good_as_a_device_that_takes_everything():
    beginning = "cache-prompt - --prompt-cache-file x.safetensors"
    for command, closed, code in (("generate --help", ">&- 2>&-", 0), (beginning, "<&- 2>&1", 1)):
        command = f"exec {sys.executable} -m dflash {command} {closed}"
        run = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert run.returncode == code, run.stderr
        assert "Traceback" not in run.stdout + run.stderr
    assert run.stdout == "error: The prompt is empty; expected text.\n"


def test_ctrl_c_is_quiet_while_modules_are_imported(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-m", "dflash", "bench"], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def test_the_package_runs_as_a_module():
    run = subprocess.run([sys.executable, "-m", "dflash", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"dflash-research {version('dflash-research')}\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("generate Hi --debug", "--debug generate Hi"),
        ("bench --plugin a.py --runs 2 --plugin=b", "--plugin a.py --plugin=b bench --runs 2"),
        ("generate -- --debug", "generate -- --debug"),
        ("bench --plugin", "--plugin bench"),
    ],
)
def test_global_options_may_stand_anywhere(given, expected):
    assert global_options_first(given.split()) == expected.split()
