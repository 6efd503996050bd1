"""Anchors and what each position of a block predicts (drafters/targets.py)."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dflash  # noqa: F401  (loads a fast BLAS before MLX)
from dflash.training.drafters.targets import block_targets, position_weights, select_anchors


def mask(length, *spans):
    """A loss mask ``[1, length]`` that is true on the half-open ``spans``."""
    return np.array([[any(a <= i < b for a, b in spans) for i in range(length)]])


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 50), st.integers(0, 99))
def test_anchors_stay_in_the_response(loss_mask, count, seed):
    loss_mask = np.array([[False, *loss_mask, True, True]])
    anchors = select_anchors(loss_mask, count, np.random.default_rng(seed))
    assert anchors.shape == (1, count)
    assert loss_mask[0, anchors].all()
    assert loss_mask[0, anchors + 1].all()
    valid = (loss_mask[0, :-1] & loss_mask[0, 1:]).sum()
    assert len(set(anchors[0].tolist())) == min(count, valid)
    _, counts = block_targets(mx.zeros(loss_mask.shape, mx.int32), mx.array(loss_mask), mx.array(anchors), 2)
    assert counts.sum().item() == min(count, valid)


def test_a_response_without_an_anchor_is_refused():
    with pytest.raises(ValueError, match="no anchor"):
        select_anchors(mask(6, (4, 5)), 1, np.random.default_rng(0))


def test_block_targets_are_the_tokens_after_the_anchor_and_end_with_the_response():
    tokens = mx.arange(100, 110)[None]
    targets, counts = block_targets(tokens, mx.array(mask(10, (2, 8))), mx.array([[5, 2]]), 4)
    assert counts.tolist() == [[[True, True, False], [True, True, True]]]
    assert targets[0, 0, :2].tolist() == [106, 107]
    assert targets[0, 1].tolist() == [103, 104, 105]


def test_a_block_counts_neither_the_next_turn_nor_what_follows_it():
    loss_mask = mx.array(mask(10, (2, 5), (6, 10)))
    _, counts = block_targets(mx.arange(10)[None], loss_mask, mx.array([[3, 7]]), 6)
    assert counts.tolist() == [[[True, False, False, False, False], [True, True, False, False, False]]]


def test_position_weights_decay_from_one():
    weights = position_weights(16, 7.0)
    assert weights.shape == (15,)
    assert weights[0] == 1
    assert weights[7].item() == pytest.approx(math.exp(-1))
