"""A small target from its recipe, as the command makes it: once, and never mixed with another."""

from pathlib import Path

import pytest
import yaml

from dflash import load_target
from dflash.training.toy.small_target import main

CONFIG = {
    "model_type": "gemma3_text", "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "query_pre_attn_scalar": 4, "sliding_window": 6, "sliding_window_pattern": 2,
}  # fmt: skip


def small_recipe(tmp_path: Path, steps: int = 2) -> str:
    values = {
        "folder": str(tmp_path / "run"),
        "tokenizer": {"samples": 40, "seed": 1, "vocab_size": 280},
        "heldout": {"samples": 2, "seed": 1, "max_tokens": 2},
        "target": {"config": CONFIG, "samples": 8, "fit": {"steps": steps, "log_every": 2}},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


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
