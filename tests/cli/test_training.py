"""``dflash recipe`` and the help of ``dflash train``."""

import pytest
from support.cli import assert_one_error, invoke
from support.runs import write_target

from dflash.training.recipe import Recipe, bundled_recipes, load_recipe
from dflash.training.settings import from_yaml, settings_help


def test_bundled_recipes_are_listed_printed_and_loaded_by_name():
    names = invoke("recipe").stdout.split()
    assert names == list(bundled_recipes())
    assert {"qwen3-4b", "pair-drafter"} <= set(names)
    assert not any(name.endswith("-target") for name in names)
    assert from_yaml(Recipe, invoke("recipe", "qwen3-4b").stdout, "there") == load_recipe("qwen3-4b")


def test_a_recipe_for_a_target_is_printed_ready_to_train(tmp_path):
    target = write_target(tmp_path / "target")
    result = invoke("recipe", "--target", target, "--run", tmp_path / "run")
    assert result.exit_code == 0, result.output
    recipe = from_yaml(Recipe, result.stdout, "there")
    assert (recipe.target, recipe.run.folder) == (str(target), tmp_path / "run")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["qwen3"], "no bundled recipe 'qwen3'; did you mean 'qwen3-4b'"),
        (["qwen3-4b", "--target", "x"], "not both"),
        (["--target", ""], "--target is empty"),
        (["--target", "/nowhere"], "No checkpoint folder at '/nowhere'"),
    ],
)
def test_bad_requests_are_one_line(args, message):
    assert_one_error(invoke("recipe", *args), message)


def test_the_help_of_train_lists_every_setting_with_default_and_meaning():
    text = invoke("train", "--help").stdout
    for line in settings_help(Recipe):
        assert line.meaning, line.key
        row = next(row for row in text.splitlines() if line.key in row.split() and line.meaning in row)
        assert (line.default or "(to be given)") in row
    assert "run.max_loss_spike" in text
    assert "optimizer.decay_steps" in text
