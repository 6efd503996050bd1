"""Cache options mean what they mean in mlx-lm: tokens equal those of plain mlx-lm with the same options."""

import logging

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from support.models import ScriptedDrafter, plain_greedy, qwen3_model, target

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel
from dflash.adapters.conformance import small_models
from dflash.core.errors import GenerationError
from dflash.decoding.block import Decoding
from dflash.decoding.loop import decode, prefill

NEAR_TIE = 2e-4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def assert_equals_plain_mlx_lm(model, options, changes_text=True) -> None:
    count = 60
    expected, lead = plain_greedy(model, PROMPT, count, **options)
    assert lead > NEAR_TIE, "a near tie: either side may choose the other token"
    if changes_text:
        assert expected != plain_greedy(model, PROMPT, count)[0], "the options change nothing; the test means nothing"
    decoder = DFlashSpeculativeDecoder(LoadedTargetModel(model), ScriptedDrafter(PROMPT + expected, 32, 0.85))
    blocks: list[list[int]] = []
    tokens = decoder.spec_generate(PROMPT, count, stop_token_ids=[], stream_callback=blocks.append, **options)
    assert tokens.tolist() == [PROMPT + expected]
    assert max(map(len, blocks)) > 3


@pytest.mark.parametrize(("bits", "start"), [(8, 0), (3, 7), (3, 24), (3, 41)])
def test_caches_are_quantised_when_mlx_lm_quantises_them(bits, start):
    """Before, within and after the prompt, which comes in chunks; and in the middle of what would be a block."""
    options = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start, "prefill_step_size": 8}
    assert_equals_plain_mlx_lm(qwen3_model(4, head_dim=32), options, changes_text=bits == 3)


@pytest.mark.parametrize("start", [2, 30])
def test_a_block_ends_where_quantisation_begins(start):
    loaded = LoadedTargetModel(qwen3_model(4, head_dim=32))
    cache = loaded.make_cache(kv_bits=8, kv_group_size=32, quantized_kv_start=start)
    run = Decoding(loaded, ScriptedDrafter(PROMPT, 32, 1.0))
    state = prefill(run, PROMPT[:5], target_cache=cache)
    kinds = {}
    for _ in decode(run, state, 50, 16):
        kinds[cache.offset] = {type(layer) for layer in cache}
    # Quantised before the next pass, when nothing can be rewound any more.
    assert all(kind == {KVCache if offset <= start else QuantizedKVCache} for offset, kind in kinds.items())
    assert {QuantizedKVCache} in kinds.values()
    assert start < 5 or start in kinds


@pytest.mark.parametrize("step", [4, 2048])
def test_a_bounded_cache_reads_a_longer_prompt_as_mlx_lm_does(step):
    assert_equals_plain_mlx_lm(qwen3_model(2), {"max_kv_size": 9, "prefill_step_size": step})


def test_max_kv_size_has_no_effect_where_a_model_chooses_its_caches(caplog):
    with caplog.at_level(logging.WARNING):
        assert_equals_plain_mlx_lm(target("llama", 1).model, {"max_kv_size": 9}, changes_text=False)
    assert "max_kv_size has no effect: llama chooses its caches itself" in caplog.text


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_a_model_that_mlx_lm_cannot_quantise_is_refused_before_the_first_token(name):
    model = small_models.build(name)
    with pytest.raises(NotImplementedError):
        plain_greedy(model, [3, 1, 4], 2, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    decoder = DFlashSpeculativeDecoder(LoadedTargetModel(model), ScriptedDrafter([], 32))
    with pytest.raises(GenerationError, match=r"cannot quantise the caches of this target.*RotatingKVCache"):
        decoder.spec_generate([3, 1, 4], 2, kv_bits=8, kv_group_size=32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_kv_size": 9, "kv_bits": 8, "kv_group_size": 32}, "either bounded or quantised"),
        ({"max_kv_size": 4}, "max_kv_size must be a whole number of at least 5, got 4"),
        ({"kv_bits": 8, "kv_group_size": 48}, "kv_group_size must be 32, 64 or 128, got 48"),
        ({"kv_bits": 5}, "kv_bits must be 2, 3, 4, 6 or 8"),
        ({"kv_bits": 4.0}, "kv_bits must be .* got 4.0"),
        ({"kv_bits": mx.array([4, 8])}, "kv_bits must be .* got array"),
        ({"kv_bits": 8, "kv_group_size": 32}, "kv_group_size 32 does not divide the size of this target's attention"),
    ],
)
def test_cache_options_that_do_not_fit_are_refused(options, message):
    """Heads have 12 numbers, which no group size divides."""
    with pytest.raises(GenerationError, match=message):
        target("qwen3", 1).make_cache(**options)
