"""Prompts: every form that is read, and one line of error, with its number, for every other."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cli import assert_one_error
from support.conversations import invoke_prepare, write_lines

from dflash.core.errors import DataError
from dflash.prompts.conversations import conversation, digest, read_conversations


def test_every_form_of_line_is_read(tmp_path):
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    file = write_lines(
        tmp_path / "p.jsonl",
        b'\xef\xbb\xbf{"prompt": "a", "check": {"any": 1}}',
        '{"prompt": "a\u2028b", "response": "c"}',
        "",
        '{"prompt": "a", "completion": "d"}',
        json.dumps({"messages": turns, "prompt": "not this"}),
    )
    read = read_conversations(str(file))
    assert [[m["content"] for m in c.messages] for c in read] == [["a"], ["a\u2028b", "c"], ["a", "d"], ["S", "U"]]
    assert [c.answered for c in read] == [False, True, True, False]
    assert [c.where[-6:] for c in read] == ["line 1", "line 2", "line 4", "line 5"]


def test_a_template_makes_the_prompt_from_a_lines_own_keys_and_the_other_keys_are_kept(tmp_path):
    line = '{"question": "1+1?", "level": 3, "response": "2", "prompt": "not this"}'
    (read,) = read_conversations(write_lines(tmp_path / "p.jsonl", line), template="[{level}] {question}")
    assert [m["content"] for m in read.messages] == ["[3] 1+1?", "2"]
    assert read.extra == read.unanswered().extra == {"question": "1+1?", "level": 3}


def test_a_limit_reads_the_first_lines_only(tmp_path):
    file = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}', '{"prompt": "b"}', "broken")
    assert [c.messages[0]["content"] for c in read_conversations(file, limit=2)] == ["a", "b"]
    assert len(read_conversations(write_lines(tmp_path / "one.jsonl", '{"prompt": "a"}'), limit=10**20)) == 1


def user(text: object) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}]})


BAD_LINES = {
    "broken": ('{"prompt": "x"', r"line 3 is not valid JSON \(Expecting ',' delimiter, character 15\)"),
    "utf8": (b'{"prompt": "\xff"}', "line 3: byte 13 is not UTF-8"),
    "list": ("[1]", "line 3 must hold an object, not a list"),
    "number": ("7", "line 3 must hold an object, not a int"),
    "keys": (
        '{"text": "x"}',
        r"line 3 has no 'prompt' or 'messages' \(its keys: 'text'\); make .* --template '\{text\}'",
    ),
    "prompt type": ('{"prompt": 7}', "line 3: the text of the user must be a string, got 7"),
    "response type": ('{"prompt": "x", "response": null}', "line 3: the text of the assistant must be a string"),
    "both": ('{"prompt": "x", "response": "a", "completion": "b"}', "line 3 has both 'response' and 'completion'"),
    "empty prompt": ('{"prompt": " "}', "line 3: the prompt is empty; expected some text"),
    "messages type": ('{"messages": "x"}', "line 3: 'messages' must be a list of at least one message, got 'x'"),
    "no messages": ('{"messages": []}', r"line 3: 'messages' must be a list of at least one message, got \[\]"),
    "message type": ('{"messages": ["x"]}', "line 3: a message must have 'role' and 'content', got 'x'"),
    "message keys": ('{"messages": [{"role": "user"}]}', "line 3: a message must have 'role' and 'content'"),
    "role": ('{"messages": [{"role": "human", "content": ""}]}', "line 3: the role 'human' is not known"),
    "parts": (user([{"type": "text"}]), "line 3: the text of the user must be a string"),
    "assistant first": ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 3 has no message of the user"),
    "system last": (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}',
        "line 3 ends with the role 'system'",
    ),
    "surrogate": ('{"prompt": "\\ud800"}', "line 3: the text of the user holds half a surrogate pair"),
    "long number": ('{"prompt": "a", "n": ' + "1" * 5000 + "}", "line 3 cannot be read: Exceeds the limit"),
    "deep": ("[" * 100_000, "line 3 is (nested too deeply|not valid JSON)"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_one_line_of_error_with_its_number(kind, tmp_path):
    line, message = BAD_LINES[kind]
    file = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}', "", line)
    with pytest.raises(DataError, match=message) as error:
        read_conversations(file)
    assert "\n" not in str(error.value)


@given(st.binary(max_size=80))
def test_any_bytes_are_conversations_or_a_data_error(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_bytes(data)
    with pytest.raises(DataError):
        assert not read_conversations(str(file))


# --- hub datasets (a stand-in for the library: no network) ----------------------------------------------------


def fake_datasets(monkeypatch, rows) -> list[tuple]:
    calls: list[tuple] = []

    def load_dataset(name, subset, split):
        calls.append((name, subset, split))
        if isinstance(rows, Exception):
            raise rows
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_a_hub_dataset_is_read_by_name_split_and_template(monkeypatch):
    calls = fake_datasets(monkeypatch, [{"question": "a"}, {"question": "b"}])
    read = read_conversations("org/set", split="test", subset="main", template="Q: {question}")
    assert calls == [("org/set", "main", "test")]
    assert [c.messages[0]["content"] for c in read] == ["Q: a", "Q: b"]
    with pytest.raises(DataError, match=r"org/set \[test\], row 0 has no 'prompt' or 'messages'"):
        read_conversations("org/set", split="test")
    with pytest.raises(DataError, match="row 0 has no 'answer' for the template"):
        read_conversations("org/set", template="{answer}")
    with pytest.raises(DataError, match="does not fit"):
        read_conversations("org/set", template="{question")


def test_a_hub_dataset_that_cannot_be_had_is_one_line_of_error(monkeypatch, tmp_path, target_folder):
    fake_datasets(monkeypatch, ConnectionError("no route\nto host"))
    with pytest.raises(DataError, match=r"Cannot load split 'train' .* no route to host"):
        read_conversations("org/set")
    fake_datasets(monkeypatch, [])
    with pytest.raises(DataError, match="org/set is empty"):
        read_conversations("org/set")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert_one_error(invoke_prepare("org/set", tmp_path, target_folder), r"pip install '\.\[hub\]'")


def test_a_file_and_a_path_are_never_a_hub_dataset(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "org").mkdir()
    write_lines(tmp_path / "org/set", '{"prompt": "a"}')
    monkeypatch.chdir(tmp_path)
    assert len(read_conversations("org/set")) == 1
    for missing in ("data/none.jsonl", Path("org/none")):
        with pytest.raises(DataError, match=f"There is no file '{missing}'; expected a JSONL file"):
            read_conversations(missing)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "p.jsonl is empty; expected lines such as"),
        ("\n \n", "p.jsonl is empty; expected lines such as"),
        (None, "There is no file '.*p.jsonl'"),
        ("a folder", "Cannot read .*: Is a directory"),
    ],
)
def test_a_file_without_prompts_is_one_line_of_error(target_folder, tmp_path, content, message):
    data = tmp_path / "p.jsonl"
    if content == "a folder":
        data.mkdir()
    elif content is not None:
        data.write_text(content)
    assert_one_error(invoke_prepare(data, tmp_path, target_folder), message)


def test_the_digest_tells_conversations_apart_by_every_turn():
    alone = conversation({"prompt": "a"}, "line 1")
    one, other = (conversation({"turns": ["a", turn]}, "line 1", turns="turns") for turn in "bc")
    assert len({digest([c]) for c in (alone, one, other)}) == 3
    goes_on = one.after("x")
    assert [(m["role"], m["content"]) for m in goes_on.messages] == [("user", "a"), ("assistant", "x"), ("user", "b")]
    assert goes_on.later == ()
