"""What the package does differently on a GPU. Skipped where MLX computes on a CPU."""

import mlx.core as mx
import pytest
from mlx_lm.generate import wired_limit
from support.models import save_target
from support.models import target as random_target

from dflash import DFlashSpeculativeDecoder, load_target
from dflash.core.backend import begins_early, compute_dtype, on_cpu
from dflash.core.cpu_math import logsumexp
from dflash.decoding.sampling import DrawingSampler
from dflash.decoding.verify import samples_one_by_one
from dflash.policies.threads import threads_for
from dflash.target.early import early_layers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(on_cpu(), reason="MLX computes on a CPU here")]

PROMPT = "Write a function that keeps the even numbers, squares each and returns the sum."


@pytest.fixture
def decoder() -> DFlashSpeculativeDecoder:
    """The bundled models in float32: in half precision a pass of one token and one of a block may break ties apart."""
    decoder = DFlashSpeculativeDecoder.from_pretrained()
    for model in (decoder.target_model, decoder.draft_model):
        model.set_dtype(mx.float32)
    return decoder


def test_a_pass_is_handed_over_as_a_whole():
    assert not begins_early()
    assert early_layers(None) is None


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_weights_keep_their_precision(tmp_path, dtype):
    assert compute_dtype(dtype) == dtype
    loaded = load_target(save_target(random_target("qwen3", 1).model, tmp_path / "target", dtype=dtype))
    assert loaded.model.model.layers[0].self_attn.q_proj.weight.dtype == dtype


def test_blas_threads_are_left_alone():
    threads = threads_for(random_target("qwen3", 1), 16)
    assert threads.count is None
    assert "not compute on the CPU" in str(threads)
    with threads.in_use():
        pass


def test_all_positions_are_sampled_at_once():
    assert not samples_one_by_one(DrawingSampler(1.0))


def test_weights_can_be_wired_while_decoding():
    with wired_limit(random_target("qwen3", 1).model):
        mx.eval(mx.zeros(1))


def test_the_devices_own_kernels_agree_with_the_formula():
    logits = mx.random.normal((4, 5000), key=mx.random.key(0)) * 5
    formula = mx.log(mx.sum(mx.exp(logits), axis=-1))
    assert mx.allclose(logsumexp(logits).reshape(-1), formula, atol=1e-3).item()


@pytest.mark.parametrize("policy", ["adaptive", "full", 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_bundled_models_write_what_plain_decoding_writes(decoder, policy, temperature):
    options = {"max_tokens": 60, "temperature": temperature, "seed": 3}
    assert decoder.generate(PROMPT, policy=policy, **options) == decoder.generate(PROMPT, policy=0, **options)


def test_a_trace_finds_the_likeliest_tokens_on_the_device(decoder):
    records: list[dict] = []
    decoder.generate(PROMPT, max_tokens=20, policy="full", trace=records.append)
    for block in records[2:]:
        assert [row[0] for row in block["target_top"]["tokens"]][: len(block["tokens"])] == block["tokens"]
