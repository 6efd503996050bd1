"""A target's passes by quick layers are its own, to rounding; where there are none, they are its own exactly."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen2
from support.models import llama_model, qwen3_model, randomize

from dflash import LoadedTargetModel
from dflash.adapters.conformance import small_models
from dflash.training import cpu
from dflash.training.cpu import forward_hidden, has_quick_layers, model_to_write_with
from dflash.training.data.responses import generate_responses

pytestmark = pytest.mark.skipif(not cpu.on_cpu(), reason="only a CPU has use for them")


def qwen2_model():
    args = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "vocab_size": 32}
    args |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    return randomize(qwen2.Model(qwen2.ModelArgs(model_type="qwen2", **args)), 5, scale=2.0)


MODELS = {
    "qwen3": lambda: qwen3_model(1),
    "qwen2": qwen2_model,
    "llama": lambda: llama_model(2),
    "sliding": lambda: llama_model(3, window=6),
}


@pytest.fixture(params=MODELS)
def target(request):
    return LoadedTargetModel(MODELS[request.param]())


def close(found: mx.array, expected: mx.array) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-4 * float(mx.abs(expected).max()))


def test_hidden_states_and_features_are_those_of_the_target(target):
    tokens = mx.random.randint(0, 32, (3, 21), key=mx.random.key(0))
    for found, expected in zip(
        forward_hidden(target, tokens, (0, 2)), target.forward_hidden(tokens, None, (0, 2)), strict=True
    ):
        assert not mx.array_equal(found, expected)  # or nothing quick was used
        close(found, expected)


def test_pieces_of_a_sequence_through_caches_give_the_logits_of_the_whole(target):
    model, tokens = model_to_write_with(target), mx.random.randint(0, 32, (2, 19), key=mx.random.key(1))
    cache = model.make_cache()
    parts = [model(part, cache=cache) for part in mx.split(tokens, [7, 8, 13], axis=1)]
    close(mx.concatenate(parts, axis=1), target.model(tokens))


def test_batched_responses_to_prompts_of_all_lengths_are_the_targets_own(target):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 32, n).tolist() for n in (3, 9, 14, 5, 1)]
    written = [
        dict(generate_responses(m, prompts, [], [12] * 5, 3)) for m in (model_to_write_with(target), target.model)
    ]
    assert written[0] == written[1]


def test_other_families_and_other_devices_keep_the_targets_own_pass(monkeypatch):
    tokens = mx.array([[1, 2, 3, 4]])
    other = LoadedTargetModel(small_models.build("gemma3_text"))
    plain, half = LoadedTargetModel(qwen3_model(1)), LoadedTargetModel(qwen3_model(1))
    half.model.set_dtype(mx.bfloat16)
    assert has_quick_layers(plain.adapter)
    monkeypatch.setattr(cpu, "on_cpu", lambda: False)
    for target in (other, plain):
        assert not has_quick_layers(target.adapter)
        assert model_to_write_with(target) is target.model
        for found, expected in zip(
            forward_hidden(target, tokens, (1,)), target.forward_hidden(tokens, None, (1,)), strict=True
        ):
            assert mx.array_equal(found, expected)
    monkeypatch.undo()
    assert not has_quick_layers(other.adapter)
    assert not has_quick_layers(half.adapter)
