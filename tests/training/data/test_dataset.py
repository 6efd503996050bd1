"""Datasets on disk: none but the right target opens one, and nothing but a whole one is opened."""

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest
from support.conversations import TINY, prompts, tiny_model
from support.models import STOP, TEXT_VOCAB, byte_tokenizer, qwen3_model

import dflash
from dflash import LoadedTargetModel
from dflash.errors import DataError
from dflash.training.data.dataset import open_dataset, remove_unfinished, target_fingerprint, tokenizer_fingerprint
from dflash.training.data.prepare import PrepareSettings, prepare


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
    prepare(prompts(3), target, PrepareSettings(max_tokens=3, heldout_percent=0), tmp_path)
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
    path = folder / "train/000001.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def spoil_manifest(folder: Path, **changes) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SPOILED = {
    "unfinished": (lambda f: (f / "manifest.json").unlink(), "is not finished; give its 'dflash prepare' command"),
    "nothing": (lambda f: [(f / n).unlink() for n in ("manifest.json", "plan.json")], "holds no dataset"),
    "missing shard": (lambda f: (f / "train/000001.safetensors").unlink(), "000001.safetensors is missing"),
    "damaged shard": (spoil_shard, "000001.safetensors is damaged"),
    "exchanged shard": (
        lambda f: (f / "train/000000.safetensors").write_bytes((f / "train/000001.safetensors").read_bytes()),
        "holds 4 sequences, but its manifest says 5",
    ),
    "version": (lambda f: spoil_manifest(f, version=9), "version 9; expected 'dflash-dataset', version 1"),
    "format": (lambda f: spoil_manifest(f, format="other"), "is of format 'other'"),
    "no splits": (lambda f: spoil_manifest(f, splits={}), "manifest.json is damaged"),
    "json": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is not valid JSON"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_a_spoiled_dataset_is_refused(kind, target, tmp_path):
    spoil, message = SPOILED[kind]
    prepare(prompts(5), target, PrepareSettings(max_tokens=3, shard_size=3, heldout_percent=0), tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError, match=re.escape(message)):
        open_dataset(tmp_path, "train", target)


def test_an_empty_split_is_refused(target, tmp_path):
    prepare(prompts(3), target, PrepareSettings(max_tokens=3, heldout_percent=0), tmp_path)
    with pytest.raises(DataError, match="no sequences in its split 'heldout'"):
        open_dataset(tmp_path, "heldout", target)


def test_unfinished_files_of_a_killed_run_are_removed_and_others_are_not(tmp_path):
    (tmp_path / "train").mkdir()
    kept = [tmp_path / ".my-own.json", tmp_path / "train/000000.safetensors"]
    gone = [tmp_path / ".manifest-a1_b.json", tmp_path / "train/.000001-xyz.safetensors"]
    for file in kept + gone:
        file.write_text("")
    remove_unfinished(tmp_path)
    assert [f.exists() for f in kept + gone] == [True, True, False, False]
