"""Mean gradients: the same for one large batch, several small ones, threads and turns."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

import dflash  # noqa: F401  (loads a fast BLAS before MLX)
from dflash.training.loop.gradients import MeanGradient


def test_mean_gradient_is_that_of_one_large_batch():
    model, rng = nn.Linear(3, 2), np.random.default_rng(0)
    x = rng.normal(size=(8, 3)).astype(np.float32)

    def loss(model, batch):
        return (model(batch[0]) ** 2).mean()

    parts = iter([(mx.array(part),) for part in np.split(x, 4)])
    losses, gradients = MeanGradient(model, loss, 1)(model.trainable_parameters(), parts)
    whole, expected = MeanGradient(model, loss, 1)(model.trainable_parameters(), iter([(mx.array(x),)]))
    assert np.mean(losses) == pytest.approx(whole[0], rel=1e-5)
    np.testing.assert_allclose(np.array(gradients["weight"]), np.array(expected["weight"]), rtol=1e-4)


def test_a_step_leaves_the_model_its_own_weights_whatever_the_loss_computes_in():
    model = nn.Linear(3, 2)

    def loss(model, batch):
        model.update(tree_map(lambda w: w.astype(mx.bfloat16), model.trainable_parameters()))
        return (model(batch[0]) ** 2).mean()

    parameters = model.trainable_parameters()
    MeanGradient(model, loss, 1)(parameters, iter([(mx.ones((4, 3)),)]))
    assert model.weight is parameters["weight"]
    assert model.weight.dtype == mx.float32
