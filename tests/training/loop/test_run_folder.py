"""What a run leaves behind: whole checkpoints, a log that never stops a run, refusals that say what to do."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash.core.errors import CheckpointError
from dflash.training.loop.optimizer import AdamWSettings, Optimizer
from dflash.training.loop.run_folder import (
    LOG,
    STATE,
    Best,
    Progress,
    drop_best_after,
    load_checkpoint,
    read_log,
    save_checkpoint,
    truncate_log,
    write_log,
)


def parts() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2)
    return model, Optimizer(model.trainable_parameters(), AdamWSettings(), 10)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint after step 4 of 10, and how to write it again with other arrays or metadata."""
    save_checkpoint(tmp_path / STATE, *parts(), Progress(4, 10, [0.5]))
    arrays, metadata = mx.load(str(tmp_path / STATE), return_metadata=True)

    def change(change_arrays=None, change_metadata=None):
        new = dict(arrays) | (change_arrays or {})
        kept = {name: value for name, value in new.items() if value is not None}
        told = {name: value for name, value in (metadata | (change_metadata or {})).items() if value is not None}
        mx.save_safetensors(str(tmp_path / STATE), kept, told)
        return tmp_path / STATE

    return change


def test_a_checkpoint_comes_back_whole(saved):
    model, optimizer = parts()
    assert load_checkpoint(saved(), model, optimizer) == Progress(4, 10, [0.5])
    arrays = mx.load(str(saved()))
    np.testing.assert_array_equal(np.array(model.weight), np.array(arrays["model.weight"]))


@pytest.mark.parametrize(
    ("arrays", "metadata", "message"),
    [
        ({"model.weight": None}, {}, r"of the weight 'weight' it has none, this run shape \[2, 3\]"),
        ({"model.weight": mx.zeros((3, 3))}, {}, r"it has shape \[3, 3\], this run shape \[2, 3\]"),
        ({"model.gate": mx.zeros((1,))}, {}, r"of the weight 'gate' it has shape \[1\], this run none"),
        ({"optimizer.weight.m": None}, {}, r"of the optimiser state 'weight.m' it has none"),
        ({"model.bias": mx.array([1.0, float("nan")])}, {}, "model.bias holds values that are not finite"),
        ({}, {"step": None}, "does not say how many steps are done"),
        ({}, {"losses": "5"}, "does not say how many steps are done"),
    ],
)
def test_a_checkpoint_that_cannot_be_continued_is_refused_by_name(saved, arrays, metadata, message):
    model, optimizer = parts()
    before = np.array(model.weight)
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(saved(arrays, metadata), model, optimizer)
    assert "finite" in message or "starts again from step 0" in str(error.value)
    assert np.array_equal(before, np.array(model.weight))


def test_a_damaged_checkpoint_says_what_removing_it_means(tmp_path):
    (tmp_path / STATE).write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"is damaged: .* the run then starts again from step 0"):
        load_checkpoint(tmp_path / STATE, *parts())


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    model, optimizer = parts()
    save_checkpoint(tmp_path / STATE, model, optimizer, Progress(1, 10))
    before = (tmp_path / STATE).read_bytes()
    model.bias = mx.array([mx.inf, 0.0])
    with pytest.raises(CheckpointError, match=r"model\.bias holds values that are not finite"):
        save_checkpoint(tmp_path / STATE, model, optimizer, Progress(2, 10))
    assert (tmp_path / STATE).read_bytes() == before


def test_best_weights_are_kept_until_their_steps_are_made_again(tmp_path):
    model, _ = parts()
    best = Best(tmp_path, "score", decay_begins=4)
    for step, value in ((2, 1.0), (4, 3.0), (6, 2.0), (8, None), (10, 4.0), (12, 5.0)):
        best.offer(step, model, {"score": value})
    for step, left in ((12, 5.0), (4, 3.0), (4, 3.0), (3, None)):
        drop_best_after(tmp_path, step)
        assert Best(tmp_path, "score", 4).value == left


FOREIGN = [b"a note of my own", b"5", b"[1]", b'{"loss": 1}', b'{"step": "2"}', b"caf\xe9", b""]


def test_lines_that_no_run_wrote_are_passed_over_and_kept(tmp_path):
    for step in (1, 2):
        write_log(tmp_path, step, loss=1.0)
    with (tmp_path / LOG).open("ab") as file:
        file.write(b"\n".join(FOREIGN) + b"\n" + json.dumps({"step": 3}).encode() + b'\n{"step": 4, "lo')
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3]
    truncate_log(tmp_path, 2)
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2]
    assert (tmp_path / LOG).read_bytes().splitlines()[2:] == FOREIGN


def test_log_lines_have_five_digits(tmp_path):
    assert write_log(tmp_path, 3, loss=1.23456789, by_position=[0.987654321], kind="x") == {
        "step": 3, "loss": 1.2346, "by_position": [0.98765], "kind": "x",
    }  # fmt: skip
