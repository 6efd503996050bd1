"""The toy target: made from its recipe, trained on answers, saved as mlx-lm loads it."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import yaml
from mlx.utils import tree_map
from support.models import randomize

from dflash import load_target
from dflash.core.settings import SettingsError
from dflash.training.loop.settings import FitSettings
from dflash.training.toy.small_target import main
from dflash.training.toy.target import (
    FAMILIES,
    TargetSettings,
    answer_loss,
    answer_positions,
    build_target,
    hidden_states,
    model_config,
    save_target,
)
from dflash.training.toy.tokenizer import save_tokenizer, train_tokenizer

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 4, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "qwen3": SIZES | {"model_type": "qwen3"},
    "gemma3_text": SIZES
    | {"model_type": "gemma3_text", "query_pre_attn_scalar": 4, "sliding_window": 6, "sliding_window_pattern": 2},
}


def settings_of(family: str) -> TargetSettings:
    return TargetSettings(CONFIGS[family], FitSettings(1), 1)


def small_recipe(tmp_path: Path, steps: int = 2) -> str:
    values = {
        "folder": str(tmp_path / "run"),
        "tokenizer": {"samples": 40, "seed": 1, "vocab_size": 280},
        "heldout": {"samples": 2, "seed": 1, "max_tokens": 2},
        "target": {"config": CONFIGS["gemma3_text"], "samples": 8, "fit": {"steps": steps, "log_every": 2}},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_target_loads_as_the_same_model(family, tmp_path):
    model = build_target(settings_of(family), 40, 3)
    save_tokenizer(train_tokenizer(["f(x): [12, 345]"], 300), tmp_path / "tokenizer", 64)
    model.apply(lambda weight: weight.astype(mx.bfloat16).astype(mx.float32))  # as it is saved
    save_target(model, model_config(settings_of(family), 40, 3), tmp_path / "tokenizer", tmp_path / "target")
    tokens = mx.random.randint(0, 40, (2, 11))
    assert mx.array_equal(load_target(tmp_path / "target").model(tokens), model(tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_in_training_are_those_of_mlx_lm_and_every_weight_learns(family):
    model = randomize(build_target(settings_of(family), 40, 3), 1)
    tokens = mx.random.randint(0, 40, (3, 17), key=mx.random.key(0))
    expected = model.model(tokens)
    assert mx.abs(expected).max() > 1
    assert mx.abs(hidden_states(model, tokens) - expected).max() < 1e-4
    gradients = nn.value_and_grad(model, answer_loss)(model, tokens, mx.arange(3, 12))[1]
    reached = tree_map(lambda gradient: mx.abs(gradient).max().item() > 0, gradients)
    assert all(value for _, value in nn.utils.tree_flatten(reached))


def test_answer_loss_is_the_mean_over_answer_tokens():
    model, tokens = build_target(settings_of("qwen3"), 40, 3), mx.random.randint(0, 40, (2, 9))
    loss_mask = np.zeros((2, 9), bool)
    loss_mask[0, 3:9] = loss_mask[1, 5:7] = True
    losses = nn.losses.cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])
    expected = mx.concatenate([losses[0, 2:8], losses[1, 4:6]]).mean()
    positions = mx.array(answer_positions(loss_mask))
    assert answer_loss(model, tokens, positions).item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SIZES | {"model_type": "llama"}, "model_type must be one of qwen3, gemma3_text, got 'llama'"),
        (SIZES | {"model_type": ["qwen3"]}, r"model_type must be one of .*, got \['qwen3'\]"),
        (CONFIGS["qwen3"] | {"hidden_sise": 8}, "config: unknown key 'hidden_sise'; did you mean 'hidden_size'"),
        (CONFIGS["gemma3_text"] | {"vocab_size": 8}, "config: unknown key 'vocab_size'"),
        ({"model_type": "qwen3", "hidden_size": 8}, "config: num_hidden_layers missing"),
    ],
)
def test_a_target_that_cannot_be_made_is_refused(config, message):
    with pytest.raises(SettingsError, match=message):
        TargetSettings(config, FitSettings(1), 1)


def test_a_small_target_is_trained_once_and_refuses_another_recipe(tmp_path):
    main([small_recipe(tmp_path)])
    model = tmp_path / "run" / "target" / "model.safetensors"
    loaded, made = load_target(model.parent), model.stat().st_mtime_ns
    assert loaded.adapter.config.model_type == "gemma3_text"
    assert loaded.build_prompt("Hi")
    main([small_recipe(tmp_path)])
    assert model.stat().st_mtime_ns == made
    with pytest.raises(SystemExit, match=r"error: .* target.fit.steps 2, .* 5"):
        main([small_recipe(tmp_path, steps=5)])
    with pytest.raises(SystemExit, match=r"error: .*nope.yaml"):
        main([str(tmp_path / "nope.yaml")])
