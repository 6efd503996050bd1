"""Datasets on disk: none but the right target opens one, and nothing but a whole one is opened."""

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.conversations import NO_HELDOUT, TINY, prompts, save_dataset, tiny_model
from support.models import STOP, TEXT_VOCAB, byte_tokenizer, qwen3_model

import dflash
from dflash import LoadedTargetModel
from dflash.core.errors import DataError
from dflash.target.identity import target_fingerprint
from dflash.training.data.dataset import (
    change_split,
    open_dataset,
    remove_unfinished,
    shard_sizes,
    tokenizer_fingerprint,
)
from dflash.training.data.prepare import HeldoutRule, PrepareSettings, prepare
from dflash.training.data.sequences import Sequences
from dflash.training.data.text import read_dataset


def test_a_fine_tuned_copy_is_another_target_and_a_cast_one_is_not(target, target_folder):
    again = LoadedTargetModel(tiny_model(), target.tokenizer)
    again.model.apply(lambda w: w.astype(mx.bfloat16))
    assert (
        target_fingerprint(again) == target_fingerprint(target) == target_fingerprint(dflash.load_target(target_folder))
    )
    layer = again.model.layers[0].self_attn.o_proj
    layer.weight = layer.weight * 1.1
    assert target_fingerprint(again) != target_fingerprint(target)
    longer = LoadedTargetModel(qwen3_model(1, TEXT_VOCAB, **TINY, rope_theta=5_000.0), target.tokenizer)
    assert target_fingerprint(longer) != target_fingerprint(target)


def test_another_target_or_tokenizer_is_refused(target, tmp_path):
    prepare(prompts(3), target, PrepareSettings(max_tokens=3), tmp_path, heldout=NO_HELDOUT)
    assert len(open_dataset(tmp_path, "train", None)) == len(open_dataset(tmp_path, "train", target)) == 3
    with pytest.raises(DataError, match="was made with another target"):
        open_dataset(tmp_path, "train", LoadedTargetModel(tiny_model(seed=2), target.tokenizer))
    tokenizer = byte_tokenizer().__class__(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token=STOP)
    tokenizer.add_tokens(["<new>"])
    other = LoadedTargetModel(target.model, tokenizer)
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(target)
    with pytest.raises(DataError, match="was made with another tokenizer"):
        open_dataset(tmp_path, "train", other)


def spoil_shard(folder: Path) -> None:
    path = folder / "shards/000001.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def spoil_manifest(folder: Path, **changes) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SPOILED = {
    "unfinished": (lambda f: (f / "manifest.json").unlink(), "is not finished; give its 'dflash prepare' command"),
    "nothing": (lambda f: [(f / n).unlink() for n in ("manifest.json", "plan.json")], "holds no dataset"),
    "missing shard": (lambda f: (f / "shards/000001.safetensors").unlink(), "000001.safetensors is missing"),
    "damaged shard": (spoil_shard, "000001.safetensors is damaged"),
    "exchanged shard": (
        lambda f: (f / "shards/000000.safetensors").write_bytes((f / "shards/000001.safetensors").read_bytes()),
        "holds 4 sequences, but its manifest says 5",
    ),
    "version": (lambda f: spoil_manifest(f, version=9), "version 9; expected 'dflash-dataset', version 1 or 2"),
    "format": (lambda f: spoil_manifest(f, format="other"), "is of format 'other'"),
    "no splits": (lambda f: spoil_manifest(f, splits={}), "manifest.json is damaged"),
    "no shards": (lambda f: spoil_manifest(f, shards="two"), "manifest.json is damaged"),
    "impossible rule": (lambda f: spoil_manifest(f, heldout={"percent": 200}), "manifest.json is damaged"),
    "other rule": (lambda f: spoil_manifest(f, heldout={"percent": 99.0}), "but its manifest says 5"),
    "json": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is not valid JSON"),
}


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    prepare(prompts(5), target, PrepareSettings(max_tokens=3, shard_size=3), folder, heldout=NO_HELDOUT)
    return folder


@pytest.mark.parametrize("kind", SPOILED)
def test_a_spoiled_dataset_is_refused(kind, whole, target, tmp_path):
    spoil, message = SPOILED[kind]
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path)
    with pytest.raises(DataError, match=re.escape(message)):
        open_dataset(tmp_path, "train", target)


def test_an_empty_split_is_refused(target, tmp_path):
    prepare(prompts(3), target, PrepareSettings(max_tokens=3), tmp_path, heldout=NO_HELDOUT)
    with pytest.raises(DataError, match=r"no sequences in its split 'heldout'; .* 'dflash data split \S+ --heldout-"):
        open_dataset(tmp_path, "heldout", target)
    change_split(tmp_path, HeldoutRule())
    assert len(open_dataset(tmp_path, "heldout", target)) == 1


def test_unfinished_files_of_a_killed_run_are_removed_and_others_are_not(tmp_path):
    (tmp_path / "shards").mkdir()
    kept = [tmp_path / ".my-own.json", tmp_path / "shards/000000.safetensors"]
    gone = [
        tmp_path / ".manifest-a1_b.json",
        tmp_path / "shards/.000001-xyz.safetensors",
        tmp_path / "shards/.000001-a.jsonl",
    ]
    for file in kept + gone:
        file.write_text("")
    remove_unfinished(tmp_path)
    assert [f.exists() for f in kept + gone] == [True, True, False, False, False]


def some_sequences(count: int) -> Sequences:
    return Sequences.from_lists([[i, i + 1] for i in range(count)], [[9] * (1 + i % 3) for i in range(count)])


def test_each_split_keeps_the_order_of_the_dataset_and_its_shards_add_up(tmp_path):
    parts = [some_sequences(n) for n in (4, 1, 5)]
    save_dataset(tmp_path, parts, heldout=6)
    everything, kept = Sequences.concatenate(parts), np.arange(10) < 4
    for split, rows in (("train", kept), ("heldout", ~kept)):
        opened, expected = open_dataset(tmp_path, split, None), everything.select(rows)
        for name in ("tokens", "loss_mask", "lengths"):
            assert np.array_equal(getattr(opened, name), getattr(expected, name))
    assert shard_sizes(tmp_path, "train") == [4, 0, 0]
    assert shard_sizes(tmp_path, "heldout") == [0, 1, 5]


def test_a_dataset_of_version_1_opens_with_its_own_split_and_keeps_it(tmp_path):
    """Folders for the splits, the mask named ``response``, neither digests nor text."""
    splits = {}
    for split, count in (("train", 5), ("heldout", 2)):
        rows = some_sequences(count)
        arrays = {"tokens": rows.tokens, "response": rows.loss_mask, "lengths": rows.lengths}
        (tmp_path / split).mkdir()
        path = str(tmp_path / split / "000000.safetensors")
        mx.save_safetensors(path, {name: mx.array(array) for name, array in arrays.items()})
        splits[split] = {"shards": 1, "sequences": count, "tokens": len(rows.tokens)}
    manifest = {"format": "dflash-dataset", "version": 1, "target": "t", "tokenizer": "t", "splits": splits}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for split, count in (("train", 5), ("heldout", 2)):
        assert np.array_equal(open_dataset(tmp_path, split, None).loss_mask, some_sequences(count).loss_mask)
        assert shard_sizes(tmp_path, split) == [count]
    with pytest.raises(DataError, match="format version 1, whose split is fixed"):
        change_split(tmp_path, HeldoutRule(20))
    with pytest.raises(DataError, match="format version 1, which keeps no text"):
        next(read_dataset(tmp_path))
