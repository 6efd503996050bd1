"""What the tests of the command line share: a tiny pair of models on disk, and a file of prompts."""

import shutil

import pytest
from support.models import TEXT_VOCAB, qwen3_model, random_drafter, save_target

import dflash


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> list[str]:
    """Options that name a tiny random pair on disk."""
    folder = tmp_path_factory.mktemp("pair")
    save_target(qwen3_model(1, vocab=TEXT_VOCAB), folder / "target")
    dflash.save_drafter(random_drafter(3, TEXT_VOCAB), folder / "drafter")
    return ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]


@pytest.fixture(scope="session")
def loud_pair(pair, tmp_path_factory) -> list[str]:
    """The same, with a chat template that has a switch: ``loud`` adds four tokens."""
    folder = tmp_path_factory.mktemp("loud") / "target"
    shutil.copytree(pair[1], folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if loud %}LOUD{% endif %}")
    return ["--target", str(folder), *pair[2:]]


@pytest.fixture
def prompts(tmp_path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hi"}\n{"prompt": "Count"}\n')
    return str(file)
