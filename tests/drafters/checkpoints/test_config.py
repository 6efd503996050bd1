"""``config.json``, as published: what parses, what is refused, and with which words."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import refused
from support.models import draft_config
from support.packagings import FULL, SLIDING

from dflash import DFlashConfig
from dflash.core.errors import CheckpointError

PUBLISHED = {  # for Qwen3-4B
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_target_layers": 36,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def without(*names: str) -> dict:
    return {k: v for k, v in PUBLISHED.items() if k not in names}


def nested(**changes) -> dict:
    return PUBLISHED | {"dflash_config": PUBLISHED["dflash_config"] | changes}


def test_a_published_config_is_written_with_the_keys_it_had():
    config = DFlashConfig.from_dict(PUBLISHED)
    written = json.loads(json.dumps(config.to_dict()))
    assert PUBLISHED.items() <= written.items()
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert config.layer_types == (FULL,) * 5
    assert not any(config.causal_in_block(i) or config.window(i) for i in range(5))
    assert DFlashConfig.from_dict(PUBLISHED | {"head_dim": None}).head_dim == 80


CONFIGS = st.builds(
    draft_config,
    vocab=st.integers(4, 99),
    block_size=st.integers(1, 32),
    head_dim=st.sampled_from([4, 12, 64]),
    target_layer_ids=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    layer_types=st.sampled_from([(), (FULL, SLIDING), (SLIDING, SLIDING)]),
    sliding_window=st.integers(1, 500),
    is_causal=st.sampled_from([None, True, False]),
    rope_theta=st.sampled_from([1e4, 1e6]),
    rope_scaling=st.sampled_from([None, {"rope_type": "linear", "factor": 2.0}]),
    input_embedding_scale=st.sampled_from([1.0, 16.0]),
    output_multiplier=st.sampled_from([1.0, 0.25]),
    final_logit_softcapping=st.sampled_from([None, 30.0]),
)


@given(CONFIGS)
def test_every_config_survives_its_published_form(config):
    published = json.loads(json.dumps(config.to_dict()))
    assert DFlashConfig.from_dict(published) == config
    assert published["architectures"] == ["DFlashDraftModel"]
    assert published["dflash_config"]["mask_token_id"] == config.mask_token_id
    assert published["dflash_config"]["target_layer_ids"] == list(config.target_layer_ids)


@pytest.mark.parametrize(
    ("changes", "causal"),
    [({}, [True, False, True, False, True]), ({"is_causal": True}, [True] * 5), ({"is_causal": False}, [False] * 5)],
)
def test_layer_types_choose_window_and_causality_for_each_layer_unless_one_holds_for_all(changes, causal):
    types = [SLIDING, FULL, SLIDING, FULL, SLIDING]
    for config in (PUBLISHED | changes, nested(**changes)):
        config = DFlashConfig.from_dict(config | {"layer_types": types, "sliding_window": 2048})
        assert [config.window(i) for i in range(5)] == [2048, None, 2048, None, 2048]
        assert [config.causal_in_block(i) for i in range(5)] == causal


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (36, 1, (18,)), (28, 1, (14,)), (28, 5, (1, 7, 13, 19, 25)), (8, 2, (1, 5))],
)
def test_missing_target_layer_ids_are_spread_evenly(target_layers, draft_layers, ids):
    config = without() | {
        "dflash_config": {"mask_token_id": 151669},
        "num_target_layers": target_layers,
        "num_hidden_layers": draft_layers,
    }
    assert DFlashConfig.from_dict(config).target_layer_ids == ids


BAD = {
    "unknown key": (PUBLISHED | {"hiden_size": 3}, ["unknown key", "hiden_size", "'hidden_size'"]),
    "unknown key inside": (nested(mask_token=3), ["dflash_config", "mask_token", "'mask_token_id'"]),
    "missing hidden_size": (without("hidden_size"), ["hidden_size", "missing"]),
    "missing mask": (without("dflash_config"), ["mask_token_id", "missing"]),
    "mask id too large": (nested(mask_token_id=151936), ["mask_token_id 151936", "outside", "151936 tokens"]),
    "mask id negative": (nested(mask_token_id=-1), ["mask_token_id -1", "outside"]),
    "mask id a string": (nested(mask_token_id="151669"), ["mask_token_id", "'151669'"]),
    "layer id too large": (nested(target_layer_ids=[1, 36]), ["target_layer_ids", "36", "0 to 35"]),
    "layer id negative": (nested(target_layer_ids=[-1, 3]), ["target_layer_ids", "-1", "0 to 35"]),
    "layer id a string": (nested(target_layer_ids=["1"]), ["target_layer_ids", "'1'"]),
    "layer ids not a list": (nested(target_layer_ids=3), ["target_layer_ids", "3"]),
    "block size 0": (nested(block_size=0), ["block_size", "positive", "0"]),
    "block size true": (PUBLISHED | {"block_size": True}, ["block_size", "True"]),
    "negative head size": (PUBLISHED | {"head_dim": -8}, ["head_dim", "-8"]),
    "heads do not group": (PUBLISHED | {"num_key_value_heads": 7}, ["num_attention_heads 32", "num_key_value_heads 7"]),
    "layer types too few": (PUBLISHED | {"layer_types": [FULL]}, ["layer_types", "1 layers", "5"]),
    "layer type unknown": (PUBLISHED | {"layer_types": [FULL] * 4 + ["linear"]}, ["layer_types", "linear", FULL]),
    "sliding without window": (PUBLISHED | {"layer_types": [SLIDING] * 5}, ["sliding_window"]),
    "attention bias a word": (PUBLISHED | {"attention_bias": "all"}, ["attention_bias", "'all'"]),
    "block size too large": (PUBLISHED | {"block_size": 100_000}, ["block_size 100000", "at most 512"]),
    "other activation": (PUBLISHED | {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "not supported"]),
    "other activation inside": (
        nested(hidden_activation="gelu") | {"hidden_act": "silu"},
        ["hidden_activation", "'gelu'", "not supported"],
    ),
    "dflash_config a list": (PUBLISHED | {"dflash_config": [1]}, ["dflash_config"]),
    "target's layers a text": (PUBLISHED | {"num_target_layers": "36"}, ["num_target_layers", "'36'"]),
    "scale not a number": (nested(input_embedding_scale=float("nan")), ["input_embedding_scale", "nan"]),
    "is_causal a word": (PUBLISHED | {"is_causal": "yes"}, ["is_causal", "'yes'"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_config_is_refused_in_one_telling_line(name):
    config, words = BAD[name]
    with pytest.raises(CheckpointError) as error:
        DFlashConfig.from_dict(config)
    refused(error, *words)


def test_layer_ids_that_are_assumed_are_named(caplog):
    with caplog.at_level(logging.WARNING):
        assert draft_config(target_layer_ids=(), num_target_layers=28, num_hidden_layers=2).target_layer_ids == (1, 25)
    assert "[1, 25]" in caplog.text
