"""Two processes on loopback train as one does, and one that is lost ends the other with a checkpoint."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support import small_run
from support.runs import read_log, recipe

import dflash
from dflash.core.errors import StopTraining, TrainingError
from dflash.training.loop.distributed import LOST, Ranks, time_limit
from dflash.training.loop.fit import FitSettings, fit
from dflash.training.loop.run_folder import read_progress
from dflash.training.train import train

LIMIT = 60  # seconds that a survivor may take to end; tests wait no longer for anything


class Pair:
    """Ranks 0 and 1 of the small run on the ring backend, started as ``mlx.launch`` starts them."""

    def __init__(self, run: Path, timeout: float = 30):
        hosts, first = run.with_suffix(".json"), free_ports(2)
        hosts.write_text(json.dumps([[f"127.0.0.1:{first + rank}"] for rank in range(2)]))
        environment = {"PYTHONPATH": str(Path(dflash.__file__).parents[1]), "MLX_HOSTFILE": str(hosts)}
        self.run = run
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-P", small_run.__file__, str(run), str(timeout), "25"],
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | environment | {"MLX_RANK": str(rank)},
            )
            for rank in range(2)
        ]

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def wait_for_steps(self, count: int) -> None:
        end = time.monotonic() + LIMIT
        while not ((self.run / "log.jsonl").exists() and len(read_log(self.run)) >= count):
            assert time.monotonic() < end, "the run did not start"
            assert all(p.poll() is None for p in self.processes), [p.communicate() for p in self.processes]
            time.sleep(0.002)

    def end(self, code: int) -> None:
        """Wait for both to end with ``code``."""
        errors = [process.communicate(timeout=LIMIT) for process in self.processes]
        assert [process.returncode for process in self.processes] == [code, code], errors


def free_ports(count: int) -> int:
    """The first of ``count`` free ports in a row."""
    while True:
        with ExitStack() as listeners, suppress(OSError, OverflowError):
            first = 0
            for port in range(count):
                listener = listeners.enter_context(socket.socket())
                listener.bind(("127.0.0.1", first and first + port))
                first = first or listener.getsockname()[1]
            return first


def assert_same_weights(one: Path, two: Path) -> None:
    first, second = (mx.load(str(run / "state.safetensors")) for run in (one, two))
    assert first.keys() == second.keys()
    for name in (name for name in first if name.startswith("model.")):
        np.testing.assert_allclose(first[name], second[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_ranks_of_mlx_launch_reach_the_weights_of_one_process_with_the_same_global_batch(folder, tmp_path):
    """Started as the README says; the ring of ``mlx.launch`` takes the ports from the starting one on."""
    train(recipe(folder, "one", "run.steps=4"))
    scripts, port, two = Path(sys.executable).parent, free_ports(2), tmp_path / "two"
    command = [scripts / "mlx.launch", "-n", "2", "--backend", "ring", "--starting-port", str(port)]
    training = [
        scripts / "dflash",
        "train",
        folder / "recipe.yaml",
        "--set",
        f"run.folder={two}",
        "--set",
        "run.steps=4",
    ]
    launch = subprocess.Popen(
        [*command, *training], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = launch.communicate(timeout=2 * LIMIT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launch.pid, signal.SIGKILL)  # the ranks, should the launcher have left them running
    assert launch.returncode == 0, output
    assert "2 process(es)" in output
    assert_same_weights(folder / "one", two)
    logs = read_log(folder / "one"), read_log(two)
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]]  # rank 0 alone writes
    for a, b in zip(*logs, strict=True):
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-3)
        assert a.get("blocks") == b.get("blocks")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The small run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    small_run.run(folder, Ranks(), 25)
    return folder


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        pytest.param(1, signal.SIGKILL, id="rank 1"),
        pytest.param(0, signal.SIGKILL, id="rank 0", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, id="silent", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_the_other_within_a_minute_and_does_not_change_where_the_run_ends(alone, tmp_path, lost, how):
    with Pair(tmp_path / "lost", timeout=10 if how == signal.SIGSTOP else 30) as pair:
        pair.wait_for_steps(4)
        pair.processes[lost].send_signal(how)
        survivor = pair.processes[1 - lost]
        _, errors = survivor.communicate(timeout=LIMIT)  # raises if it does not end
    assert survivor.returncode == 1
    assert LOST in errors.strip().splitlines()[-1], errors
    if lost == 1 and how == signal.SIGKILL:
        saved = read_progress(pair.run / "state.safetensors").step
        assert 4 <= saved == read_log(pair.run)[-1]["step"] < small_run.STEPS
    with Pair(pair.run) as pair:
        pair.end(0)
    assert_same_weights(alone, pair.run)


def test_ctrl_c_saves_and_ends_every_rank(tmp_path):
    with Pair(tmp_path / "stopped") as pair:
        pair.wait_for_steps(2)
        for process in pair.processes:
            process.send_signal(signal.SIGINT)
        pair.end(-signal.SIGINT)
    assert read_progress(pair.run / "state.safetensors").step == read_log(pair.run)[-1]["step"]


def test_ranks_make_up_for_an_evaluation_that_was_cut_short(alone, tmp_path):
    """Rank 0 alone knows that it is missing from the log."""
    shutil.copytree(alone, tmp_path / "owing")
    log = tmp_path / "owing" / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))  # as if killed in the last evaluation
    with Pair(tmp_path / "owing") as pair:
        pair.end(0)
    steps = [(line["step"], line.get("score")) for line in read_log(pair.run) if "score" in line]
    assert steps == [(30, 1.0), (40, 2.0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_cannot_be_shared_evenly_is_refused_on_every_rank(folder, monkeypatch, caplog, rank):
    ranks = Ranks()
    ranks.rank, ranks.size = rank, 2
    monkeypatch.setattr(Ranks, "of_this_run", lambda timeout: ranks)
    uneven = recipe(folder, "uneven", "run.batches_per_step=3")
    caplog.set_level("INFO", "dflash")  # restored afterwards: rank 1 logs warnings alone
    with pytest.raises(TrainingError, match="cannot be shared evenly by 2 processes"):
        train(uneven)


def test_a_time_limit_calls_only_what_is_late():
    called: list[int] = []
    with time_limit(0.05, lambda: called.append(1)):
        pass
    time.sleep(0.1)
    assert not called
    with time_limit(0.05, lambda: called.append(2)):
        time.sleep(0.3)
    assert called == [2]


class OneOfTwo(Ranks):
    """A rank beside one that does the same, and is asked to stop after its second step if ``other`` says so."""

    def __init__(self, other: float):
        super().__init__()
        self.other, self.sent = other, []

    def all_gather(self, values):
        self.sent.append(values[-1])
        return [*values, self.other if len(self.sent) == 2 else 0.0]


@pytest.mark.parametrize(("code", "stop"), [(1.0, KeyboardInterrupt), (2.0, StopTraining)])
def test_whichever_rank_is_asked_to_stop_all_end_after_the_same_step(tmp_path, code, stop):
    def asked(line):
        raise stop

    def run(name, ranks, **options):
        model, batch = nn.Linear(2, 1), (mx.ones((1, 2)),)
        settings = FitSettings(steps=5, log_every=1, checkpoint_every=100)
        with pytest.raises(stop):
            fit(model, lambda _: batch, lambda m, b: m(*b).sum(), settings, tmp_path / name, ranks=ranks, **options)
        return read_progress(tmp_path / name / "state.safetensors").step

    assert run("told", OneOfTwo(code)) == 2
    ranks = OneOfTwo(0.0)
    assert run("tells", ranks, on_log=[asked]) == 2
    assert ranks.sent == [0.0, code]


def test_one_process_alone_sends_nothing():
    ranks = Ranks.of_this_run(timeout=1.0)
    assert (ranks.rank, ranks.size, ranks.group, ranks.is_main) == (0, 1, None, True)
    assert ranks.shard([3, 4, 5]) == [3, 4, 5]
    assert ranks.all_gather([1.5]) == [1.5]
