"""The drafter of a run: new, with the shape that recipe and target say, or one that exists already."""

from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from support.runs import recipe

import dflash
from dflash import DFlashConfig, DFlashDraftModel, save_drafter
from dflash.core.errors import DFlashError, TrainingError
from dflash.drafters.kinds import drafters
from dflash.target.identity import target_fingerprint
from dflash.training.drafters.init import drafter_config, mask_token_id, new_drafter
from dflash.training.recipe import DrafterShape


def test_the_mask_token_is_a_text_an_id_or_the_tokenizers_own(folder):
    target = dflash.load_target(folder / "target")
    assert mask_token_id("<|mask|>", target) == target.tokenizer.get_vocab()["<|mask|>"]
    assert mask_token_id(263, target) == 263
    for wrong, message in (
        ("<nix>", r"no token '<nix>'; set drafter.mask_token to .*<\|mask\|>"),
        (264, "not among the target's 264"),
        (None, r"no mask token; set drafter.mask_token to .*<\|mask\|>"),
    ):
        with pytest.raises(TrainingError, match=message):
            mask_token_id(wrong, target)


def test_sizes_that_the_recipe_leaves_open_are_the_targets(folder):
    values = recipe(folder, "x", "drafter.intermediate_size=null")
    config = new_drafter(values.drafter, dflash.load_target(folder / "target")).config
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (48, 4, 2)
    assert (config.head_dim, config.rope_theta) == (12, 10_000.0)


def test_a_new_drafter_says_which_target_it_is_for_and_which_layers_it_reads(folder, caplog):
    target = dflash.load_target(folder / "target")
    values = recipe(folder, "x", "drafter.target_layer_ids=[]", "drafter.num_hidden_layers=2")
    with caplog.at_level("INFO", logger="dflash"):
        config = drafter_config(values.drafter, target)
    assert config.target_layer_ids == (1, 1 + target.num_layers - 4)
    assert f"evenly spread layers, {list(config.target_layer_ids)}" in caplog.text
    assert config.target_fingerprint == target_fingerprint(target)
    assert config.input_embedding_scale == 1
    caplog.clear()
    new_drafter(values.drafter, target).bind(target)
    assert "another target" not in caplog.text


def test_a_window_is_that_of_every_layer_and_blocks_see_themselves_both_ways(folder):
    target, shape = dflash.load_target(folder / "target"), recipe(folder, "x", "drafter.window=9").drafter
    config = new_drafter(replace(shape, num_hidden_layers=3), target).config
    assert [config.window(layer) for layer in range(3)] == [9, 9, 9]
    assert not any(config.causal_in_block(layer) for layer in range(3))
    with pytest.raises(TrainingError, match=r"options\.sliding_window is not .*; set drafter\.window"):
        new_drafter(replace(shape, options={"sliding_window": 5}), target)


@dataclass(frozen=True)
class WideConfig(DFlashConfig):
    width: int = 1


class Wide(DFlashDraftModel):
    """A kind with an option of its own."""

    config_class = WideConfig


def test_a_recipe_makes_a_registered_kind_with_its_options(folder):
    target = dflash.load_target(folder / "target")
    wrong = {
        "drafter.options={witdh: 3}": r"kind 'wide' has no option 'witdh'; did you mean 'width'\?",
        "drafter.options={block_size: 3}": "set drafter.block_size instead",
        "drafter.kind=wyde": r"Unknown drafter 'wyde'; did you mean 'wide'\?",
    }
    with drafters.temporary("wide", Wide):
        model = new_drafter(recipe(folder, "x", "drafter.kind=wide", "drafter.options={width: 3}").drafter, target)
        assert (type(model), model.config.width, model.config.block_size) == (Wide, 3, 4)
        for option, message in wrong.items():
            with pytest.raises(DFlashError, match=message):
                new_drafter(recipe(folder, "x", "drafter.kind=wide", option).drafter, target)


def test_a_kind_that_cannot_be_trained_is_refused(folder):
    target = dflash.load_target(folder / "target")
    message, kind = r"drafter\.kind 'frozen' cannot be trained", type("Frozen", (), {"config_class": dict})
    with drafters.temporary("frozen", kind), pytest.raises(TrainingError, match=message):
        new_drafter(recipe(folder, "x", "drafter.kind=frozen").drafter, target)


def test_a_run_starts_from_the_weights_of_a_given_drafter(folder, tmp_path, caplog):
    target, values = dflash.load_target(folder / "target"), recipe(folder, "x")
    first = new_drafter(values.drafter, target)
    first.config = replace(first.config, target_fingerprint="of another fine-tuning")
    save_drafter(first, tmp_path / "first", mx.float32)
    again = new_drafter(DrafterShape(from_=str(tmp_path / "first")), target)
    for (name, weight), (_, expected) in zip(
        tree_flatten(again.parameters()), tree_flatten(first.parameters()), strict=True
    ):
        assert weight.dtype == mx.float32
        assert mx.array_equal(weight, expected), name
    assert again.config.target_fingerprint == target_fingerprint(target)
    assert "another target" not in caplog.text
    assert drafter_config(DrafterShape(from_=str(tmp_path / "first")), target) == again.config
    longer = new_drafter(DrafterShape(from_=str(tmp_path / "first"), block_size=8), target)
    assert (again.config.block_size, longer.config.block_size, longer.block_size) == (4, 8, 8)
    for other, message in (
        ({"num_hidden_layers": 7}, r"drafter.num_hidden_layers is 7, but .*first has \d. A drafter keeps its shape"),
        ({"mask_token": 5}, r"drafter.mask_token is 5, but .*first has \d+"),
        ({"options": {"width": 1}}, "remove drafter.options, or drafter.from"),
        ({"window": 8}, r"drafter.window is 8, but .*first has None"),
    ):
        with pytest.raises(TrainingError, match=message):
            new_drafter(DrafterShape(from_=str(tmp_path / "first"), **other), target)


def test_a_quantised_drafter_is_no_start(folder, tmp_path):
    target = dflash.load_target(folder / "target")
    model = new_drafter(recipe(folder, "x", "drafter.intermediate_size=64").drafter, target)
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda name, m: name.endswith("mlp.gate_proj"))
    save_drafter(model, tmp_path / "q")
    with pytest.raises(TrainingError, match="is quantised; start from its weights before quantisation"):
        new_drafter(DrafterShape(from_=str(tmp_path / "q")), target)
