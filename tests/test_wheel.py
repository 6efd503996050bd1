"""The built wheel answers by itself: unpacked elsewhere, run outside the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
RUN = "import dflash, runpy; print(dflash.__file__); runpy.run_module('dflash', run_name='__main__')"


def test_the_unpacked_wheel_generates_with_the_bundled_models(tmp_path, monkeypatch):
    hatchling = pytest.importorskip("hatchling.build", reason="builds the wheel")
    monkeypatch.chdir(CHECKOUT)
    wheel = tmp_path / hatchling.build_wheel(str(tmp_path))
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(installed)
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
