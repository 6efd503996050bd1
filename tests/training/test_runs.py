"""Runs in one table: in what their recipes differ, their best acceptance and their speed."""

import json

import pytest
from support.cli import assert_one_error, invoke
from support.runs import read_log, recipe

from dflash.core.errors import CheckpointError
from dflash.training.runs import compare_runs, recorded_recipe
from dflash.training.train import train


@pytest.fixture(scope="module")
def pair(folder):
    train(recipe(folder, "quicker"))
    train(recipe(folder, "slower", "optimizer.learning_rate=1e-4", "drafter.seed=3"))
    return [folder / "quicker", folder / "slower"]


def test_runs_are_compared_by_what_differs_and_what_they_reached(pair):
    one, other = compare_runs(pair)
    assert one.settings == {"drafter.seed": 0, "optimizer.learning_rate": 0.0006}
    assert other.settings == {"drafter.seed": 3, "optimizer.learning_rate": 0.0001}
    log = read_log(pair[1])
    scores = {line["step"]: line["acceptance_length"] for line in log if "acceptance_length" in line}
    assert other.best_acceptance == max(scores.values()) == scores[other.best_step]
    assert (other.step, other.steps) == (8, 8)
    assert other.loss == [line["loss"] for line in log if "loss" in line][-1]
    assert other.heldout_loss == [line["heldout_loss"] for line in log if "heldout_loss" in line][-1]
    assert min(other.seconds, other.tokens_per_second, other.peak_memory_gb) > 0


def test_the_command_prints_a_table_or_json(pair):
    table = invoke("runs", *pair).stdout
    for word in ("optimizer.learning_rate", "0.0006", "0.0001", "8/8", "acceptance"):
        assert word in table
    found = json.loads(invoke("runs", *pair, "--json").stdout)
    assert [run["settings"]["drafter.seed"] for run in found] == [0, 3]


def test_a_run_without_a_log_or_checkpoint_has_empty_places(tmp_path, undisturbed):
    (tmp_path / "recipe.json").write_bytes((undisturbed / "recipe.json").read_bytes())
    (tmp_path / "log.jsonl").write_bytes(b'a note\n{"step": 1, "loss": "high"}\n')
    (found,) = compare_runs([tmp_path])
    assert (found.step, found.steps, found.loss, found.best_acceptance) == (0, None, None, None)
    assert invoke("runs", tmp_path).exit_code == 0


def test_what_is_no_run_is_said(tmp_path, undisturbed, folder):
    (tmp_path / "file").write_text("")
    cases = [
        (tmp_path / "none", "there is no such folder"),
        (tmp_path / "file", "it is a file"),
        (tmp_path, r"it has no recipe\.json"),
        (folder, r"it holds runs, such as "),
        (undisturbed / "drafter", r"it holds a model and no recipe\.json\. A finished drafter needs no export"),
    ]
    for where, message in cases:
        with pytest.raises(CheckpointError, match=f"is not the folder of a run of dflash train: {message}"):
            compare_runs([where])
    assert_one_error(invoke("runs", tmp_path), "is not the folder of a run")
    assert_one_error(invoke("export", folder, tmp_path / "out"), "it holds runs, such as")


def test_an_older_recipe_has_the_defaults_of_newer_settings_and_todays_names(tmp_path, undisturbed):
    recorded = json.loads((undisturbed / "recipe.json").read_text())
    now = recorded["recipe"]
    older = {section: dict(values) if isinstance(values, dict) else values for section, values in now.items()}
    older["run"]["explosion"] = older["run"].pop("max_loss_spike")
    older["objective"]["kl_share"] = older["objective"].pop("kl_weight")
    for section, key in (("run", "callbacks"), ("drafter", "kind"), ("drafter", "from"), ("objective", "options")):
        del older[section][key]
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": older}))
    assert recorded_recipe(tmp_path) == now
