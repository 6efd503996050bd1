"""A new drafter has the shape that recipe and target say."""

import pytest
from support.runs import recipe

import dflash
from dflash.errors import TrainingError
from dflash.training.drafters.init import mask_token_id, new_drafter


def test_the_mask_token_is_a_text_an_id_or_the_tokenizers_own(folder):
    target = dflash.load_target(folder / "target")
    assert mask_token_id("<|mask|>", target) == target.tokenizer.get_vocab()["<|mask|>"]
    assert mask_token_id(263, target) == 263
    for wrong, message in (("<nix>", "no token '<nix>'"), (264, "not among the target's 264"), (None, "no mask token")):
        with pytest.raises(TrainingError, match=message):
            mask_token_id(wrong, target)


def test_sizes_that_the_recipe_leaves_open_are_the_targets(folder):
    values = recipe(folder, "x", "drafter.intermediate_size=null")
    config = new_drafter(values.drafter, dflash.load_target(folder / "target")).config
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (48, 4, 2)
    assert (config.head_dim, config.rope_theta) == (12, 10_000.0)
