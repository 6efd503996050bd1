"""Fingerprints of targets: the same after any reload, another after the least change of weights or config."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.gguf import gguf_metadata, gguf_tensors, write_gguf
from support.models import TEXT_VOCAB, ScriptModel, llama_model, qwen3_model, save_target

from dflash import LoadedTargetModel, load_target
from dflash.target.identity import norm_fingerprint, target_fingerprint
from dflash.target.import_gguf import import_gguf


def fingerprint(model) -> str:
    return target_fingerprint(LoadedTargetModel(model))


def test_a_target_has_the_same_fingerprint_wherever_it_comes_from(tmp_path):
    model = qwen3_model(0, TEXT_VOCAB)
    model.apply(lambda w: w.astype(mx.bfloat16))
    once = fingerprint(model)
    assert len(once) == 64
    assert target_fingerprint(load_target(save_target(model, tmp_path))) == once  # float32 on a CPU
    assert fingerprint(qwen3_model(0, TEXT_VOCAB)) != once  # not rounded to bfloat16


def nudged(*path: str):
    """A target of which one weight, of layer 2, is another."""
    model = qwen3_model(0, 32)
    module = model.layers[2]
    for name in path:
        module = module[name]
    module.weight = module.weight * 1.01
    return model


OTHERS = {
    "other seed": lambda: qwen3_model(1, 32),
    "other architecture": lambda: llama_model(0, 32),
    "one norm of a fine-tuned copy": lambda: nudged("self_attn", "k_norm"),
    "more tokens": lambda: qwen3_model(0, 48),
    "fewer layers": lambda: qwen3_model(0, 32, layers=3),
    "one weight of a fine-tuned copy": lambda: nudged("mlp", "up_proj"),
    "other base of rotary positions": lambda: qwen3_model(0, 32, rope_theta=20_000.0),
    "untied head": lambda: qwen3_model(0, 32, tied=False),
}
SAME_NORMS = ("one weight of a fine-tuned copy", "other base of rotary positions", "untied head")


@pytest.mark.parametrize("other", OTHERS)
def test_another_target_has_another_fingerprint_and_other_norms(other):
    model, another = qwen3_model(0, 32), OTHERS[other]()
    assert fingerprint(another) != fingerprint(model)
    norms = [norm_fingerprint(LoadedTargetModel(m)) for m in (model, another)]
    assert [len(found) for found in norms] == [64, 64]
    assert other in SAME_NORMS or norms[0] != norms[1]


# --- norms --------------------------------------------------------------------------------------------------


def test_a_target_has_the_same_norms_at_every_precision_and_in_every_format(tmp_path):
    model = llama_model(0, TEXT_VOCAB, intermediate_size=64)
    hub = load_target(save_target(model, tmp_path / "hub"))
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(hub.model), gguf_metadata(hub.model), "Q4_1")
    found = {"float32": LoadedTargetModel(model), "bfloat16": hub}
    for name, dtype in (("packed", None), ("unpacked", "float32")):
        import_gguf(path, tmp_path / name, dtype)
        found[name] = load_target(tmp_path / name)
    assert "scales" in found["packed"].model.layers[0].mlp.up_proj
    assert len({target_fingerprint(target) for target in found.values()}) == 4
    assert len({norm_fingerprint(target) for target in found.values()}) == 1
    nn.quantize(model, group_size=32, bits=8)
    assert norm_fingerprint(LoadedTargetModel(model)) == norm_fingerprint(hub)


def test_a_target_without_norms_has_no_such_fingerprint():
    assert norm_fingerprint(LoadedTargetModel(ScriptModel([1, 2], 32))) is None
