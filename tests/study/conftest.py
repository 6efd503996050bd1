"""What the tests of studies share: a tiny target, its dataset, prompts, and a study of two drafters."""

import json
from pathlib import Path

import pytest
import yaml
from support.runs import recipe_values, write_dataset, write_target

from dflash.core.settings import from_dict
from dflash.study import Study


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a dataset and prompts."""
    folder = tmp_path_factory.mktemp("study")
    write_target(folder / "target")
    write_dataset(folder / "data", folder / "target")
    lines = [json.dumps({"prompt": text}) for text in ("AB", "CDE", "F", "GH")]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def study_values(place: Path, folder: Path, **changes: object) -> dict:
    """Four cells of two drafters, each of three steps, on three prompts."""
    recipe = recipe_values(place)
    recipe["run"] |= {"steps": 3, "evaluate_every": 3, "evaluate_tokens": 4}
    del recipe["run"]["folder"]
    return {
        "folder": str(folder),
        "target": str(place / "target"),
        "prompts": {"short": {"file": str(place / "prompts.jsonl"), "limit": 3}},
        "decode": {"max_tokens": 8},
        "recipe": recipe,
        "vary": {"train.objective.gamma": [7, 2], "decode.block_size": [4, 2]},
    } | changes


@pytest.fixture
def make(place: Path, tmp_path: Path):
    """A study in a folder of its own, with ``changes``."""

    def made(**changes: object) -> Study:
        return from_dict(Study, study_values(place, tmp_path / "study", **changes), "study")

    return made


@pytest.fixture
def write(place: Path, tmp_path: Path):
    """The same as a file."""

    def written(**changes: object) -> Path:
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(study_values(place, tmp_path / "study", **changes)))
        return path

    return written
