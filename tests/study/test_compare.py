"""Runs compared: what differs, curves from their logs, and acceptance in pairs on equal prompts."""

import dataclasses
import json
import shutil

import pytest
from support.cli import assert_one_error, invoke
from support.runs import recipe_values

from dflash.core.settings import from_dict
from dflash.study.compare import compare
from dflash.training.recipe import Recipe
from dflash.training.train import train


@pytest.fixture(scope="module")
def runs(place, tmp_path_factory):
    """A run that learned, and one that learned next to nothing."""
    folder = tmp_path_factory.mktemp("runs")
    values = recipe_values(place)
    values["run"] |= {"steps": 12, "evaluate_every": 6, "log_every": 3, "evaluate_tokens": 4, "folder": "x"}
    for name, rate in (("learned", 1e-2), ("lazy", 1e-6)):
        settings = from_dict(Recipe, values | {"optimizer": {"learning_rate": rate}}, name)
        run = dataclasses.replace(settings.run, folder=folder / name)
        train(dataclasses.replace(settings, run=run), on_log=lambda line: None)
    return [folder / "lazy", folder / "learned"]


def test_both_decode_the_same_prompts_and_the_first_is_the_measure(runs, place):
    lazy, learned = compare(runs, limit=3, max_tokens=12)
    assert lazy.ratio.value == lazy.ratio.low == lazy.ratio.high == 1
    assert learned.ratio.value == pytest.approx(learned.acceptance.value / lazy.acceptance.value)
    assert learned.acceptance.low <= learned.acceptance.value <= learned.acceptance.high
    assert learned.summary.settings == {"optimizer.learning_rate": 1e-2}
    assert [step for step, _ in learned.curves["acceptance_length"]] == [6, 12]
    assert [step for step, _ in learned.curves["loss"]] == [3, 6, 9, 12]
    assert learned.curves["heldout_loss"][-1][1] < lazy.curves["heldout_loss"][-1][1]


def test_the_command_prints_settings_curves_and_intervals_and_draws(runs, tmp_path, place):
    prompts = place / "prompts.jsonl"
    result = invoke(
        "compare", *runs, "--prompts", prompts, "--limit", 2, "--max-tokens", 6, "--plot", tmp_path / "c.svg"
    )
    assert result.exit_code == 0, result.output
    for text in ("optimizer.learning_rate", "lazy acceptance", "learned heldout loss", "over the first run", "1 (1-1)"):
        assert text in result.stdout
    assert "2 prompts decoded." in result.stdout
    assert "*" not in result.stdout
    alone = invoke("compare", *runs, "--prompts", prompts, "--limit", 1, "--max-tokens", 6).stdout
    assert "1 prompt decoded. One says nothing about others, so there is no 95 % interval." in alone
    drawn = (tmp_path / "c.svg").read_text()
    assert "heldout loss" in drawn
    assert str(runs[0]) in drawn
    (one, other) = json.loads(invoke("compare", *runs, "--no-decode", "--json").stdout)
    assert "acceptance" not in one
    assert other["curves"]["loss"][0][0] == 3


def test_losses_by_different_objectives_are_marked(runs, tmp_path):
    shutil.copytree(runs[1], tmp_path / "other")
    recorded = json.loads((tmp_path / "other" / "recipe.json").read_text())
    recorded["recipe"]["objective"]["gamma"] = 3
    (tmp_path / "other" / "recipe.json").write_text(json.dumps(recorded))
    compared = invoke("compare", runs[1], tmp_path / "other", "--no-decode").stdout
    for shown in (compared, invoke("runs", runs[1], tmp_path / "other").stdout):
        assert "heldout loss*" in shown
        assert shown.count("* By each run's own objective") == 1
    assert "learned heldout loss*" in compared
    assert "heldout loss*" not in invoke("runs", *runs).stdout


def test_an_unfinished_run_is_compared_by_its_last_weights(runs, tmp_path):
    shutil.copytree(runs[1], tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "drafter")
    finished, unfinished = compare([runs[1], tmp_path / "copy"], limit=2, max_tokens=8)
    assert unfinished.acceptance == finished.acceptance


def test_mistakes_are_one_line(runs, tmp_path):
    assert_one_error(invoke("compare", runs[0]), "at least two runs")
    assert_one_error(invoke("compare", runs[0], tmp_path), "is not the folder of a run")
