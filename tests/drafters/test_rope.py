"""Rotary positions by every published recipe, against NumPy and the formulas of transformers."""

import math

import mlx.core as mx
import numpy as np
import pytest
from support import reference
from transformers import Qwen3Config

from dflash import DFlashConfig
from dflash.core.errors import CheckpointError
from dflash.drafters.checkpoints.formats import published_values
from dflash.drafters.rope import build_rope

DIMS, THETA, LONGEST = 16, 1e4, 64
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def yarn(factor: float, original: float, fast: float = 32.0, slow: float = 1.0, truncate: bool = True) -> np.ndarray:
    """Inverse frequencies of YaRN (arXiv:2309.00071, equations 17 to 23): blend of plain and interpolated ones."""
    inverse = reference.inverse_frequencies(DIMS, THETA, None)

    def pair(turns):
        return DIMS * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = (math.floor(pair(fast)), math.ceil(pair(slow))) if truncate else (pair(fast), pair(slow))
    low, high = max(low, 0), min(high, DIMS - 1)
    blend = np.clip((np.arange(DIMS // 2) - low) / (high - low), 0, 1)
    return inverse * (1 - blend) + inverse / factor * blend


def half_turned() -> np.ndarray:
    inverse = reference.inverse_frequencies(DIMS, THETA, None)
    return np.where(np.arange(DIMS // 2) < 4, inverse, 0.0)


PLAIN = reference.inverse_frequencies(DIMS, THETA, None)
RECIPES = {  # the config's words: inverse frequencies, and the factor on queries and keys
    "none": ({}, PLAIN, 1.0),
    "default": ({"rope_type": "default", "partial_rotary_factor": 0.25}, PLAIN, 1.0),
    "of images": ({"type": "mrope", "mrope_section": [2, 3, 3]}, PLAIN, 1.0),
    "linear": ({"type": "linear", "factor": 3.0}, PLAIN / 3, 1.0),
    "linear, beside a type": ({"type": "yarn", "rope_type": "linear", "factor": 3.0}, PLAIN / 3, 1.0),
    "llama3": (
        LLAMA3 | {"original_max_position_embeddings": 64},
        reference.inverse_frequencies(DIMS, THETA, LLAMA3 | {"original_max_position_embeddings": 64}),
        1.0,
    ),
    "yarn": (YARN, yarn(4, 64), 0.1 * math.log(4) + 1),
    "yarn, lone type": ({"type": "yarn", "factor": 4.0}, yarn(4, LONGEST), 0.1 * math.log(4) + 1),
    "yarn of gpt-oss": (
        YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
        yarn(4, 64, 20.0, 2.0, truncate=False),
        0.1 * math.log(4) + 1,
    ),
    "yarn with its own factor": (YARN | {"attention_factor": 1.5}, yarn(4, 64), 1.5),
    "yarn as in DeepSeek": (
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
        yarn(4, 64),
        (0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
    ),
    "yarn with half of DeepSeek's": (YARN | {"mscale": 0.7}, yarn(4, 64), 0.1 * math.log(4) + 1),
    "yarn without factor": (
        {"rope_type": "yarn", "original_max_position_embeddings": 16},
        yarn(4, 16),
        0.1 * math.log(4) + 1,
    ),
    "proportional": ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, half_turned(), 1.0),
    "dynamic, short": ({"rope_type": "dynamic", "factor": 2.0}, PLAIN, 1.0),
    "longrope, short": (LONGROPE | {"original_max_position_embeddings": 64}, PLAIN / np.array(SHORT), 1.0),
    "longrope, long": (
        LONGROPE | {"original_max_position_embeddings": 16},
        PLAIN / np.array(LONG),
        math.sqrt(1 + math.log(4) / math.log(16)),
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_turns_as_its_formula(recipe):
    parameters, inverse, scale = RECIPES[recipe]
    x = np.random.default_rng(0).normal(size=(2, 3, 5, DIMS)).astype(np.float32)
    rope = build_rope(DIMS, {"rope_theta": THETA} | parameters, LONGEST)
    for offset in (12, 50):
        turned = np.array(rope(mx.array(x), offset=offset))
        positions = np.arange(offset, offset + 5)
        expected = np.array([[reference.rope(x[b, h], positions, inverse) for h in range(3)] for b in range(2)]) * scale
        np.testing.assert_allclose(turned, expected, atol=2e-5)
    rows = np.array(rope(mx.array(x), offset=mx.array([12, 50])))
    np.testing.assert_allclose(rows[1], turned[1], atol=2e-5)


def test_dynamic_scaling_grows_with_the_sequence():
    parameters, length = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": THETA}, 160
    base = THETA * (2.0 * length / LONGEST - 1) ** (DIMS / (DIMS - 2))
    inverse = reference.inverse_frequencies(DIMS, base, None)
    x = np.random.default_rng(0).normal(size=(1, 1, 10, DIMS)).astype(np.float32)
    turned = np.array(build_rope(DIMS, parameters, LONGEST)(mx.array(x), offset=length - 10))
    expected = reference.rope(x[0, 0], np.arange(length - 10, length), inverse)
    np.testing.assert_allclose(turned[0, 0], expected, atol=1e-4)


def test_neighbours_are_pairs_in_the_traditional_style():
    x = np.random.default_rng(0).normal(size=(1, 1, 5, DIMS)).astype(np.float32)
    turned = np.array(build_rope(DIMS, YARN | {"rope_theta": THETA}, LONGEST, traditional=True)(mx.array(x), offset=9))
    halves = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    expected = reference.rope(halves[0, 0], np.arange(9, 14), yarn(4, 64)) * (0.1 * math.log(4) + 1)
    np.testing.assert_allclose(np.concatenate([turned[..., ::2], turned[..., 1::2]], -1)[0, 0], expected, atol=2e-5)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "yarm"}, r"'yarm' is not supported; did you mean 'yarn'\?"),
        ({"rope_type": "linear"}, "'linear' needs 'factor'"),
        ({"rope_type": "linear", "factor": 0}, "factor must be a positive number, got 0"),
        ({"rope_type": "yarn", "factor": "4"}, "factor must be a positive number, got '4'"),
        (LONGROPE | {"short_factor": [1.0]}, "need 8 numbers each"),
        ({"rope_type": "longrope"}, "needs 'short_factor'"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor 4.0 must be below"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_a_recipe_that_cannot_be_used_says_why(parameters, words):
    with pytest.raises(CheckpointError, match=words):
        build_rope(DIMS, {"rope_theta": THETA} | parameters, LONGEST)


def test_a_head_of_odd_size_cannot_be_turned():
    with pytest.raises(CheckpointError, match="head_dim 15 is odd"):
        build_rope(15, {"rope_theta": THETA}, LONGEST)


SPELLINGS = [
    {},
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5, "partial_rotary_factor": 0.25}},
    {"rope_parameters": YARN | {"rope_theta": 7e5}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_theta": 3e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_theta": 3e5, "rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "rope_theta": 7e5}},
    {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 4.0}},
    {"rope_scaling": YARN | {"rope_theta": 9e5}, "rope_theta": 3e5},
    {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}},
    {
        "rope_theta": 4.0,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": YARN},
    },
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_mean_what_transformers_makes_of_them(spelling):
    """The installed transformers is asked what a config means."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    shape |= {"intermediate_size": 8, "num_key_value_heads": 1, "vocab_size": 9, "head_dim": DIMS, "sliding_window": 4}
    theirs = Qwen3Config(**shape, **{k: _copy(v) for k, v in spelling.items()}, use_sliding_window=True)
    config = DFlashConfig.from_dict(shape | spelling | {"mask_token_id": 1, "target_layer_ids": [0]})
    x = mx.random.normal((1, 1, 5, DIMS), key=mx.random.key(0))
    for layer in range(2):
        recipe = theirs.rope_parameters
        if "layer_types" in spelling:
            recipe = recipe[spelling["layer_types"][layer]]
        ours = build_rope(DIMS, config.rope(layer), config.max_position_embeddings)
        expected = build_rope(DIMS, recipe, 64)
        np.testing.assert_array_equal(np.array(ours(x, offset=30)), np.array(expected(x, offset=30)))
        assert ours.__class__ is expected.__class__


def _copy(value):
    """Transformers writes into what it is given."""
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value


def test_a_null_theta_is_the_default():
    known = {"rope_theta", "rope_scaling"}
    for spelling in ({"rope_theta": None}, {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, {}):
        assert published_values(spelling, known) == {"rope_theta": 10_000.0}
