"""A recipe for any target: complete, valid, commented, and small enough for the machine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.models import random_drafter

from dflash import load_target
from dflash.adapters.qwen import QwenAdapter
from dflash.core.errors import TrainingError
from dflash.core.settings import from_yaml, to_dict
from dflash.training import new_recipe
from dflash.training.new_recipe import as_yaml, propose_recipe, training_memory
from dflash.training.recipe import Recipe
from dflash.training.train import train


@pytest.fixture(scope="module")
def proposal(folder):
    return propose_recipe(str(folder / "target"), folder / "data", folder / "proposed")


def test_the_file_holds_every_setting_with_its_meaning_and_is_the_recipe(proposal):
    text = as_yaml(proposal)
    assert from_yaml(Recipe, text, "there") == proposal.recipe
    lines = {line.partition(":")[0].strip(): line for line in text.splitlines() if not line.startswith("#")}
    for section, values in to_dict(proposal.recipe).items():
        for key in values if isinstance(values, dict) else ():
            assert "  # " in lines[key], f"{section}.{key}"
    assert "# Memory, by arithmetic: about" in text
    assert "# Time: a step of" in text


def test_layers_lengths_and_mask_are_those_of_target_and_data(proposal):
    recipe = proposal.recipe
    assert all(0 <= layer < 4 for layer in recipe.drafter.target_layer_ids)
    assert recipe.data.max_length == 64  # the longest sequence has fewer tokens
    assert recipe.drafter.window == 64
    assert recipe.drafter.mask_token == "<|mask|>"
    assert "neither the tokenizer nor the dataset" in proposal.reasons["drafter.mask_token"]


@pytest.mark.parametrize(
    ("given", "window"), [("data.max_length=48", 48), ("drafter.window=20", 20), ("drafter.window=null", None)]
)
def test_the_window_is_the_longest_sequence_of_training_unless_it_is_set(folder, given, window):
    found = propose_recipe(str(folder / "target"), folder / "data", overrides=[given])
    assert found.recipe.drafter.window == window
    assert ("drafter.window" in found.reasons) == given.startswith("data")


def test_it_trains_as_it_is(proposal, folder):
    text = as_yaml(proposal)
    short = ["run.evaluate_prompts=1", "run.evaluate_tokens=4", "run.steps=2"]
    train(from_yaml(Recipe, text, "there", short))
    assert (folder / "proposed" / "drafter" / "model.safetensors").exists()


def test_what_is_set_is_known_before_the_rest_is_proposed(folder, monkeypatch):
    width = load_target(folder / "target").hidden_size
    monkeypatch.setattr(
        QwenAdapter, "config", property(lambda self: SimpleNamespace(hidden_size=width, vocab_size=264))
    )
    target, given = str(folder / "target"), ["drafter.num_attention_heads=4", "data.max_blocks_per_batch=64"]
    with pytest.raises(TrainingError, match="gives no intermediate_size, num_key_value_heads; set drafter"):
        propose_recipe(target, overrides=given)
    found = propose_recipe(target, overrides=[*given, "drafter.intermediate_size=32", "drafter.num_key_value_heads=2"])
    assert (found.recipe.drafter.num_attention_heads, found.recipe.data.max_blocks_per_batch) == (4, 64)
    assert "data.max_blocks_per_batch" not in found.reasons


@pytest.mark.parametrize("given", [[], ["run.steps=7", "drafter.num_hidden_layers=2"]])
def test_a_quick_recipe_has_small_steps_for_some_minutes_and_what_is_set_wins(folder, monkeypatch, given):
    monkeypatch.setattr(new_recipe, "_trial", lambda *_: 0.5)  # seconds of a batch
    found = propose_recipe(str(folder / "target"), folder / "data", overrides=given, quick=True)
    recipe = found.recipe
    assert (recipe.run.batches_per_step, recipe.data.anchors, recipe.run.evaluate_prompts) == (1, 16, 8)
    assert (recipe.run.steps, recipe.drafter.num_hidden_layers) == ((7, 2) if given else (360, 1))
    assert ("run.steps" in found.reasons) == (not given)
    assert recipe.run.evaluate_every == (4 if given else 180)


@pytest.mark.parametrize("given", ["drafter.kind=dspark", "objective.kind=kl"])
def test_what_learns_from_the_targets_logits_is_timed_too(folder, given):
    assert propose_recipe(str(folder / "target"), folder / "data", overrides=[given]).recipe.run.steps is None


def test_without_an_unused_token_the_mask_has_to_be_set(folder, monkeypatch):
    monkeypatch.setattr(new_recipe, "unused_tokens", lambda *_: [])
    with pytest.raises(TrainingError, match=r"no mask token\. Set drafter\.mask_token to one that your data does not"):
        propose_recipe(str(folder / "target"), folder / "data")
    found = propose_recipe(str(folder / "target"), folder / "data", overrides=["drafter.mask_token=5"])
    assert (found.recipe.drafter.mask_token, "drafter.mask_token" in found.reasons) == (5, False)


@pytest.mark.parametrize(("steps", "expected"), [(None, (1, 3)), (7, (1, 4)), (40, (4, 20)), (3000, (10, 1000))])
def test_a_short_run_logs_and_evaluates_on_the_way_and_little_data_is_warned_of(folder, caplog, steps, expected):
    given = [] if steps is None else [f"run.steps={steps}"]
    run = propose_recipe(str(folder / "target"), folder / "data", overrides=given).recipe.run
    assert (run.log_every, run.evaluate_every) == expected
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning == "The data makes 6 steps in 6 epochs: so little data teaches a drafter little."


def test_data_for_less_than_a_step_makes_a_smaller_step(folder):
    given = ["data.batch_tokens=100000", "data.max_blocks_per_batch=100000"]
    found = propose_recipe(str(folder / "target"), folder / "data", overrides=given)
    assert found.recipe.run.batches_per_step == 6
    assert found.reasons["run.batches_per_step"] == "the data makes 6 in 6 epochs"


def test_less_memory_means_fewer_blocks_at_once_in_as_large_steps(folder, monkeypatch):
    found = []
    for gigabytes in (64.0, 0.04):
        monkeypatch.setattr(new_recipe, "machine_memory", lambda size=gigabytes: int(size * 1e9))
        found.append(propose_recipe(str(folder / "target")).recipe)
    roomy, tight = found
    assert (roomy.data.max_blocks_per_batch, roomy.run.grad_checkpoint) == (1024, False)
    assert tight.data.max_blocks_per_batch < 1024
    for recipe in found:
        assert recipe.data.max_blocks_per_batch * recipe.run.batches_per_step == 8192


def test_a_machine_that_is_too_small_is_said_so(folder, monkeypatch):
    monkeypatch.setattr(new_recipe, "machine_memory", lambda: 1000)
    with pytest.raises(TrainingError, match=r"needs \d+ GB even with small batches; this machine has 0 GB"):
        propose_recipe(str(folder / "target"))


def test_memory_holds_the_logits_of_the_tokens_that_the_drafter_knows(proposal):
    target, drafter = load_target(proposal.recipe.target), random_drafter(3, 200)

    def saved(chunk: int) -> int:
        recipe = replace(proposal.recipe, objective=replace(proposal.recipe.objective, chunk=chunk))
        drafter.config = whole = replace(drafter.config, draft_vocab_size=None)
        of_whole = training_memory(recipe, target, drafter).batch
        drafter.config = replace(whole, draft_vocab_size=50)
        return of_whole - training_memory(recipe, target, drafter).batch

    assert saved(16) == 3 * 16 * (200 - 50) * 4
    assert saved(32) == 2 * saved(16)
