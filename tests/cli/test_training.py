"""``dflash recipe`` and the help of ``dflash train``."""

import pytest
from support.cli import assert_one_error, invoke
from support.runs import write_target

from dflash.core.settings import from_yaml, settings_help
from dflash.training.recipe import Recipe, bundled_recipes, load_recipe


def test_bundled_recipes_are_listed_printed_and_loaded_by_name():
    names = invoke("recipe").stdout.split()
    assert names == list(bundled_recipes())
    assert {"qwen3-4b", "pair-drafter"} <= set(names)
    assert not any(name.endswith("-target") for name in names)
    assert from_yaml(Recipe, invoke("recipe", "qwen3-4b").stdout, "there") == load_recipe("qwen3-4b")


@pytest.mark.parametrize("named", [True, False])
def test_a_recipe_for_a_target_or_the_bundled_one_is_printed_ready_to_train(tmp_path, named):
    target = ["--target", write_target(tmp_path / "target")] if named else []
    result = invoke("recipe", *target, "--run", tmp_path / "run", "--set", "drafter.num_hidden_layers=1")
    assert result.exit_code == 0, result.output
    found = from_yaml(Recipe, result.stdout, "there")
    assert (found.target, found.run.folder) == (str(target[1]) if named else "bundled", tmp_path / "run")
    assert found.drafter.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["qwen3"], "no bundled recipe 'qwen3'; did you mean 'qwen3-4b'"),
        (["qwen3-4b", "--target", "x"], "not both"),
        (["qwen3-4b", "--set", "run.epochs=2"], "not both"),
        (["--set", "run.epoch=2"], "the proposed recipe: run: unknown key 'epoch'; did you mean 'epochs'"),
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
