"""Sequences: joined, selected, put into batches and padded."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.training.data.sequences import Sequences, pad_batch, plan_batches


@given(st.lists(st.integers(2, 60), min_size=1, max_size=80), st.integers(0, 5))
@settings(max_examples=30)
def test_every_sequence_is_in_one_batch_of_an_epoch(lengths, seed):
    plan = plan_batches(np.array(lengths), 120, seed, pool=16)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(len(rows) * max(lengths[row] for row in rows) <= 120 for rows in plan)


def test_joined_sequences_are_padded_on_the_right():
    sequences = Sequences.from_lists([[1, 2], [3]], [[4], [5, 6, 7]])
    both = Sequences.concatenate([sequences, sequences])
    tokens, loss_mask = pad_batch(both, np.array([2, 3]), both.starts)
    assert tokens.tolist() == [[1, 2, 4, 0], [3, 5, 6, 7]]
    assert loss_mask.tolist() == [[False, False, True, False], [False, True, True, True]]


def test_selected_sequences_keep_their_tokens_masks_and_order():
    sequences = Sequences.from_lists([[1, 2], [3], [8]], [[4], [5, 6, 7], [9]])
    kept = sequences.select(np.array([True, False, True]))
    assert kept.tokens.tolist() == [1, 2, 4, 8, 9]
    assert kept.loss_mask.tolist() == [False, False, True, False, True]
    assert kept.starts.tolist() == [0, 3]
    assert len(sequences.select(np.zeros(3, bool))) == 0
