"""Weights load in every type and vocabulary that they are published in, and tables that do not fit are refused."""

import json

import mlx.core as mx
import numpy as np
import pytest
from support.packagings import (
    BY_TYPE,
    FULL,
    HIDDEN,
    KNOWN,
    NOISE,
    SLIDING,
    VOCAB,
    logits,
    plain,
    reduced,
    renamed,
    with_copies,
    write,
)

from dflash import load_drafter, save_drafter
from dflash.core.errors import CheckpointError


@pytest.mark.parametrize("stored", [mx.bfloat16, mx.float16])
def test_weights_of_every_floating_point_type_load(tmp_path, stored):
    config, weights = plain()
    weights = {n: w.astype(mx.bfloat16).astype(mx.float32) for n, w in weights.items()}
    folder = write(tmp_path / "other", config, {n: w.astype(stored) for n, w in weights.items()})
    np.testing.assert_allclose(logits(folder), logits(write(tmp_path / "plain", config, weights)), atol=1e-5)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("tables", ["d2t and t2d", "d2t", "t2d"])
def test_a_reduced_vocabulary_drafts_the_targets_ids(tmp_path, head, tables):
    config, weights = plain()
    whole = logits(write(tmp_path / "plain", config, weights))
    folder = write(tmp_path / "reduced", *reduced(config, weights, head, tables))
    drafts = logits(folder)
    np.testing.assert_allclose(drafts[:, KNOWN], whole[:, KNOWN], atol=1e-4)
    assert np.isneginf(np.delete(drafts, KNOWN, axis=1)).all()
    save_drafter(load_drafter(folder), tmp_path / "again", dtype=mx.float32)
    np.testing.assert_array_equal(logits(tmp_path / "again"), drafts)


def broken_table(weights: dict, **changes) -> dict:
    return {n: w for n, w in (weights | changes).items() if w is not None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d2t": None, "t2d": None}, "lacks d2t"),
        ({"d2t": mx.zeros(5, mx.int64)}, "d2t has shape \\(5,\\)"),
        ({"d2t": mx.zeros(6)}, "expected 6 whole numbers"),
        ({"d2t": mx.full(6, 99), "t2d": None}, "different ids below 32"),
        ({"d2t": mx.array([1, 0, 0, 0, 0, 0]), "t2d": None}, "different ids below 32"),
        ({"t2d": mx.ones(VOCAB, mx.bool_)}, "the same in both tables"),
        ({"t2d": mx.ones(9, mx.bool_)}, "t2d has shape \\(9,\\)"),
        ({"lm_head.weight": mx.zeros((7, HIDDEN))}, "lm_head.weight has shape \\(7, 32\\)"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, changes, words):
    config, weights = reduced(*plain(), head=True, tables="d2t and t2d")
    with pytest.raises(CheckpointError, match=words):
        load_drafter(write(tmp_path, config, broken_table(weights, **changes)))


def test_packagings_mix(tmp_path):
    """Speculators, prefixed, packed, in two files, with a reduced vocabulary, biases and a rope by layer type."""
    meaning = {"attention_bias": True, "intermediate_size": 64, "head_dim": 16, "layer_types": (SLIDING, FULL)}
    config, weights = plain(**meaning, sliding_window=5, rope_parameters=BY_TYPE)
    assert sum(name.endswith("_proj.bias") for name in weights) == 4 * len(meaning["layer_types"])
    packed_config, packed = reduced(config, weights, head=True, tables="d2t and t2d")
    packed_config |= {"sliding_window": 5}
    dense = dict(packed)
    for name in [name for name, w in weights.items() if w.ndim == 2]:
        parts = mx.quantize(packed[name], group_size=32, bits=8)
        dense[name] = mx.dequantize(*parts, group_size=32, bits=8)
        layer = name.removesuffix(".weight")
        packed |= dict(zip((name, f"{layer}.scales", f"{layer}.biases"), parts, strict=True))
    packed = renamed(with_copies(dense) | packed, lambda name: f"model.{name}")
    files = {f"model-0000{i}-of-00002.safetensors": sorted(packed)[i - 1 :: 2] for i in (1, 2)}
    folder = tmp_path / "mixed"
    folder.mkdir()
    for file, names in files.items():
        mx.save_safetensors(str(folder / file), {name: packed[name] for name in names})
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    quantization = {"quantization": {"group_size": 32, "bits": 8, "model.lm_head": False}}
    (folder / "config.json").write_text(json.dumps(packed_config | quantization | NOISE | quantization))

    drafts = logits(folder)
    np.testing.assert_allclose(drafts, logits(write(tmp_path / "plain", packed_config, dense)), atol=1e-3, rtol=1e-4)
    save_drafter(load_drafter(folder), tmp_path / "again", dtype=mx.float32)
    np.testing.assert_array_equal(logits(tmp_path / "again"), drafts)
