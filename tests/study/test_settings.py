"""Studies as files: grids, groups, what the recipe's keys do, and mistakes in one line."""

import pytest
from support.cli import assert_one_error, invoke

from dflash.study.settings import combinations, label_of, make_cells


def test_all_combinations_are_cells_each_with_every_seed(make):
    cells = make_cells(make(seeds=[0, 5]))
    found = [(*cell.levels.values(), cell.seed) for cell in cells]
    assert found == [(g, b, s) for g in "72" for b in "42" for s in (0, 5)]
    for cell in cells:
        assert str(cell.recipe.objective.gamma) == f"{cell.levels['train.objective.gamma']}.0"
        assert str(cell.drafter["block_size"]) == cell.levels["decode.block_size"]
        assert cell.recipe.drafter.seed == cell.recipe.data.seed == cell.seed
        assert cell.drafter["drafter"] == "trained"


def test_one_at_a_time_keeps_the_others_at_their_first_values(make):
    vary = {"train.objective.gamma": [7, 2, 3], "decode.block_size": [4, 2], "decode.policy": ["full", "adaptive"]}
    found = [tuple(levels.values()) for levels in combinations(make(design="one_at_a_time", vary=vary))]
    base = ("7", "4", "full")
    assert found == [base, ("2", *base[1:]), ("3", *base[1:]), ("7", "2", "full"), ("7", "4", "adaptive")]


def test_a_group_changes_several_settings_together(make):
    groups = {
        "two": {"train.drafter.target_layer_ids": [0, 2], "decode.temp": 0},
        "one": {"train.drafter.target_layer_ids": [1], "decode.temp": 0.5},
    }
    two, one = make_cells(make(vary={"taps": groups}, seeds=[3]))
    assert (two.levels, one.levels) == ({"taps": "two"}, {"taps": "one"})
    assert two.recipe.drafter.target_layer_ids == (0, 2)
    assert one.recipe.drafter.target_layer_ids == (1,)
    assert (two.options["temp"], one.options["temp"], one.options["seed"]) == (0, 0.5, 3)
    assert "seed" not in two.options  # nothing is drawn
    assert label_of([0, 2]) == "[0, 2]"


def test_the_studys_training_settings_replace_keys_and_another_kind_replaces_a_section(make):
    train = {"run.steps": 5, "run": {"log_every": 2}, "optimizer": {"kind": "muon", "decay_steps": 2}}
    (cell, *_) = make_cells(make(train=train))
    assert (cell.recipe.run.steps, cell.recipe.run.log_every, cell.recipe.run.checkpoint_every) == (5, 2, 2)
    assert (cell.recipe.optimizer.kind, cell.recipe.optimizer.decay_steps) == ("muon", 2)
    adamw = {"train.optimizer": [{"kind": "muon"}, {"kind": "adamw", "clip": 2}]}
    assert make_cells(make(train=train, vary=adamw))[1].recipe.optimizer.clip == 2


MISTAKES = [
    ({"varry": {}}, r"unknown key 'varry'; did you mean 'vary'"),
    ({"vary": {"decode.blocksize": [4]}}, r"decode: unknown key 'blocksize'; did you mean 'block_size'"),
    ({"vary": {"objective.gamma": [4]}}, r"unknown setting 'objective.gamma'; did you mean 'train.objective.gamma'"),
    ({"vary": {"train.objective.gamma": 4}}, r"vary: train.objective.gamma must be a list of values, got 4"),
    ({"vary": {"train.objective.gamma": [-1]}}, r"gamma must be above 0, got -1"),
    ({"vary": {"decode.policy": ["adaptiv"]}}, r"Unknown policy 'adaptiv'; did you mean 'adaptive'"),
    ({"vary": {"taps": {"one": [1]}}}, r"vary: taps: one must hold settings such as decode.block_size, got \[1\]"),
    ({"vary": {"decode.block_size": [4, 4]}}, r"vary: decode.block_size names a value twice"),
    ({"design": "grid"}, r"design is 'grid'; known are product, one_at_a_time"),
    ({"seeds": []}, r"seeds is empty"),
    ({"prompts": {"a": {"limits": 3}}}, r"prompts: a: unknown key 'limits'; did you mean 'limit'"),
    ({"decode": {"drafter": "ngram"}}, r"decode.drafter and recipe both say who drafts"),
    ({"recipe": None, "vary": {"train.run.steps": [1]}}, r"vary: train.run.steps changes a recipe.* needs recipe"),
    ({"vary": {"decode.block_size": [4, -1]}}, r"study.yaml: decode.block_size must be .* at least 2, got -1"),
    ({"recipe": None, "train": {"run.steps": 1}}, r"train changes a recipe, and there is none"),
    ({"train": {"run.step": 5}}, r"run: unknown key 'step'; did you mean 'steps'"),
    ({"recipe": "qwen3-4"}, r"Cannot read the recipe qwen3-4: No such file"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_any_model_loads(write, changes, message):
    assert_one_error(invoke("ablate", write(**changes), "--dry-run"), message)


NGRAM = {"recipe": None, "train": {}}
UNFIT = [
    ({"vary": {"decode.block_size": [64, 4]}}, r"decode.block_size 64 is more than the drafter's own 4"),
    (
        NGRAM | {"vary": {"decode.block_size": [64]}, "decode": {"drafter": "ngram"}},
        r"decode.block_size 64 is more than the drafter's own 16",
    ),
    (NGRAM | {"vary": {"decode.draft_window": [8]}, "decode": {"drafter": "ngram"}}, r"decode: A window limits"),
    ({"vary": {"decode.top_k": [5, 10**6]}}, r"decode: top_k must be less than the target's vocabulary"),
    ({"vary": {"decode.policy": ["adaptive", None]}}, r"vary: decode.policy: adaptive and null are the same cell"),
    ({"vary": {"train.run.log_every": [1, 2]}}, r"vary: train.run.log_every: 1 and 2 are the same cell"),
]


@pytest.mark.parametrize(("changes", "message"), UNFIT)
def test_what_target_or_drafter_cannot_do_is_refused_before_anything_is_written(write, tmp_path, changes, message):
    for dry in (["--dry-run"], []):
        assert_one_error(invoke("ablate", write(**changes), *dry), message)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.5), ("stop", ["x"])])
def test_a_study_knows_options_by_all_of_their_names(make, name, value):
    own = {"temperature": "temp", "stop": "stop_strings"}[name]
    (cell,) = make_cells(make(recipe=None, vary={f"decode.{name}": [value]}))
    assert (cell.options[own], name in cell.options) == (value, False)


def test_a_study_without_a_recipe_decodes_what_is_there(make):
    (cell,) = make_cells(make(recipe=None, vary={"decode.drafter": ["ngram"]}))
    assert (cell.drafter, cell.recipe) == ({"drafter": "ngram"}, None)
