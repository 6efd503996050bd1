"""The recipes of configs/, and what a recipe refuses before any model loads."""

import json
import re
from pathlib import Path

import pytest
from support.cli import assert_one_error, invoke
from support.runs import recipe, write_recipe

import dflash  # noqa: F401  (loads a fast BLAS before MLX)
from dflash.core.settings import SettingsError, from_dict, load_settings, to_dict
from dflash.training.loop.optimizer import AdamWSettings, MuonSettings
from dflash.training.recipe import Recipe
from dflash.training.toy.small_target import SmallTargetSettings

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_recipes_in_configs_are_valid(path):
    load_settings(SmallTargetSettings if path.stem.endswith("-target") else Recipe, path)


OUR_OWN = "pair", "smollm2"
"""In the names of recipes for drafters that ship with the package, trained on small machines."""


@pytest.mark.parametrize(
    "path",
    sorted(p for p in CONFIGS.glob("*.yaml") if not any(name in p.stem for name in OUR_OWN)),
    ids=lambda p: p.stem,
)
def test_the_ready_recipes_hold_the_published_settings(path):
    ready = load_settings(Recipe, path)
    assert ready.optimizer == AdamWSettings(learning_rate=6e-4, warmup=0.04, clip=1.0)
    assert (ready.drafter.block_size, ready.objective.gamma, ready.run.epochs) == (16, 7.0, 6)
    assert (ready.data.anchors, ready.data.max_length) == (512, 3072)
    assert "# Memory" in path.read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimiser.kind=adamw", "unknown key 'optimiser'; did you mean 'optimizer'"),
        ("optimizer.kind=adamv", "kind is 'adamv'; did you mean 'adamw'"),
        ("optimizer.warmup=4", "warmup must be at least 0 and below 1, got 4"),
        ("data.batch_tokens=10", "cannot hold a sequence of max_length 40"),
        ("drafter.block_size=100000", "block_size must be at least 2 and at most 512, got 100000"),
        ("drafter.block_size=41", "drafter.block_size 41 is more than data.max_length 40"),
        ("target=''", "target is empty"),
        ("run.evaluate_tokens=1", "evaluate_tokens must be at least 2, got 1"),
        ("drafter.head_dim=7", "head_dim must be even, got 7"),
        ("optimizer={kind: muon, clip: 0}", "clip must be above 0"),
        ("drafter.target_layer_ids=[1, 1]", "different layer numbers"),
        ("run.folder", "expected key.sub=value"),
        ("target.name=x", "holds no keys"),
    ],
)
def test_a_wrong_setting_is_one_line_before_any_model_loads(folder, monkeypatch, override, message):
    monkeypatch.setattr("dflash.training.train.load_target", None)
    answer = invoke("train", write_recipe(folder), "--set", override)
    assert_one_error(answer, re.escape(message))


def test_a_study_in_place_of_a_recipe_is_told_apart_and_a_missing_file_by_its_kind(tmp_path):
    (tmp_path / "mine.yaml").write_text("folder: out\nvary: {decode.block_size: [4, 8]}\n")
    assert_one_error(invoke("train", tmp_path / "mine.yaml"), r"this looks like a study: dflash ablate \S+mine\.yaml")
    assert_one_error(invoke("ablate", "nosuch.yaml"), r"Cannot read the study nosuch\.yaml: No such file")


def test_overrides_are_yaml_values_and_numbers_may_be_written_with_exponents(folder):
    values = recipe(
        folder, "x", "optimizer.learning_rate=3e-4", "drafter.target_layer_ids=[1, 3]", "run.max_loss_spike=null"
    )
    assert values.optimizer.learning_rate == 3e-4
    assert values.drafter.target_layer_ids == (1, 3)
    assert values.run.max_loss_spike is None
    assert recipe(folder, "x", "optimizer={kind: muon}").optimizer == MuonSettings()


def test_a_recipe_survives_plain_data(folder):
    values = recipe(folder, "x")
    assert from_dict(Recipe, json.loads(json.dumps(to_dict(values))), "there") == values
    with pytest.raises(SettingsError, match="expected keys and values"):
        from_dict(Recipe, [1], "there")
