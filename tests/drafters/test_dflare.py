"""Training DFlare: its loss, and how a new one starts."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support import dense_loss
from support.kinds import random_drafter
from support.models import qwen3_model

from dflash import LoadedTargetModel, save_drafter
from dflash.core.errors import TrainingError
from dflash.core.files import flat
from dflash.training.drafters.init import new_drafter
from dflash.training.drafters.loss import drafter_loss
from dflash.training.drafters.objectives import ObjectiveSettings
from dflash.training.loop.optimizer import is_inner_matrix
from dflash.training.recipe import DrafterShape


@pytest.fixture
def model():
    drafter = random_drafter("dflare", 2, dense_loss.VOCAB, block_size=6)
    drafter.bind(dense_loss.RandomTarget(2))
    return drafter


def test_loss_and_gradients_equal_a_dense_float64_implementation(model):
    documents, objective = dense_loss.pack_of_three(), ObjectiveSettings("mix", 0.3, dense_loss.GAMMA)
    expected = dense_loss.dense_loss_and_gradients(model, documents, objective)
    dense_loss.assert_equal(dense_loss.loss_and_gradients(model, documents, objective), expected)
    own = {name for name in expected[1] if "_target" in name or "fusion" in name}
    assert len(own) == 2 * 2 + 1
    assert min(mx.abs(expected[1][name]).max().item() for name in own) > 1e-4, "a part does not learn"


def test_gradients_are_the_same_where_layers_are_computed_again(model):
    batch, objective = dense_loss.pad_documents(dense_loss.pack_of_three()), ObjectiveSettings()
    steps = [partial(drafter_loss, objective=objective, grad_checkpoint=again) for again in (False, True)]
    kept, again = (flat(nn.value_and_grad(model, step)(model, batch)[1]) for step in steps)
    for name, gradient in kept.items():
        assert mx.allclose(gradient, again[name], rtol=1e-4, atol=1e-6).item(), name


def test_a_new_ones_layers_read_the_taps_of_their_own_depth(tmp_path):
    target = LoadedTargetModel(qwen3_model(1, 24))
    shape = DrafterShape("dflare", num_hidden_layers=3, target_layer_ids=(0, 1, 2, 3), mask_token=23, seed=1)
    model = new_drafter(shape, target)
    assert np.array(model.layer_fusion_weights).tolist() == [[2, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 2]]
    assert not is_inner_matrix("layer_fusion_weights", model.layer_fusion_weights)
    save_drafter(random_drafter("dflash", 0, 24), tmp_path)
    with pytest.raises(TrainingError, match=r"one of the kind 'dflare' cannot start: fc\.weight is not in both, or"):
        new_drafter(DrafterShape("dflare", from_=str(tmp_path)), target)
