"""The loop: stopped anywhere it ends with the same weights, and what blows up is named."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support import small_run
from support.runs import kill_at_random_moments, read_log

import dflash  # noqa: F401  (loads a fast BLAS before MLX)
from dflash.core.errors import StopTraining, TrainingError
from dflash.training.loop import clock, run
from dflash.training.loop.distributed import Ranks
from dflash.training.loop.fit import FitSettings, check_losses, fit
from dflash.training.loop.optimizer import AdamWSettings, MuonSettings
from dflash.training.loop.run_folder import read_progress


class Stop(Exception):
    """Stands for the machine being switched off."""


def toy_fit(
    folder: Path,
    settings: FitSettings,
    stop_at: int | None = None,
    wrong: dict[int, float] | None = None,
    evaluate: Callable[[], dict] | None = None,
    **options: object,
):
    """A matrix that is to become another one; batch ``n`` comes from ``n``, or is as ``wrong`` says."""
    mx.random.seed(0)
    model = nn.Linear(3, 2)

    def batch(number: int):
        if number == stop_at:
            raise Stop
        rng = np.random.default_rng(number)
        return mx.array(rng.normal(size=(4, 3)).astype(np.float32) * (wrong or {}).get(number, 1.0)), mx.array(1.0)

    def loss(model, batch):
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    options |= {"score": None if evaluate is None else "score", "name_batch": "batch {} (sequences 7)".format}
    fit(model, batch, loss, settings, folder, evaluate, **options)
    return np.array(model.weight)


@pytest.mark.parametrize("optimizer", [AdamWSettings(learning_rate=0.01), MuonSettings(warmup_steps=2, decay_steps=3)])
def test_any_stop_continues_bit_for_bit_with_either_optimizer(tmp_path, optimizer):
    settings = FitSettings(steps=9, batches_per_step=3, checkpoint_every=2, optimizer=optimizer)
    straight = toy_fit(tmp_path / "straight", settings)
    for stop_at in (5, 14, 22):
        with pytest.raises(Stop):
            toy_fit(tmp_path / "broken", settings, stop_at)
    assert np.array_equal(straight, toy_fit(tmp_path / "broken", settings))


def test_a_process_killed_at_random_moments_changes_no_byte(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    small_run.run(whole, Ranks(), 2)
    kill_at_random_moments([sys.executable, "-P", small_run.__file__, str(killed), "30", "2"], killed, 4)
    small_run.run(killed, Ranks(), 2)
    assert (killed / "state.safetensors").read_bytes() == (whole / "state.safetensors").read_bytes()
    one, other = ([line["step"] for line in read_log(run)] for run in (killed, whole))
    assert one == other


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, 4), (60.0, 0)])
def test_a_kill_loses_no_more_than_the_seconds_since_the_last_checkpoint(tmp_path, monkeypatch, seconds, kept):
    monkeypatch.setattr(run, "CHECKPOINT_SECONDS", seconds)
    monkeypatch.setattr(run, "CHECKPOINT_COSTS", 0.0)
    settings = FitSettings(steps=6, checkpoint_every=100)
    with pytest.raises(Stop):
        toy_fit(tmp_path / "killed", settings, stop_at=4)
    assert read_progress(tmp_path / "killed" / "state.safetensors").step == kept
    assert np.array_equal(toy_fit(tmp_path / "killed", settings), toy_fit(tmp_path / "straight", settings))


def test_a_stop_in_an_evaluation_loses_the_evaluation_alone(tmp_path):
    settings, asked = FitSettings(steps=6, log_every=1, checkpoint_every=100, evaluate_every=3), []

    def evaluate(step: int | None = None):
        asked.append(step)
        if step is not None:
            raise Stop
        return {"score": float(len(asked))}

    with pytest.raises(Stop):
        toy_fit(tmp_path / "stopped", settings, evaluate=lambda: evaluate(3))
    assert mx.load(str(tmp_path / "stopped" / "state.safetensors"), return_metadata=True)[1]["step"] == "3"
    weights = toy_fit(tmp_path / "stopped", settings, evaluate=evaluate)
    assert asked == [3, None, None]
    assert np.array_equal(weights, toy_fit(tmp_path / "straight", settings, evaluate=evaluate))
    one, other = (read_log(tmp_path / name) for name in ("stopped", "straight"))
    assert [line.keys() for line in one] == [line.keys() for line in other]
    toy_fit(tmp_path / "stopped", settings, evaluate=lambda: evaluate(6))  # done already


def test_accumulated_batches_give_the_weights_of_batches_side_by_side(tmp_path):
    results = [
        toy_fit(tmp_path / str(threads), FitSettings(steps=5, batches_per_step=4, threads=threads))
        for threads in (1, 2, 4)
    ]
    for weights in results[1:]:
        np.testing.assert_allclose(results[0], weights, rtol=1e-6)


@pytest.mark.parametrize(("factor", "message"), [(float("nan"), "loss is nan"), (1e4, "max_loss_spike 5 sets")])
def test_a_bad_loss_names_its_batch_and_keeps_the_checkpoint_before_it(tmp_path, factor, message):
    settings = FitSettings(steps=30, batches_per_step=2, checkpoint_every=1, max_loss_spike=5.0)
    with pytest.raises(TrainingError, match=message) as error:
        toy_fit(tmp_path, settings, wrong={41: factor})
    assert "step 21, in batch 41 (sequences 7)" in str(error.value)
    arrays, metadata = mx.load(str(tmp_path / "state.safetensors"), return_metadata=True)
    assert metadata["step"] == "20"
    assert all(np.isfinite(np.array(a)).all() for a in arrays.values())


@pytest.mark.parametrize("median", [2.0, -9.0, 0.0])
def test_how_far_a_loss_is_above_the_recent_ones_does_not_depend_on_their_sign(median):
    recent = [median - 0.5, median + 0.5] * 16  # of the size 0.5 around 0
    size = max(abs(median), 0.5)
    for value in (median - 0.3, median - 1000, median + 3.9 * size):
        check_losses([value], recent, 5.0, ["batch 0"], 40)
    with pytest.raises(TrainingError, match=f"from the recent median {median:.4g}"):
        check_losses([median + 4.1 * size], recent, 5.0, ["batch 0"], 40)


def test_weights_that_are_no_longer_finite_end_the_run_with_the_checkpoint_before_them(tmp_path):
    settings = FitSettings(steps=9, checkpoint_every=1, optimizer=AdamWSettings(learning_rate=1e38, warmup=0.9))
    with pytest.raises(TrainingError, match=r"After step \d: .* not finite|(loss|gradient) is (nan|inf)"):
        toy_fit(tmp_path, settings)
    arrays = mx.load(str(tmp_path / "state.safetensors"))
    assert all(np.isfinite(np.array(array)).all() for array in arrays.values())


# --- longer runs ----------------------------------------------------------------------------------------


def wsd(steps: int) -> FitSettings:
    optimizer = MuonSettings(warmup_steps=2, decay_steps=4)
    return FitSettings(steps=steps, checkpoint_every=100, evaluate_every=5, log_every=1, optimizer=optimizer)


@pytest.mark.parametrize("stop_at", [None, 5, 9], ids=["finished", "before the decay", "in the decay"])
def test_a_longer_run_continues_a_shorter_one_to_the_weights_that_it_would_have_had(tmp_path, stop_at):
    def evaluate():
        return {"score": 1.0}

    straight = toy_fit(tmp_path / "straight", wsd(16), evaluate=evaluate)
    try:
        toy_fit(tmp_path / "longer", wsd(10), stop_at, evaluate=evaluate)
    except Stop:
        assert stop_at is not None
    assert np.array_equal(straight, toy_fit(tmp_path / "longer", wsd(16), evaluate=evaluate))
    one, other = ([line["step"] for line in read_log(tmp_path / name)] for name in ("straight", "longer"))
    assert one == other
    for name in ("state", "best"):
        files = [mx.load(str(tmp_path / run / f"{name}.safetensors")) for run in ("straight", "longer")]
        assert all(mx.array_equal(value, files[1][key]) for key, value in files[0].items())


def test_a_run_killed_between_the_two_checkpoints_of_the_decay_can_still_be_made_longer(tmp_path, monkeypatch):
    written, save = [], run.save_checkpoint

    def killed(path: Path, *given: object) -> None:
        if written:
            raise Stop
        written.append(path)
        save(path, *given)

    with monkeypatch.context() as patched:
        patched.setattr(run, "save_checkpoint", killed)
        with pytest.raises(Stop):
            toy_fit(tmp_path / "killed", wsd(10))
    toy_fit(tmp_path / "killed", wsd(10))
    assert np.array_equal(toy_fit(tmp_path / "killed", wsd(16)), toy_fit(tmp_path / "straight", wsd(16)))


def test_a_run_that_cannot_have_another_length_is_refused_and_nothing_is_recorded(tmp_path):
    def run(steps):
        settings = FitSettings(steps=steps, optimizer=AdamWSettings())
        toy_fit(tmp_path / "cosine", settings, identity={"steps": steps}, may_change=["steps"])

    run(4)
    before = [(tmp_path / "cosine" / name).read_bytes() for name in ("state.safetensors", "recipe.json")]
    with pytest.raises(TrainingError, match=r"trained for 4 steps and cannot become a run of 6: .* with drafter\.from"):
        run(6)
    assert before == [(tmp_path / "cosine" / name).read_bytes() for name in ("state.safetensors", "recipe.json")]
    toy_fit(tmp_path / "muon", wsd(10))
    with pytest.raises(TrainingError, match="cannot become a run of 7"):
        toy_fit(tmp_path / "muon", wsd(7))


# --- identity, callbacks, log ---------------------------------------------------------------------------


def test_another_identity_is_refused_and_none_at_all_is_warned_of(tmp_path, caplog):
    settings = FitSettings(steps=2)
    toy_fit(tmp_path / "named", settings, identity={"loss": "a"})
    with pytest.raises(TrainingError, match="belongs to a run with loss 'a', this one has 'b'"):
        toy_fit(tmp_path / "named", settings, identity={"loss": "b"})
    toy_fit(tmp_path / "named", settings, identity={"loss": "a"})
    toy_fit(tmp_path / "nameless", settings)
    assert "pass identity= to fit()" not in caplog.text
    toy_fit(tmp_path / "nameless", settings)
    assert "pass identity= to fit()" in caplog.text


def test_callbacks_get_every_line_and_one_that_fails_does_not_stop_the_run(tmp_path, caplog):
    lines: list[dict] = []

    def fails(line: dict) -> None:
        raise OSError("no network")

    settings = FitSettings(steps=4, log_every=2, evaluate_every=4, optimizer=AdamWSettings(learning_rate=0.5, warmup=0))
    toy_fit(tmp_path, settings, evaluate=lambda: {"score": 1.0}, on_log=[fails, lines.append])
    assert lines == read_log(tmp_path)
    assert caplog.text.count("A callback failed at step") == 1
    assert [line["step"] for line in lines] == [2, 4, 4]
    assert lines[0]["learning_rate"] == pytest.approx(0.5 * 0.5 * (1 + np.cos(np.pi / 4)), rel=1e-4)
    assert {"loss", "grad_norm", "tokens_per_s", "time", "seconds", "peak_memory_gb"} < lines[0].keys()
    assert lines[2]["score"] == 1.0
    assert 0 < lines[0]["seconds"] <= lines[1]["seconds"] <= lines[2]["seconds"]


@pytest.mark.parametrize(
    ("stop", "at"),
    [
        (StopTraining("it is good enough"), 1),
        (StopTraining("it is good enough"), 4),
        (KeyboardInterrupt(), 3),
        (KeyboardInterrupt(), 5),
    ],
)
def test_a_callback_that_stops_the_run_loses_nothing(tmp_path, caplog, stop, at):
    caplog.set_level("INFO")
    settings = FitSettings(steps=5, log_every=1, checkpoint_every=100, evaluate_every=3)
    lines: list[dict] = []

    def stops(line: dict) -> None:
        if line["step"] >= at:
            raise stop

    def scored() -> dict:
        return {"score": 1.0}

    straight = toy_fit(tmp_path / "straight", settings, evaluate=scored)
    if at == 5:  # nothing is left to stop
        toy_fit(tmp_path / "stopped", settings, evaluate=scored, on_log=[stops, lines.append])
    else:
        with pytest.raises(type(stop)):
            toy_fit(tmp_path / "stopped", settings, evaluate=scored, on_log=[stops, lines.append])
        words = " by a callback (it is good enough)" if isinstance(stop, StopTraining) else ""
        assert f"Stopped at step {at + 1} of 5{words}; the same command continues." in caplog.text
        assert read_progress(tmp_path / "stopped" / "state.safetensors").step == at + 1
        assert lines == read_log(tmp_path / "stopped")
        assert "callback failed" not in caplog.text
        assert np.array_equal(straight, toy_fit(tmp_path / "stopped", settings, evaluate=scored))
    one, other = (read_log(tmp_path / name) for name in ("stopped", "straight"))
    assert [line.keys() for line in one] == [line.keys() for line in other]


def test_the_second_ctrl_c_stops_at_once_even_within_a_callback(tmp_path):
    def pressed_twice(line: dict) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        toy_fit(tmp_path, FitSettings(steps=5, log_every=1), on_log=[pressed_twice])
    assert not (tmp_path / "state.safetensors").exists()


def test_seconds_go_on_where_the_run_continues(tmp_path):
    settings = FitSettings(steps=4, log_every=1, checkpoint_every=2)
    with pytest.raises(Stop):
        toy_fit(tmp_path, settings, stop_at=3)
    path = tmp_path / "log.jsonl"
    path.write_text(path.read_text().replace('"seconds": ', '"seconds": 100'))
    toy_fit(tmp_path, settings)
    assert all(line["seconds"] > 100 for line in read_log(tmp_path))


def test_time_and_memory_are_told_after_the_second_step(tmp_path, caplog):
    caplog.set_level("INFO")
    toy_fit(tmp_path, FitSettings(steps=5, evaluate_every=2), evaluate=lambda: {"score": 1.0})
    assert re.match(
        r"3 steps left of about \S+ s: \d+ s, and 3 evaluation\(s\)\. Memory of a step: ", caplog.messages[0]
    )


def test_the_speed_of_steps_leaves_out_what_an_evaluation_takes(monkeypatch):
    now = iter([0.0, 0.0, 1.0, 9.0, 10.0])  # the clock is made, an evaluation begins and ends, the speed is asked for
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    own = clock.Clock(0.0)
    own.counted((mx.zeros((2, 8)),))
    with own.paused():
        pass
    assert own.tokens_per_second() == 16 / (10 - 8)
