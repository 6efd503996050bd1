"""``dflash recipe`` and the help of ``dflash train``."""

import pytest
from support.cli import assert_one_error, invoke
from support.runs import recipe, write_dataset, write_target

from dflash.core.settings import from_yaml, settings_help
from dflash.training.recipe import Recipe, bundled_recipes, load_recipe
from dflash.training.train import train


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


class Loaded(Exception):
    """Stands for the target."""


@pytest.mark.parametrize(
    ("module", "args"),
    [
        ("target", ["generate", "Hi", "--target", "{place}/target"]),
        ("target", ["bench", "--target", "{place}/target"]),
        ("target", ["eval", "--target", "{place}/target"]),
        (
            "target",
            ["cache-prompt", "Hi", "--prompt-cache-file", "{place}/c.safetensors", "--target", "{place}/target"],
        ),
        ("target", ["demo", "--target", "{place}/target"]),
        ("target", ["doctor", "--target", "{place}/target"]),
        ("target", ["prepare", "{place}/one.jsonl", "{place}/prepared", "--target", "{place}/target"]),
        ("target", ["prompts", "--count", "1", "--output", "{place}/made.jsonl", "--target", "{place}/target"]),
        ("training.new_recipe", ["recipe", "--target", "{place}/target"]),
        ("training.train", ["train", "{place}/recipe.yaml", "--set", "run.folder={place}/new"]),
        ("training.train", ["cache-features", "{place}/recipe.yaml", "--set", "data.cached_features={place}/cache"]),
        ("training.pipeline", ["fit", "--target", "{place}/target", "--output", "{place}/fitted"]),
        ("study.ablation", ["ablate", "{place}/study.yaml"]),
        ("study.ablation", ["ablate", "{place}/study.yaml", "--dry-run"]),
        ("study.compare", ["compare", "{place}/run", "{place}/run"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_code_of_a_target_runs_only_where_the_command_line_trusts_it(place, monkeypatch, module, args):
    trusted = []

    def load(path, trust_remote_code=False, adapter_path=None):
        trusted.append(trust_remote_code)
        raise Loaded

    monkeypatch.setattr(f"dflash.{module}.load_target", load)
    for options in ([], ["--trust-remote-code"]):
        answer = invoke(*(arg.format(place=place) for arg in args), *options)
        assert isinstance(answer.exception, Loaded), answer.output
    assert trusted == [False, True]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, its dataset, a run, a recipe and a study."""
    folder = tmp_path_factory.mktemp("trust")
    write_target(folder / "target")
    write_dataset(folder / "data", folder / "target")
    (folder / "one.jsonl").write_text('{"prompt": "Hi"}')
    train(recipe(folder, "run", "run.steps=1"))
    (folder / "study.yaml").write_text(
        f"{{folder: {folder}/study, target: {folder}/target, vary: {{decode.drafter: [ngram]}}}}"
    )
    return folder


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["qwen3"], "no bundled recipe 'qwen3'; did you mean 'qwen3-4b'"),
        (["qwen3-4b", "--target", "x"], "not both"),
        (["qwen3-4b", "--set", "run.epochs=2"], "not both"),
        (["--data", "/nowhere"], "/nowhere holds no dataset"),
        (["--set", "run.epoch=2"], "the proposed recipe: run: unknown key 'epoch'; did you mean 'epochs'"),
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
