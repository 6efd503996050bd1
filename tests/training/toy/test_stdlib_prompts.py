"""Prompts of the standard library: valid lines, evenly spread, the same every time."""

import sys

from support.conversations import write_lines

from dflash.prompts.conversations import read_conversations
from dflash.training.toy import stdlib_prompts


def test_the_prompts_are_lines_that_every_command_reads(capsys, monkeypatch, tmp_path):
    printed = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["stdlib_prompts", "7"])
        stdlib_prompts.main()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    texts = [talk.messages[0]["content"] for talk in read_conversations(write_lines(tmp_path / "p.jsonl", printed[0]))]
    assert len(set(texts)) == 7
    assert all("def " in text and text.count("\n") == 4 for text in texts)
