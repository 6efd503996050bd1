"""``dflash adapters``: the list, a line per check as it ends, exit codes, and refusals."""

import re

import pytest
from support.cli import assert_one_error, invoke
from support.models import llama_model, save_target

from dflash.adapters import registered_adapters
from dflash.adapters.conformance import rewind_cost
from dflash.adapters.conformance.checks import CHECKS
from dflash.adapters.llama import LlamaAdapter


@pytest.fixture
def folder(tmp_path):
    return save_target(llama_model(0), tmp_path / "target", tokenizer=False)


def test_list_shows_every_architecture_with_its_adapter():
    result = invoke("adapters", "list")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    for model_type, adapter in registered_adapters().items():
        assert ["│", model_type, "│", adapter.__name__, "│", adapter.__module__, "│"] in rows


@pytest.mark.parametrize(
    ("model", "title", "skipped"),
    [
        ("mamba2", "mamba2: GenericAdapter; caches: ArraysCache", ("decoding trees", "a drafter's sizes")),
        ("folder", "llama: LlamaAdapter; caches: KVCache", ()),
    ],
)
def test_check_prints_a_line_for_each_check_and_the_verdict(model, title, skipped, folder):
    result = invoke("adapters", "check", folder if model == "folder" else model, "--rounds", 2)
    assert result.exit_code == 0, result.output
    lines = [f"{'skip' if name.startswith(skipped) else 'pass'}  {name}" for name in CHECKS]
    *checks, shown, verdict = result.stdout.splitlines()
    assert [line.partition(": ")[0] for line in checks] == lines
    assert shown == title
    count = len(CHECKS)
    assert verdict == (f"{count - 2} checks passed, 2 skipped." if skipped else f"All {count} checks passed.")


def test_a_failed_check_says_the_first_difference_and_exits_with_1(folder, monkeypatch):
    monkeypatch.setattr(LlamaAdapter, "embedding_scale", 2.0)
    result = invoke("adapters", "check", folder, "--rounds", 1)
    assert result.exit_code == 1
    assert "FAIL  embed() and embedding_scale are the model's: embedding_scale is 2, but the model" in result.stdout
    assert f"1 of {len(CHECKS)} checks failed." in result.stdout


def test_an_architecture_that_does_not_fit_is_a_failed_check():
    result = invoke("adapters", "check", "deepseek_v41")
    assert result.exit_code == 1
    assert re.match(r"FAIL  adapter: model_type 'deepseek_v41' .* Layer 0 keeps a LayerCache", result.stdout)


def test_an_interrupted_check_has_shown_what_passed(folder, monkeypatch):
    monkeypatch.setattr("dflash.target.compare.assert_same_caches", lambda *_: None)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash.target.trial.assert_same_caches", interrupt)
    result = invoke("adapters", "check", folder)
    assert result.exit_code == 130
    assert result.stdout.splitlines() == [f"pass  {name}" for name in list(CHECKS)[:6]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "llama", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["check", "lama"], "neither a folder, nor a hub name .*; did you mean 'llama'"),
        (["check", ""], "is empty"),
        (["bench", "--blocks", "0"], "--blocks must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(arguments, message):
    assert_one_error(invoke("adapters", *arguments), message)


def test_bench_shows_the_time_of_a_rewind_for_each_kind_of_cache(monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    monkeypatch.setattr(rewind_cost, "PROMPT", 20)
    monkeypatch.setattr(rewind_cost, "MODELS", {"full attention": ("qwen3", sizes)})
    (cost,) = rewind_cost.measure(2)
    assert cost.rewind > 0
    assert cost.fraction == cost.rewind / cost.block
    result = invoke("adapters", "bench", "--blocks", 2)
    assert result.exit_code == 0
    assert re.search(r"full attention .*qwen3", result.stdout)
