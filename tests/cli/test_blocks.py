"""``dflash generate --show-blocks``, ``--profile`` and ``--trace``: the same text, in colours on a terminal only."""

import itertools
import json
import re

import pytest
from support.cli import assert_one_error, invoke
from support.models import writer

from dflash.cli import loading
from dflash.cli.blocks import NOTES, print_profile
from dflash.core.errors import DFlashError
from dflash.decoding.profile import Profile
from dflash.decoding.trace import read_records

TEXT = "one two\nthree\tfour five six"
STYLE = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture
def generate(monkeypatch):
    """``dflash generate`` with a drafter that is right four times out of five."""
    monkeypatch.setattr(loading, "load_decoder", lambda *_: writer(TEXT, p=0.8, policy="full"))
    return lambda *arguments: invoke("generate", "AB", "--raw", *arguments)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.parametrize("flag", ["--show-blocks", "--show-rejected", "--profile"])
def test_a_pipe_gets_the_text_alone(generate, monkeypatch, flag):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    shown = generate(flag)
    assert shown.stdout == TEXT + "\n"
    assert ("Blocks are not marked" in shown.stderr) == (flag != "--profile")


@pytest.mark.parametrize("policy", ["full", 1])
def test_a_terminal_shows_who_wrote_what(generate, terminal, tmp_path, policy):
    result = generate("--show-blocks", "--trace", tmp_path / "a.jsonl", "--policy", policy)
    legend, shown = result.stdout.split("\n\n", 1)
    assert "accepted draft" in legend
    assert "rejected" not in legend
    assert STYLE.sub("", shown) == TEXT.replace("\t", "   ") + "\n"  # to the next column of four, wherever blocks end
    own = "".join(re.findall(r"\x1b\[4;30;46m(.*?)\x1b\[0m", shown, re.S))
    request, *blocks = read_records(tmp_path / "a.jsonl")
    assert own.split() == "".join(block["pieces"][-1] for block in blocks).replace("\n", "").split()  # tabs are spaces
    assert (request["target"], request["drafter"], request["options"]["policy"]) == ("bundled", "bundled", policy)


def test_rejected_drafts_are_struck_through_on_request_and_without_colours_if_asked(
    generate, terminal, tmp_path, monkeypatch
):
    shown = generate("--show-rejected", "--trace", tmp_path / "a.jsonl").stdout
    _, *blocks = read_records(tmp_path / "a.jsonl")
    rejected = [block["drafts"][block["accepted"] : block["verified"]] for block in blocks]
    assert all(character.isprintable() or character in "\n\x1b" for character in shown)
    struck = re.findall(r"\x1b\[9;31m(.*?)\x1b\[0m", shown, re.S)[1:]  # the first is the legend's
    assert len(struck) == sum(map(bool, rejected)) > 1
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[\d;]*\b(3\d|4\d)m", generate("--show-blocks").stdout)


def test_a_profile_shows_parts_and_lengths_and_goes_into_json(generate):
    shown = generate("--profile", "--policy", "3").stderr
    for word in ("prefill", "draft", "verify", "rewind", "host", "verified", NOTES["host"], NOTES["ms"]):
        assert word in shown
    assert NOTES["plain"] not in shown
    profile = json.loads(generate("--profile", "--policy", "3", "--json").stdout)["profile"]
    assert {length["verified"] for length in profile["lengths"]} <= {0, 1, 2, 3}
    assert profile["blocks"] == sum(length["blocks"] for length in profile["lengths"])


def test_a_profile_counts_pauses_and_shows_what_the_policy_expected(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    profile, why = Profile(), {"tokens": 8.123, "seconds": 0.01512, "plain_seconds": 0.005}
    block = {"record": "block", "verified": 15, "accepted": 9, "tokens": [0] * 10, "why": why}
    seconds = {"draft": 0.04, "verify": 0.05, "rewind": 0.01}
    profile(block | {"number": 1, "asleep": False, "seconds": seconds})
    for number, left in enumerate((40, 39, 5), 2):
        profile(block | {"number": number, "asleep": True, "why": {"next_attempt": left}, "seconds": {"plain": 0.1}})
    print_profile(profile)
    shown = capsys.readouterr().err
    rows = [re.findall(r"[\w./]+", line) for line in shown.splitlines()]
    assert ["15", "1", "9.00", "10.00", "100.00", "8.123", "15.12"] in rows
    assert ["asleep", "3", "1", "100.00"] in rows
    assert "asleep: drafting paused once, with 41 to 41 tokens to the next attempt" in shown
    assert profile.to_dict()["pauses"] == [41]


def test_what_does_not_go_together_is_one_line(generate, tmp_path):
    assert_one_error(generate("--show-blocks", "--json"), "--show-blocks .* --json")
    assert_one_error(generate("--trace", tmp_path / "no" / "a.jsonl"), "--trace .*: there is no folder .*no; make it")
    assert not (tmp_path / "no").exists()


def test_a_trace_is_never_replaced(generate, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("")
    assert generate("--trace", path).exit_code == 0  # an empty file holds nothing that could be lost
    written = path.read_bytes()
    for command in (generate, lambda *a: invoke("eval", *a)):
        assert_one_error(command("--trace", path), "--trace .* exists and is not empty; remove it, or name another")
    assert path.read_bytes() == written


@pytest.mark.parametrize("error", [DFlashError("the rule fails"), KeyboardInterrupt()])
def test_what_ends_a_text_begins_a_line_of_its_own(monkeypatch, error):
    decoder = writer(TEXT, p=0.8, policy="full")
    answer = decoder.stream_generate

    def failing(*arguments, **options):
        yield from itertools.islice(answer(*arguments, **options), 2)
        raise error

    monkeypatch.setattr(decoder, "stream_generate", failing)
    monkeypatch.setattr(loading, "load_decoder", lambda *_: decoder)
    result = invoke("generate", "AB", "--raw")
    assert TEXT.startswith(result.stdout.removesuffix("\n"))
    assert result.stdout.endswith("\n")
    known = (130, r"Stopped after \d+ tokens") if isinstance(error, KeyboardInterrupt) else (1, "error: the rule fails")
    assert result.exit_code == known[0]
    assert re.match(known[1], result.stderr)
