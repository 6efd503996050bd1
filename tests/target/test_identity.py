"""Fingerprints of targets: the same after any reload, another after the least change of weights or config."""

import mlx.core as mx
import pytest
from support.models import TEXT_VOCAB, llama_model, qwen3_model, save_target

from dflash import LoadedTargetModel, load_drafter, load_target
from dflash.generate import PAIR
from dflash.target.identity import target_fingerprint


def fingerprint(model) -> str:
    return target_fingerprint(LoadedTargetModel(model))


def test_a_target_has_the_same_fingerprint_wherever_it_comes_from(tmp_path):
    model = qwen3_model(0, TEXT_VOCAB)
    model.apply(lambda w: w.astype(mx.bfloat16))
    once = fingerprint(model)
    assert len(once) == 64
    assert target_fingerprint(load_target(save_target(model, tmp_path))) == once  # float32 on a CPU
    assert fingerprint(qwen3_model(0, TEXT_VOCAB)) != once  # not rounded to bfloat16


def nudged():
    model = qwen3_model(0, 32)
    model.layers[2].mlp.up_proj.weight = model.layers[2].mlp.up_proj.weight * 1.001
    return model


OTHERS = {
    "other seed": lambda: qwen3_model(1, 32),
    "one weight of a fine-tuned copy": nudged,
    "other base of rotary positions": lambda: qwen3_model(0, 32, rope_theta=20_000.0),
    "untied head": lambda: qwen3_model(0, 32, tied=False),
    "other architecture": lambda: llama_model(0, 32),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_target_has_another_fingerprint(other):
    assert fingerprint(OTHERS[other]()) != fingerprint(qwen3_model(0, 32))


def test_the_bundled_drafter_names_the_bundled_target():
    assert load_drafter(PAIR / "drafter").config.target_fingerprint == target_fingerprint(load_target(PAIR / "target"))
