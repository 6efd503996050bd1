"""Which sequences and anchors are in which batch."""

import re

import mlx.core as mx
import pytest

import dflash  # noqa: F401  (loads a fast BLAS before MLX)
from dflash.core.errors import TrainingError
from dflash.training.batches import Batches, anchor_counts, trainable
from dflash.training.data.sequences import Sequences
from dflash.training.drafters.loss import Batch
from dflash.training.recipe import DataSettings
from dflash.training.train import of_all_lengths, open_dataset


def test_sequences_that_cannot_be_trained_on_are_left_out_and_counted(caplog):
    sequences = Sequences.from_lists([[1], [1, 2], [1], [3]], [[5, 6], [7], [5] * 30, [8, 9, 9]])
    assert anchor_counts(sequences).tolist() == [1, 0, 29, 2]
    kept, numbers = trainable(sequences, max_length=20)
    assert numbers.tolist() == [0, 3]
    assert kept.tokens.tolist() == [1, 5, 6, 3, 8, 9, 9]
    assert "1 of more than max_length 20 tokens, 1 without two response tokens" in caplog.text


@pytest.mark.parametrize(("answers", "message"), [([[], [4]], "2 without two response"), ([[4] * 40] * 2, "2 of more")])
def test_data_of_which_nothing_can_be_used_is_an_error(answers, message):
    with pytest.raises(TrainingError, match=message):
        trainable(Sequences.from_lists([[1], [2]], answers), max_length=20)


def test_every_epoch_has_every_sequence_once_and_other_anchors(folder):
    sequences = open_dataset(folder / "data", "train", None)
    batches = Batches(sequences, DataSettings(folder, 40, 80, anchors=2), epochs=2)
    of_sequence: dict[int, list[list[int]]] = {}
    for i in range(len(batches)):
        named = [int(n) for n in re.findall(r"\d+", batches.name(i).split("sequences")[1])]
        assert named == batches.members(i).tolist()
        for number, anchors in zip(named, batches(i)[2].tolist(), strict=True):
            of_sequence.setdefault(number, []).append(anchors)
    assert sorted(of_sequence) == list(range(24))
    assert all(len(drawn) == 2 for drawn in of_sequence.values())
    assert sum(first != second for first, second in of_sequence.values()) > 12


def test_a_batch_is_a_function_of_its_number(folder):
    sequences = open_dataset(folder / "data", "train", None)
    one, other = (Batches(sequences, DataSettings(folder, 40, 80, anchors=2), epochs) for epochs in (1, 2))
    one(0)
    for mine, theirs in zip(one(2), other(2), strict=True):
        assert mx.array_equal(mine, theirs)


def test_blocks_of_all_lengths_are_equally_frequent_and_a_function_of_the_number():
    of_numbers = of_all_lengths(lambda _: Batch(*[mx.zeros(1)] * 4), most=3, seed=1)
    drafts = [of_numbers(number).drafts for number in range(300)]
    assert drafts == [of_numbers(number).drafts for number in range(300)]
    assert all(80 < drafts.count(length) < 120 for length in (1, 2, 3))


def test_a_batch_has_no_more_blocks_than_asked_for_but_one_a_sequence(folder):
    sequences = open_dataset(folder / "data", "train", None)
    for limit in (1, 7, 30):
        batches = Batches(sequences, DataSettings(folder, 40, 80, anchors=9, max_blocks_per_batch=limit), epochs=1)
        for i in range(len(batches)):
            sequences_in, per_sequence = batches(i)[2].shape
            assert sequences_in * per_sequence <= max(limit, sequences_in)
            assert per_sequence <= 9
