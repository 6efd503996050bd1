"""The built wheel answers by itself: installed elsewhere, run outside the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
RUN = "import dflash, runpy; print(dflash.__file__); runpy.run_module('dflash', run_name='__main__')"


def test_the_installed_wheel_generates_with_the_bundled_models(tmp_path):
    pytest.importorskip("hatchling", reason="builds the wheel")
    pip, quiet = [sys.executable, "-m", "pip"], ["--quiet", "--disable-pip-version-check", "--no-deps"]
    build = [*pip, "wheel", str(CHECKOUT), "--no-build-isolation", "--wheel-dir", str(tmp_path), *quiet]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    subprocess.run([*pip, "install", str(wheel), "--target", str(installed), *quiet], check=True)
    elsewhere.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", RUN, "generate", "What is 7 * 8?", "--max-tokens", "8"],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    where, _, answer = run.stdout.partition("\n")
    assert Path(where) == installed / "dflash" / "__init__.py"
    assert answer.strip()
