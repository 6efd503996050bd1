"""Runs compared: what differs, what their logs say, and acceptance in pairs on equal prompts."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support.cli import assert_one_error, invoke
from support.runs import read_log, recipe_values

from dflash.core.settings import from_dict
from dflash.study.compare import compare
from dflash.study.settings import PromptSet
from dflash.training.recipe import Recipe
from dflash.training.train import train


@pytest.fixture(scope="module")
def runs(place, tmp_path_factory):
    """A run that learned, and one that learned next to nothing."""
    folder = tmp_path_factory.mktemp("runs")
    values = recipe_values(place)
    run = values["run"] | {"steps": 12, "evaluate_every": 6, "log_every": 3, "evaluate_tokens": 4}
    for name, rate in (("learned", 1e-2), ("lazy", 1e-6)):
        own = {"optimizer": {"learning_rate": rate}, "run": run | {"folder": str(folder / name)}}
        train(from_dict(Recipe, values | own, name), on_log=lambda line: None)
    return [folder / "lazy", folder / "learned"]


def test_runs_are_compared_by_what_differs_and_what_they_reached(runs):
    lazy, learned = compare(runs, decode=False)
    assert (lazy.settings, learned.settings) == ({"optimizer.learning_rate": 1e-6}, {"optimizer.learning_rate": 1e-2})
    log = read_log(runs[1])
    scores = {line["step"]: line["acceptance_length"] for line in log if "acceptance_length" in line}
    assert learned.best_acceptance == max(scores.values()) == scores[learned.best_step]
    assert (learned.step, learned.steps) == (12, 12)
    assert learned.loss == [line["loss"] for line in log if "loss" in line][-1]
    assert learned.heldout_loss == [line["heldout_loss"] for line in log if "heldout_loss" in line][-1]
    assert min(learned.seconds, learned.tokens_per_second, learned.peak_memory_gb) > 0
    assert [step for step, _ in learned.curves["acceptance_length"]] == [6, 12]
    assert [step for step, _ in learned.curves["loss"]] == [3, 6, 9, 12]
    assert learned.curves["heldout_loss"][-1][1] < lazy.curves["heldout_loss"][-1][1]


def test_all_decode_the_same_prompts_and_the_first_is_the_measure(runs, tmp_path):
    """An unfinished run with its last weights."""
    shutil.copytree(runs[1], tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "drafter")
    lazy, learned, unfinished = compare([*runs, tmp_path / "copy"], limit=3, max_tokens=12)
    assert lazy.ratio.value == lazy.ratio.low == lazy.ratio.high == 1
    assert learned.ratio.value == pytest.approx(learned.acceptance.value / lazy.acceptance.value)
    assert learned.acceptance.low <= learned.acceptance.value <= learned.acceptance.high
    tokens = [round(one.acceptance.value * one.blocks, 6) for one in (lazy, learned, unfinished)]
    assert tokens == [3 * 11] * 3  # three answers of 12 tokens, the first of each in no block
    assert unfinished.acceptance == learned.acceptance


def test_the_command_prints_settings_curves_and_intervals_and_draws(runs, tmp_path, place):
    prompts, plot = place / "prompts.jsonl", tmp_path / "c.svg"
    result = invoke("compare", *runs, "--prompts", prompts, "--limit", 2, "--max-tokens", 6, "--plot", plot)
    assert result.exit_code == 0, result.output
    for text in (
        "optimizer.learning_rate",
        "learned held-out loss",
        "over the first run",
        "2 prompts decoded. So few say little",
    ):
        assert text in result.stdout
    assert "*" not in result.stdout
    assert str(runs[0]) in plot.read_text()
    alone = invoke("compare", *runs, "--prompts", prompts, "--limit", 1, "--max-tokens", 6).stdout
    assert "1 prompt decoded. One says nothing about others, so there is no 95 % interval. Give more" in alone
    (tmp_path / "five.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "ABCDE"))
    enough = invoke("compare", *runs, "--prompts", tmp_path / "five.jsonl", "--max-tokens", 3).stdout
    assert enough.endswith("5 prompts decoded.\n")
    assert_one_error(invoke("compare", *runs, "--max-tokens", 1), "No answer was long enough for a block")


@pytest.mark.parametrize("command", [["compare", "--no-decode"], ["runs"]])
def test_without_decoding_only_the_logs_are_read(runs, command):
    one, other = json.loads(invoke(*command, *runs, "--json").stdout)
    assert "acceptance" not in one
    assert other["curves"]["loss"][0][0] == 3
    assert "over the first run" not in invoke(*command, *runs).stdout


@pytest.fixture
def changed(runs, tmp_path):
    """A copy of the run that learned, with another value of its recipe, or of its dataset's fingerprint."""

    def made(section: str, name: str, value: object) -> Path:
        shutil.copytree(runs[1], tmp_path / "other", dirs_exist_ok=True)
        recorded = json.loads((runs[1] / "recipe.json").read_text())
        (recorded if section == "dataset" else recorded["recipe"])[section][name] = value
        (tmp_path / "other" / "recipe.json").write_text(json.dumps(recorded))
        return tmp_path / "other"

    return made


@pytest.mark.parametrize(
    ("section", "name", "value", "marked"),
    [
        *(("drafter", name, 3, True) for name in ("kind", "block_size", "vocabulary", "from")),
        ("dataset", "crc", 0x1F, True),
        ("optimizer", "clip", 3, False),
    ],
)
def test_losses_of_another_kind_or_of_other_data_are_told(runs, changed, section, name, value, marked):
    one, other = compare([runs[1], changed(section, name, value)], decode=False)
    assert bool(one.objective) == bool(other.objective) == marked
    column, shown = ("dataset", "24 sequences, 1f") if section == "dataset" else (f"{section}.{name}", value)
    assert (list(other.settings), other.settings[column]) == ([column], shown)


def test_a_run_of_other_data_than_the_held_out_prompts_is_warned_of(runs, changed, place, caplog):
    other = changed("dataset", "crc", 0)
    compare([runs[1], other], PromptSet(file=str(place / "prompts.jsonl"), limit=1), max_tokens=4)
    assert not caplog.messages
    compare([runs[1], other], limit=1, max_tokens=4)
    (warning,) = caplog.messages
    assert warning.startswith(f"{other}: trained on other sequences than {place / 'data'} trains on now, perhaps on")


def test_losses_by_different_objectives_are_marked(runs, changed, tmp_path):
    plot = tmp_path / "curves.svg"
    shown = invoke("compare", runs[1], changed("objective", "gamma", 3), "--no-decode", "--plot", plot).stdout
    assert "learned held-out loss*" in shown
    assert shown.count("* Objective, data, blocks, vocabulary or kind of drafter differ") == 1
    titles = re.findall(r">([a-z ]*loss[^<]*|acceptance length)<", plot.read_text())
    losses = [f"{name} (gamma {gamma})" for name in ("loss", "heldout loss") for gamma in ("7.0", "3")]
    assert titles == [*losses, "acceptance length"]  # of different objectives, they share no panel


def test_a_run_without_weights_is_shown_by_its_log_and_without_one_has_empty_places(runs, tmp_path):
    (tmp_path / "recipe.json").write_bytes((runs[0] / "recipe.json").read_bytes())
    (tmp_path / "log.jsonl").write_bytes(b'a note\n{"step": 1, "loss": "high"}\n')
    bare, learned = compare([tmp_path, runs[1]])
    assert (bare.step, bare.steps, bare.loss, bare.best_acceptance, bare.acceptance) == (0, None, None, None, None)
    assert learned.loss is not None
    assert invoke("compare", tmp_path).exit_code == 0


def test_runs_of_two_targets_are_compared_by_their_logs_alone(runs, place, tmp_path):
    shutil.copytree(runs[0], tmp_path / "run")
    shutil.copytree(place / "data", tmp_path / "data")
    for file, change in (("run/recipe.json", place / "data"), ("data/manifest.json", None)):
        text = (tmp_path / file).read_text()
        target = json.loads((place / "data" / "manifest.json").read_text())["target"]
        text = text.replace(target, "another") if change is None else text.replace(str(change), str(tmp_path / "data"))
        (tmp_path / file).write_text(text)
    assert_one_error(invoke("compare", runs[0], tmp_path / "run"), "was trained for another target .* --no-decode for")
    assert invoke("compare", runs[0], tmp_path / "run", "--no-decode").exit_code == 0
    assert_one_error(invoke("compare", runs[0], tmp_path), "is not the folder of a run")
