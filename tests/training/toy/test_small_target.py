"""A small target from its recipe, by the command: once, and never mixed with another."""

import subprocess
import sys
from pathlib import Path

import yaml

import dflash  # noqa: F401  (loads a fast BLAS before MLX)
from dflash import load_target

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


WORLD = {
    "tokenizer": {"samples": 200, "seed": 1, "vocab_size": 300},
    "heldout": {"samples": 4, "seed": 1, "max_tokens": 4},
}


def small_recipe(tmp_path: Path, **fit: int) -> Path:
    target = {"config": CONFIGS["gemma3_text"], "samples": 30, "fit": {"steps": 4, "log_every": 2, **fit}}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(WORLD | {"folder": str(tmp_path / "run"), "target": target}))
    return path


def small_target(recipe: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash.training.toy.small_target", str(recipe)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_small_target_is_trained_saved_and_not_trained_again(tmp_path):
    first = small_target(small_recipe(tmp_path))
    assert first.returncode == 0, first.stderr
    model = tmp_path / "run" / "target" / "model.safetensors"
    loaded, made = load_target(model.parent), model.stat().st_mtime_ns
    assert loaded.adapter.config.model_type == "gemma3_text"
    assert loaded.build_prompt("Hi")
    assert small_target(small_recipe(tmp_path)).returncode == 0
    assert model.stat().st_mtime_ns == made


def test_a_small_target_of_another_recipe_is_not_mixed_in(tmp_path):
    assert small_target(small_recipe(tmp_path)).returncode == 0
    other = small_target(small_recipe(tmp_path, steps=5))
    assert other.returncode == 1
    assert "belongs to a run with target.fit.steps 4, this one has 5" in other.stderr.splitlines()[-1]
    missing = small_target(tmp_path / "nope.yaml")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
