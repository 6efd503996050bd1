"""A dataset as text: its conversations with what the target wrote, and back to a file that prepare reads."""

import datetime
import json

import numpy as np
import pytest
from support.conversations import prompts, texts, turns
from support.models import STOP

from dflash.core.errors import DataError
from dflash.prompts.conversations import conversation, read_conversations
from dflash.training.data.dataset import json_line, open_dataset
from dflash.training.data.prepare import HeldoutRule, PrepareSettings, prepare
from dflash.training.data.text import export_dataset, read_dataset

TALKS = [conversation({"prompt": "Sum?", "answer": 7}, "line 1"), turns("q", "a", "r"), turns("s", "t"), *prompts(6)]


@pytest.fixture
def folder(target, tmp_path):
    settings = PrepareSettings(max_tokens=5, shard_size=4)
    prepare(TALKS, target, settings, tmp_path / "data", heldout=HeldoutRule(30, 3))
    return tmp_path / "data"


def test_every_conversation_is_told_with_its_split_and_what_the_target_wrote(folder, target):
    rows = list(read_dataset(folder))
    assert [row.number for row in rows] == list(range(9))
    for split in ("train", "heldout"):
        opened = open_dataset(folder, split, target)
        of_split = list(read_dataset(folder, split))
        assert of_split == [row for row in rows if row.split == split]
        assert [row.tokens for row in of_split] == opened.lengths.tolist()
        assert [row.response_tokens for row in of_split] == np.add.reduceat(
            opened.loss_mask, opened.starts, dtype=int
        ).tolist()
        told = [row.text["messages"][-1]["content"] for row in of_split]
        assert told == [text.removesuffix(STOP) for text in texts(opened)]
    assert [m["content"] for m in rows[1].text["messages"][:-1]] == ["q", "a", "r"]
    assert rows[2].text["messages"][-1]["content"] == "t"
    assert rows[0].text["answer"] == 7
    assert [row.text.get("finish_reason") for row in rows[:4]] == ["length", "length", None, "length"]


def test_an_exported_dataset_is_read_back_as_the_same_conversations(folder, target, tmp_path):
    file = tmp_path / "out.jsonl"
    assert export_dataset(folder, file) == 9
    talks = read_conversations(file)
    assert [list(talk.messages) for talk in talks] == [row.text["messages"] for row in read_dataset(folder)]
    assert talks[0].extra == {"answer": 7, "finish_reason": "length"}
    assert export_dataset(folder, file, "heldout") == len(open_dataset(folder, "heldout", None))


def test_missing_and_damaged_texts_are_named(folder):
    path = folder / "shards/000001.jsonl"
    lines = path.read_bytes().split(b"\n")
    for content, message in ((lines[0] + b"\n", "holds 1 conversations, but its shard holds 4"), (b"{", "is damaged")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            list(read_dataset(folder))
    path.unlink()
    with pytest.raises(DataError, match=r"000001.jsonl is missing; give the 'dflash prepare' command again"):
        list(read_dataset(folder))


def test_what_json_or_utf8_cannot_hold_is_kept_as_text(tmp_path):
    when = datetime.date(2026, 1, 2)
    assert json.loads(json_line({"messages": [], "when": when})) == {"messages": [], "when": "2026-01-02"}
    for text in ("naïve 漢字\u2028", "half \ud800"):
        (tmp_path / "x.jsonl").write_text(json_line({"answer": text}), encoding="utf-8")
        with (tmp_path / "x.jsonl").open(encoding="utf-8") as file:
            assert [json.loads(line) for line in file] == [{"answer": text}]
