"""Two processes on loopback train as one does, and one that is lost ends the other with a checkpoint."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.runs import read_log, write_dataset, write_recipe, write_target

import dflash
from dflash.core.errors import TrainingError
from dflash.core.settings import load_settings
from dflash.training.loop.distributed import Ranks, time_limit
from dflash.training.recipe import Recipe
from dflash.training.train import train

PROGRAM = "import sys; sys.argv[0] = 'dflash'; from dflash import cli; cli.main()"
LIMIT = 60  # seconds that a survivor may take to end; tests wait no longer for anything


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_target(folder / "target")
    write_dataset(folder / "data", folder / "target")
    write_recipe(folder)
    return folder


class Pair:
    """Ranks 0 and 1 of ``dflash train`` on the ring backend, started as ``mlx.launch`` starts them."""

    def __init__(self, folder: Path, name: str, *overrides: str, plugin: Path | None = None):
        ports = [free_port() for _ in range(2)]
        hosts = folder / f"{name}-hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        sets = [a for o in (f"run.folder={folder / name}", *overrides) for a in ("--set", o)]
        sets += [] if plugin is None else ["--plugin", str(plugin)]
        environment = os.environ | {
            "PYTHONPATH": str(Path(dflash.__file__).parents[1]),
            "MLX_HOSTFILE": str(hosts),
        }
        self.run = folder / name
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "train", str(folder / "recipe.yaml"), *sets],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment | {"MLX_RANK": str(rank)},
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
            time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def free_ports(count: int) -> int:
    """The first of ``count`` free ports in a row."""
    while True:
        first = free_port()
        with ExitStack() as listeners, suppress(OSError, OverflowError):
            for port in range(first, first + count):
                listeners.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def weights(run: Path) -> dict[str, np.ndarray]:
    arrays = mx.load(str(run / "state.safetensors"))
    return {name: np.array(w) for name, w in arrays.items() if name.startswith("model.")}


def assert_same_weights(one: Path, two: Path) -> None:
    first, second = weights(one), weights(two)
    assert first.keys() == second.keys()
    for name, w in first.items():
        np.testing.assert_allclose(w, second[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_ranks_of_mlx_launch_reach_the_weights_of_one_process_with_the_same_global_batch(folder):
    """Started as the README says; the ring of ``mlx.launch`` takes the ports from the starting one on."""
    train(load_settings(Recipe, folder / "recipe.yaml", [f"run.folder={folder / 'one'}"]))
    scripts, port = Path(sys.executable).parent, free_ports(2)
    command = [scripts / "mlx.launch", "-n", "2", "--backend", "ring", "--starting-port", str(port)]
    training = [scripts / "dflash", "train", folder / "recipe.yaml", "--set", f"run.folder={folder / 'two'}"]
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
    assert_same_weights(folder / "one", folder / "two")
    one, two = read_log(folder / "one"), read_log(folder / "two")
    assert [line["step"] for line in one] == [line["step"] for line in two]  # rank 0 alone writes
    for a, b in zip(one, two, strict=True):
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-3)
        assert a.get("blocks") == b.get("blocks")


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        pytest.param(1, signal.SIGKILL, id="rank 1"),
        pytest.param(0, signal.SIGKILL, id="rank 0", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, id="silent", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_the_other_within_a_minute_and_the_run_can_go_on(folder, lost, how):
    name = f"lost-{lost}-{how.name}"
    with Pair(folder, name, "run.steps=3000", "run.evaluate_every=1000000", "run.peer_timeout=10") as pair:
        pair.wait_for_steps(4)
        pair.processes[lost].send_signal(how)
        survivor = pair.processes[1 - lost]
        _, errors = survivor.communicate(timeout=LIMIT)  # raises if it does not end
    assert survivor.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("error: Another process of this run has died or cannot be reached."), errors
    assert int(mx.load(str(pair.run / "state.safetensors"), return_metadata=True)[1]["step"]) >= 2
    assert weights(pair.run)


@pytest.mark.slow
def test_a_rank_that_is_killed_does_not_change_where_the_run_ends(folder):
    (folder / "one").exists() or train(load_settings(Recipe, folder / "recipe.yaml", [f"run.folder={folder / 'one'}"]))
    with Pair(folder, "resumed", "run.peer_timeout=10") as pair:
        pair.wait_for_steps(3)
        pair.processes[1].kill()
        pair.processes[0].communicate(timeout=LIMIT)
    with Pair(folder, "resumed") as pair:
        outputs = [p.communicate(timeout=LIMIT) for p in pair.processes]
        assert [p.returncode for p in pair.processes] == [0, 0], outputs
    assert_same_weights(folder / "one", folder / "resumed")


@pytest.mark.slow
def test_ranks_make_up_for_an_evaluation_that_was_cut_short(folder):
    """As if killed in the last one: rank 0 alone knows that it is missing from the log."""
    for lines in (slice(None), slice(-1)):
        if (log := folder / "owing" / "log.jsonl").exists():
            whole = log.read_text()
            log.write_text("".join(whole.splitlines(keepends=True)[lines]))
        with Pair(folder, "owing") as pair:
            outputs = [p.communicate(timeout=LIMIT) for p in pair.processes]
            assert [p.returncode for p in pair.processes] == [0, 0], outputs
    assert log.read_text().splitlines()[:-1] == whole.splitlines()[:-1]
    assert read_log(pair.run)[-1]["step"] == json.loads(whole.splitlines()[-1])["step"]
    assert "blocks" in read_log(pair.run)[-1]


def test_ctrl_c_saves_and_ends_every_rank_with_130(folder):
    with Pair(folder, "stopped", "run.steps=3000", "run.evaluate_every=1000000", "run.checkpoint_every=50000") as pair:
        pair.wait_for_steps(2)
        for process in pair.processes:
            process.send_signal(signal.SIGINT)
        outputs = [p.communicate(timeout=LIMIT) for p in pair.processes]
        assert [p.returncode for p in pair.processes] == [130, 130], outputs
    step = int(mx.load(str(pair.run / "state.safetensors"), return_metadata=True)[1]["step"])
    assert step == read_log(pair.run)[-1]["step"]


def test_a_callback_of_rank_0_saves_and_ends_every_rank_with_0(folder):
    plugin = folder / "stops_at_two.py"
    plugin.write_text("""
from dflash.training import StopTraining, register_callback

@register_callback("stops_at_two")
def stops_at_two(run):
    def on_log(line):
        if line["step"] == 2:
            raise StopTraining("two are enough")
    return on_log
""")
    sets = ["run.steps=3000", "run.evaluate_every=1000000", "run.checkpoint_every=50000", "run.log_every=1"]
    with Pair(folder, "ended", *sets, "run.callbacks=[stops_at_two]", plugin=plugin) as pair:
        outputs = [p.communicate(timeout=LIMIT) for p in pair.processes]
        assert [p.returncode for p in pair.processes] == [0, 0], outputs
    assert "Stopped at step 3 of 3000 by a callback (two are enough); the same command continues." in outputs[0][1]
    assert mx.load(str(pair.run / "state.safetensors"), return_metadata=True)[1]["step"] == "3"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_cannot_be_shared_evenly_is_refused_on_every_rank(folder, monkeypatch, caplog, rank):
    ranks = Ranks()
    ranks.rank, ranks.size = rank, 2
    monkeypatch.setattr(Ranks, "of_this_run", lambda timeout: ranks)
    uneven = load_settings(Recipe, folder / "recipe.yaml", ["run.batches_per_step=3"])
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


def test_one_process_alone_sends_nothing():
    ranks = Ranks.of_this_run(timeout=1.0)
    assert (ranks.rank, ranks.size, ranks.group, ranks.is_main) == (0, 1, None, True)
    assert ranks.shard([3, 4, 5]) == [3, 4, 5]
    assert ranks.all_gather([1.5]) == [1.5]
