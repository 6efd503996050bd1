"""The recipe that a run folder records: of older versions too, and what is there where it is no run."""

import json

import pytest
from support.cli import assert_one_error, invoke

from dflash.core.errors import CheckpointError
from dflash.training.runs import recorded_recipe


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
            recorded_recipe(where)
    assert_one_error(invoke("compare", tmp_path), "is not the folder of a run")
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
