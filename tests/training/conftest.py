"""What the tests of training share: a target with a dataset, and one run that nothing disturbed."""

from pathlib import Path

import pytest
from support.runs import recipe, write_dataset, write_target

from dflash.training.train import train


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a dataset; runs get folders of their own in it."""
    folder = tmp_path_factory.mktemp("training")
    write_target(folder / "target")
    write_dataset(folder / "data", folder / "target")
    return folder


@pytest.fixture(scope="session")
def undisturbed(folder: Path) -> Path:
    """The folder of a finished run of 8 steps."""
    train(recipe(folder, "undisturbed"))
    return folder / "undisturbed"
