"""One step of training works for any target: every kind of cache, quantised weights, half precision, threads."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.models import qwen3_model

from dflash import LoadedTargetModel
from dflash.adapters.conformance import small_models as small
from dflash.training.batches import Batches
from dflash.training.data.sequences import Sequences
from dflash.training.drafters.init import new_drafter
from dflash.training.drafters.loss import drafter_loss
from dflash.training.drafters.objectives import ObjectiveSettings
from dflash.training.features import with_target_pass
from dflash.training.loop.fit import FitSettings, fit
from dflash.training.recipe import DataSettings, DrafterShape
from dflash.training.train import drafter_dtype

SHAPE = DrafterShape(
    num_hidden_layers=1, block_size=4, target_layer_ids=(0, 2), mask_token=30, intermediate_size=24,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)  # fmt: skip


@pytest.fixture
def batches(tmp_path) -> Batches:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 30, rng.integers(2, 9)).tolist() for _ in range(12)]
    answers = [rng.integers(1, 30, rng.integers(8, 30)).tolist() for _ in range(12)]
    return Batches(Sequences.from_lists(prompts, answers), DataSettings(tmp_path, 64, 96, anchors=3), epochs=2)


def loss_in(dtype):
    return partial(drafter_loss, objective=ObjectiveSettings(), dtype=dtype)


def trained(target: LoadedTargetModel, batches: Batches, folder, dtype=mx.float32, **settings) -> dict[str, mx.array]:
    drafter = new_drafter(SHAPE, target)
    before = mx.array(drafter.fc.weight)
    batch = with_target_pass(batches, target, drafter.target_layer_ids, False)
    fit(drafter, batch, loss_in(dtype), FitSettings(steps=2, **settings), folder)
    assert not mx.array_equal(before, drafter.fc.weight)
    return dict(tree_flatten(drafter.parameters()))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "lfm2", "gpt_oss"])
def test_full_sliding_and_recurrent_targets_train(name, batches, tmp_path):
    target = LoadedTargetModel(small.build(name))
    frozen = {k: mx.array(w) for k, w in tree_flatten(target.model.parameters())}
    trained(target, batches, tmp_path)
    for key, w in tree_flatten(target.model.parameters()):
        assert mx.array_equal(w, frozen[key]), key


def test_a_quantised_target_trains(batches, tmp_path):
    model = qwen3_model(1, vocab=32, intermediate_size=64, head_dim=16)
    nn.quantize(model, group_size=32, bits=8)
    weights = trained(LoadedTargetModel(model), batches, tmp_path)
    assert all(mx.isfinite(w).all() for w in weights.values())


@pytest.mark.parametrize(
    ("dtype", "drafters"), [(mx.float32, mx.float32), (mx.bfloat16, mx.bfloat16), (mx.float16, mx.float32)]
)
def test_a_drafter_computes_in_the_targets_dtype_unless_it_overflows_easily(dtype, drafters):
    model = qwen3_model(1, vocab=32)
    model.set_dtype(dtype)
    assert drafter_dtype(LoadedTargetModel(model)) == drafters


def test_a_drafter_embeds_as_its_target_does():
    target = LoadedTargetModel(small.build("gemma3_text"))
    drafter, tokens = new_drafter(SHAPE, target), mx.array([[3, 7]])
    scale = target.adapter.embedding_scale
    assert drafter.config.input_embedding_scale == 1 != scale
    assert mx.allclose(drafter.embed(tokens), target.embed(tokens) * scale).item()
