"""A plug-in's parts are named, with options, wherever ours are; what is wrong with one is a line."""

import json
from pathlib import Path

import pytest
from support import plugin
from support.cli import assert_one_error, invoke

from dflash import DFlashError, load_drafter
from dflash.cli import loading
from dflash.decoding.verify import VERIFY_RULES, Verified

BIGRAM = plugin.Bigram
FEW = ["--max-tokens", "6"]


def with_plugin(*args: object):
    return invoke("--plugin", Path(plugin.__file__), *args)


@pytest.fixture
def commands(pair, prompts):
    """Each command that takes the name of a drafter, with that name; as JSON."""
    target, file = pair[:2], f"{prompts}.safetensors"

    def of(drafter: str) -> dict[str, list[object]]:
        few = ["--prompts", prompts, "--limit", "1", *FEW, "--json"]
        return {
            "generate": ["generate", "Hi", *target, "--drafter", drafter, *FEW, "--json"],
            "bench": ["bench", *target, "--drafter", drafter, *few],
            "eval": ["eval", drafter, *target, *few],
            "cache": ["cache-prompt", "Hi", *target, "--drafter", drafter, "--prompt-cache-file", file],
            "doctor": ["doctor", *target, "--drafter", drafter],
        }

    return of


def test_a_drafter_without_files_works_by_its_name_in_every_command(commands):
    for command in (*commands("bigram").values(), commands("ngram:sizes=[3, 1]")["bench"]):
        result = with_plugin(*command)
        assert result.exit_code == 0, (command, result.output)


@pytest.mark.parametrize("drafter", ["bigram", "ngram+bigram:block_size=4"])
def test_a_named_drafter_alone_drafts_for_the_bundled_target_whose_text_it_writes(drafter):
    request = "Write a function that doubles each number and sums them."
    command = ["generate", request, "--max-tokens", "30", "--json"]
    named = json.loads(with_plugin(*command, "--drafter", drafter, "--policy", "full").stdout)
    plain = json.loads(invoke(*command, "--policy", "0").stdout)
    assert named["tokens"] == plain["tokens"]
    assert sum(named["drafted"]) > 0 == sum(plain["drafted"])


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("bigram:blocksize=4", "The drafter 'bigram' has no option 'blocksize'; did you mean 'block_size'"),
        ("bigram:block_size=0", "The block_size of Bigram must be a whole number of at least 1, got 0"),
        ("bigram:4", r"expected bigram:key=value,key=value"),
        ("ngram+ngram:size=3", "The drafter 'ngram' has no option 'size'; did you mean 'sizes'"),
        ("half", "Half is no Drafter: it lacks bind, make_cache, extend_context, propose"),
        ("bigrm", "No checkpoint folder at 'bigrm'"),
        ("folder", "The drafter 'bigram' needs no files and no training; give its name: --drafter bigram"),
    ],
)
def test_a_mistake_in_a_named_drafter_is_one_line(drafter, message, commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder/config.json").write_text('{"drafter_kind": "bigram"}')
    assert_one_error(with_plugin(*commands(drafter)["generate"]), message)


def test_an_error_in_a_plugins_code_is_one_line_with_its_place(commands):
    for name in ("generate", "eval"):
        failed = with_plugin(*commands("fails")[name], "--policy", "full")
        assert_one_error(failed, r"plugin\.py:\d+, in propose: ZeroDivisionError: .* \(--debug shows more\)")
        with_traceback = with_plugin("--debug", *commands("fails")[name], "--policy", "full")
        assert isinstance(with_traceback.exception, ZeroDivisionError)


def test_an_error_of_our_own_code_is_not_blamed_on_a_plugin(commands, monkeypatch):
    monkeypatch.setattr(loading, "load_decoder", lambda *_: 1 // 0)
    assert isinstance(with_plugin(*commands("bigram")["generate"]).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        (["--drafter", "bigram", "--policy"], "up_to:drafts=1", "up_to:drafts=2"),
        (["--drafter", "bigram", "--sampler"], "nth:place=0", "nth:place=3"),
        (["--drafter", "bigram", "--logits-processor"], "only:token=65", "only:token=66"),
        (["--policy", "full", "--verify"], "typical:epsilon=-1", "typical:epsilon=2"),
    ],
)
def test_options_of_parts_reach_them(options, first, second, pair):
    drafter = [] if "--drafter" in options else pair[2:]
    command = ["generate", "abababab", "--raw", *pair[:2], *drafter, "--max-tokens", "12", "--json", *options]
    answers = [json.loads(with_plugin(*command, text).stdout) for text in (first, second)]
    one, two = ({name: answer[name] for name in ("tokens", "drafted", "accepted")} for answer in answers)
    assert one != two


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verify", "typical:epsilom=1"], "The verification rule 'typical' has no option 'epsilom'; did you mean"),
        (["--policy", "up_to"], "The policy 'up_to' needs a value for its option 'drafts'"),
        (["--sampler", "nth:plac=1"], "The sampler 'nth' has no option 'plac'; did you mean 'place'"),
        (["--logits-processor", "only:tokens=1"], "The logits processor 'only' has no option 'tokens'"),
    ],
)
def test_options_that_do_not_fit_are_one_line_before_a_model_loads(options, message):
    assert_one_error(with_plugin("generate", "Hi", "--target", "no such folder", *options), message)


def test_a_rule_that_is_a_class_is_made_with_its_options(commands):
    made = []

    class Counted:
        def __init__(self, start=0):
            made.append(start)

        def __call__(self, proposal, logits_LV, sampler):
            return Verified([logits_LV[0].argmax().item()], 0)

    with VERIFY_RULES.temporary("counted", Counted):
        result = with_plugin(*commands("bigram")["generate"], "--verify", "counted:start=3")
    assert result.exit_code == 0, result.output
    assert set(made) == {3}


def test_python_names_parts_as_the_command_line_does():
    assert type(load_drafter("bigram:block_size=5")).__name__ == BIGRAM.__name__
    assert load_drafter("ngram+bigram:block_size=5").model.block_size == 5
    with pytest.raises(DFlashError, match="The drafter 'ngram' has no option 'longest'"):
        load_drafter("ngram:longest=3")
