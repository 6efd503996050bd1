"""The toy target: made from its settings, trained on answers, saved as mlx-lm loads it."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash import load_target
from dflash.core.settings import SettingsError
from dflash.training.loop.fit import FitSettings
from dflash.training.toy.quick_forward import FAMILIES
from dflash.training.toy.target import (
    TargetSettings,
    answer_loss,
    answer_positions,
    build_target,
    model_config,
    rounded_to_bfloat16,
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


TEXTS = ["def f(x):\n    return [x, 12, 345]\n", "How many? Answer: 27", "  naïve — 東京\t!"]


def mask(length, *spans):
    """A loss mask ``[1, length]`` that is true on the half-open ``spans``."""
    return np.array([[any(a <= i < b for a, b in spans) for i in range(length)]])


def tiny_target(family: str = "qwen3") -> nn.Module:
    return build_target(TargetSettings(CONFIGS[family], FitSettings(1), 1), 40, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_target_loads_as_the_same_model(family, tmp_path):
    model, settings = tiny_target(family), TargetSettings(CONFIGS[family], FitSettings(1), 1)
    save_tokenizer(train_tokenizer(TEXTS, 300), tmp_path / "tokenizer", 64)
    rounded_to_bfloat16(model)
    save_target(model, model_config(settings, 40, 3), tmp_path / "tokenizer", tmp_path / "target")
    tokens = mx.random.randint(0, 40, (2, 11))
    assert mx.array_equal(load_target(tmp_path / "target").model(tokens), model(tokens))


def test_answer_loss_is_the_mean_over_answer_tokens():
    model = tiny_target()
    tokens, loss_mask = mx.random.randint(0, 40, (2, 9)), np.concatenate([mask(9, (3, 9)), mask(9, (5, 7))])
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
