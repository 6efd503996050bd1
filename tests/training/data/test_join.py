"""Datasets of one target become one; nothing of them is lost, and no request is in both splits."""

import numpy as np
import pytest
from support.conversations import NO_HELDOUT, prompts, tiny_model

from dflash import LoadedTargetModel
from dflash.core.errors import DataError
from dflash.training.data.dataset import open_dataset
from dflash.training.data.join import join
from dflash.training.data.prepare import HeldoutRule, PrepareSettings, prepare
from dflash.training.data.text import read_dataset

HALF = HeldoutRule(percent=50)


@pytest.fixture
def two(target, tmp_path):
    """Greedy and sampled responses to the same requests, in two shards each."""
    folders = tmp_path / "greedy", tmp_path / "sampled"
    for folder, temp in zip(folders, (0.0, 1.0), strict=True):
        settings = PrepareSettings(max_tokens=6, temp=temp, shard_size=4)
        prepare(prompts(8), target, settings, folder, heldout=HALF)
    return folders


def test_a_joined_dataset_holds_the_sequences_of_all(two, target, tmp_path):
    join(two, tmp_path / "both")
    for split in ("train", "heldout"):
        parts = [open_dataset(folder, split, target).tokens for folder in two]
        np.testing.assert_array_equal(open_dataset(tmp_path / "both", split, target).tokens, np.concatenate(parts))
    texts = [row.text["messages"] for folder in two for row in read_dataset(folder, None)]
    assert [row.text["messages"] for row in read_dataset(tmp_path / "both", None)] == texts


def test_a_request_is_in_one_split_only(two, tmp_path):
    join(two, tmp_path / "both", HeldoutRule(percent=30))
    opened = {
        split: {row.text["messages"][0]["content"] for row in read_dataset(tmp_path / "both", split)}
        for split in ("train", "heldout")
    }
    assert all(opened.values())
    assert opened["train"].isdisjoint(opened["heldout"])


def test_what_does_not_fit_is_refused(two, target, tmp_path):
    with pytest.raises(DataError, match="not an empty folder"):
        join(two, two[0])
    other = LoadedTargetModel(tiny_model(seed=2), target.tokenizer)
    prepare(prompts(2), other, PrepareSettings(max_tokens=3), tmp_path / "other", heldout=NO_HELDOUT)
    with pytest.raises(DataError, match="made with another target than"):
        join([two[0], tmp_path / "other"], tmp_path / "both")
    assert not (tmp_path / "both").exists()
