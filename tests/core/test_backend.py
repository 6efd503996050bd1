"""Device, dtype and BLAS choices, and the error where MLX cannot run."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from dflash.core import backend
from dflash.core.backend import mkl_library, on_cpu


@pytest.fixture
def without_mlx(tmp_path: Path) -> dict[str, str]:
    """Environment of a process in which ``mlx.core`` cannot be imported, as with the bare wheel on Linux."""
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')\n")
    return {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}


def test_import_without_a_backend_says_what_to_install(without_mlx: dict[str, str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "from dflash import load_target"],
        env=without_mlx,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert "BackendError" in last
    assert "pip install '.[cpu]'" in last


def test_command_without_a_backend_prints_one_line(without_mlx: dict[str, str]) -> None:
    script = "import sys; sys.argv = ['dflash', 'doctor']; from dflash.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", script], env=without_mlx, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("error: MLX has no backend")
    assert len(run.stderr.strip().splitlines()) == 1


def test_half_precision_is_computed_in_float32_on_the_cpu_only() -> None:
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert backend.compute_dtype(mx.bfloat16) == (mx.float32 if on_cpu else mx.bfloat16)
    assert backend.compute_dtype(mx.float32) == mx.float32


def test_blas_says_so_when_mlx_came_first() -> None:
    script = "import mlx.core; from dflash import backend; print(backend.blas)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    if sys.platform == "linux":
        assert "before dflash" in run.stdout
        if on_cpu() and mkl_library() is not None:
            assert run.stderr == "mlx was imported before dflash, too late for the fast BLAS: import dflash first.\n"


@pytest.mark.parametrize("chosen", [None, "1"])
def test_cudnn_plans_no_attention_unless_the_user_asks_for_it(monkeypatch, chosen):
    monkeypatch.delenv("MLX_CUDA_USE_CUDNN_SDPA")
    if chosen:
        monkeypatch.setenv("MLX_CUDA_USE_CUDNN_SDPA", chosen)
    script = "import dflash, os; print(os.environ['MLX_CUDA_USE_CUDNN_SDPA'])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == (chosen or "0")


def test_a_thread_that_used_mlx_does_not_abort_the_process_at_its_exit():
    code = """if True:
        import threading
        import dflash, mlx.core as mx
        from dflash.core.backend import wait_for_this_thread
        thread = threading.Thread(target=lambda: (wait_for_this_thread(), mx.random.state))
        thread.start()
        thread.join()
    """
    for _ in range(3):  # without the wait, most of them abort
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
