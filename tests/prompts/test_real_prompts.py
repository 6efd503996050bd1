"""The requests on which real chat models are measured: as many of each kind as stated, none of them twice."""

from collections import Counter
from pathlib import Path

import pytest

import dflash
from dflash.prompts.conversations import read_conversations
from dflash.training.data.self_prompts import unsuitable

FOLDER = Path(dflash.__file__).parent / "real"
KINDS = {
    "handwritten": {"chat": 20, "code": 20, "arithmetic and extraction": 20},
    "heldout": {"self-written": 100},
}


@pytest.mark.parametrize("name", KINDS)
def test_each_file_has_its_kinds(name):
    talks = read_conversations(FOLDER / f"{name}.jsonl")
    assert Counter(talk.extra["kind"] for talk in talks) == KINDS[name]
    assert all(len(talk.messages) == 1 for talk in talks)


def test_all_requests_are_suitable_and_different():
    texts = [talk.messages[0]["content"] for name in KINDS for talk in read_conversations(FOLDER / f"{name}.jsonl")]
    assert not any(map(unsuitable, texts))
    assert len({text.casefold() for text in texts}) == 160
