"""What every test shares: exact float32 products on CUDA, and hypothesis without deadlines."""

import os

# MLX's CUDA backend rounds float32 matrix products to TF32 (10 bits) unless told otherwise; comparisons
# with float64 and between batch shapes need all of float32. Read once, when MLX starts.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import dflash  # (before any `import mlx`: loads the fast BLAS)
from dflash.core.backend import blas_threads, set_blas_threads

# The first example of a shape pays for building a model, so examples have no even duration.
_SLOW_START = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dflash", derandomize=True, **_SLOW_START)  # the same examples in every run
settings.register_profile("random", **_SLOW_START)  # new ones: pytest --hypothesis-profile=random
settings.load_profile("dflash")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Notebooks first: each is one long test, and a process that begins one last keeps all others waiting."""
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")


@pytest.fixture(autouse=True)
def clock_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and plain steps take equally long, so that what the default policy decides depends on drafts alone."""
    monkeypatch.setattr("dflash.generate.CLOCK", lambda: 0.0)


@pytest.fixture(autouse=True)
def blas_threads_stay() -> Iterator[None]:
    """The last bits of a product depend on its number of threads, and runs are compared byte by byte."""
    before = blas_threads()
    yield
    if before is not None and blas_threads() != before:
        set_blas_threads(before)


@pytest.fixture(scope="session", autouse=True)
def texts_are_not_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Texts of targets are kept in a folder of this run, subprocesses included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target on disk whose pass takes well under a millisecond."""
    from support.conversations import tiny_model
    from support.models import save_target

    return save_target(tiny_model(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_folder: Path) -> dflash.LoadedTargetModel:
    return dflash.load_target(target_folder)
