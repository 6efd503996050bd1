"""Files are whole or not there; a spread-out checkpoint is read as its index says, and never twice."""

import json
import os

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash.core import files
from dflash.core.errors import CheckpointError, DFlashError


def shards(folder, parts: dict[str, list[str]], index: bool = True):
    """One file for each of ``parts``; tensor ``name`` holds its position among all names."""
    names = sorted({name for part in parts.values() for name in part})
    for file, held in parts.items():
        mx.save_safetensors(str(folder / file), {name: mx.array([names.index(name)]) for name in held})
    if index:
        weight_map = {name: file for file, held in parts.items() for name in held}
        (folder / files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


@pytest.mark.parametrize("index", [True, False])
def test_a_spread_out_checkpoint_is_read_whole(tmp_path, index):
    names = shards(tmp_path, {"model-00001.safetensors": ["a", "b"], "model-00002.safetensors": ["c"]}, index)
    read = files.read_safetensors(tmp_path)
    assert {name: w.item() for name, w in read.items()} == {name: i for i, name in enumerate(names)}


def test_one_tensor_in_two_files_is_refused_unless_the_index_lists_one_of_them(tmp_path):
    shards(tmp_path, {"model-1.safetensors": ["a"]})
    mx.save_safetensors(str(tmp_path / "older.safetensors"), {"a": mx.array([9]), "z": mx.array([9])})
    assert {name: w.item() for name, w in files.read_safetensors(tmp_path).items()} == {"a": 0}
    (tmp_path / files.INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"a is in both .*model-1\.safetensors and older\.safetensors"):
        files.read_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "model-1.safetensors", "b": "model-2.safetensors"}, "model-2.safetensors is missing"),
        ({"a": "model-1.safetensors", "b": "model-1.safetensors"}, "lacks b, which"),
        ({"a": "../model-1.safetensors"}, "of its own folder"),
        ({"a": "model-1.bin"}, "expected \\*.safetensors"),
        ({"a": 3}, "weight_map"),
        (None, "weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, weight_map, words):
    shards(tmp_path, {"model-1.safetensors": ["a"]})
    (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=words):
        files.read_safetensors(tmp_path)


def test_a_type_that_mlx_does_not_read_and_an_empty_name_are_refused(tmp_path):
    save_file({"a": np.arange(4.0)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="F64 numbers, which MLX does not read"):
        files.read_safetensors(tmp_path)
    for name, words in (("", "got an empty name"), ("  ", "got an empty name"), (5, "got 5"), (None, "got None")):
        with pytest.raises(CheckpointError, match=words):
            files.resolve_checkpoint(name)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "state.json"
    files.write_json(path, {"old": 1})

    def fails(file):
        file.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=rf"^Cannot write {path}: No space left on device \(\d+ MB free\)$"):
        files.atomic_write(path, fails)
    assert files.read_json(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_place_that_takes_no_file_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=rf"^Cannot write {tmp_path}/file/x\.json: (File exists|Not a directory)$"):
        files.write_json(tmp_path / "file" / "x.json", {})


def test_a_device_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe: it is no plain file"):
        files.write_json(tmp_path / "pipe", {})
    assert (tmp_path / "pipe").is_fifo()


def test_arrays_come_back_with_their_metadata(tmp_path):
    arrays = {"a": mx.arange(6).reshape(2, 3), "deep.b": mx.array([1.5], mx.bfloat16)}
    files.write_arrays(tmp_path / "new" / "x.safetensors", arrays, {"step": "3"})
    read, metadata = files.read_arrays(tmp_path / "new" / "x.safetensors")
    assert metadata == {"step": "3"}
    assert {n: (w.dtype, w.tolist()) for n, w in read.items()} == {n: (w.dtype, w.tolist()) for n, w in arrays.items()}
    assert files.flat(files.nested(read)).keys() == arrays.keys()


def test_a_held_folder_is_refused_to_others_and_free_afterwards(tmp_path):
    again = files.exclusive_lock(tmp_path)
    with files.exclusive_lock(tmp_path), pytest.raises(DFlashError, match="Another process is writing"), again:
        pass
    with files.exclusive_lock(tmp_path):
        pass
