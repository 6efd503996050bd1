"""Datasets: what is read, who wrote what, which half it goes to, and the same bytes however often it was killed."""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import STOP, TEXT_VOCAB, byte_tokenizer, plain_greedy, qwen3_model, save_target
from typer.testing import CliRunner

import dflash
from dflash import LoadedTargetModel, cli
from dflash.errors import DataError
from dflash.training import prepare as preparing
from dflash.training import shards
from dflash.training.chat import encode, response_spans
from dflash.training.data import Sequences
from dflash.training.prepare import PrepareSettings, is_held_out, prepare
from dflash.training.prompts import Conversation, conversation, read_conversations
from dflash.training.shards import open_dataset, target_fingerprint, tokenizer_fingerprint

TINY = {"layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}


def tiny_model(seed: int = 1):
    return qwen3_model(seed, TEXT_VOCAB, **TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target on disk whose pass takes well under a millisecond."""
    return save_target(tiny_model(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder) -> LoadedTargetModel:
    return dflash.load_target(folder)


def prompts(count: int) -> list[Conversation]:
    return [conversation({"prompt": f"Say {i}"}, f"line {i}") for i in range(count)]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def texts(sequences: Sequences, wrote: bool = True) -> list[str]:
    """The responses (or all else), decoded, one string a sequence."""
    parts = np.split(np.arange(len(sequences.tokens)), np.cumsum(sequences.lengths)[:-1])
    return [byte_tokenizer().decode(sequences.tokens[p][sequences.response[p] == wrote]) for p in parts]


# --- reading prompts ------------------------------------------------------------------------------------------


def write_lines(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))
    return path


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


def test_a_template_makes_the_prompt_from_a_lines_own_keys(tmp_path):
    file = write_lines(tmp_path / "p.jsonl", '{"question": "1+1?", "level": 3, "response": "2"}')
    (read,) = read_conversations(str(file), template="[{level}] {question}")
    assert [m["content"] for m in read.messages] == ["[3] 1+1?", "2"]


def user(text: object) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}]})


BAD_LINES = {
    "broken": ('{"prompt": "x"', r"line 3 is not valid JSON \(Expecting ',' delimiter, character 15\)"),
    "utf8": (b'{"prompt": "\xff"}', "line 3: byte 13 is not UTF-8"),
    "list": ("[1]", "line 3 is a list, not an object"),
    "number": ("7", "line 3 is a int, not an object"),
    "keys": ('{"text": "x"}', r"line 3 has no 'prompt' or 'messages' \(its keys: 'text'\)"),
    "prompt type": ('{"prompt": 7}', "line 3: the text of the user must be a string, got 7"),
    "response type": ('{"prompt": "x", "response": null}', "line 3: the text of the assistant must be a string"),
    "both": ('{"prompt": "x", "response": "a", "completion": "b"}', "line 3 has both 'response' and 'completion'"),
    "empty prompt": ('{"prompt": " "}', "line 3: the prompt is empty"),
    "messages type": ('{"messages": "x"}', "line 3: 'messages' must be a list of at least one message, got 'x'"),
    "no messages": ('{"messages": []}', r"line 3: 'messages' must be a list of at least one message, got \[\]"),
    "message type": ('{"messages": ["x"]}', "line 3: a message must have 'role' and 'content', got 'x'"),
    "message keys": ('{"messages": [{"role": "user"}]}', "line 3: a message must have 'role' and 'content'"),
    "role": ('{"messages": [{"role": "human", "content": ""}]}', "line 3: the role 'human' is not known"),
    "parts": (user([{"type": "text"}]), "line 3: the text of the user must be a string"),
    "assistant first": ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 3 has no message of the user"),
    "surrogate": ('{"prompt": "\\ud800"}', "line 3: the text of the user holds half a surrogate pair"),
    "deep": ("[" * 100_000, "line 3 is (nested too deeply|not valid JSON)"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_one_line_of_error_with_its_number(kind, tmp_path, folder):
    line, message = BAD_LINES[kind]
    file = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}', "", line)
    assert_one_error(invoke(file, tmp_path, folder), message)


def test_a_conversation_that_ends_with_a_system_message_is_refused():
    turns = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    with pytest.raises(DataError, match="line 1 ends with the role 'system'"):
        conversation({"messages": turns}, "line 1")


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


def test_a_hub_dataset_that_cannot_be_had_is_one_line_of_error(monkeypatch, tmp_path, folder):
    fake_datasets(monkeypatch, ConnectionError("no route\nto host"))
    assert_one_error(invoke("org/set", tmp_path, folder), "Cannot load split 'train' .* no route to host")
    fake_datasets(monkeypatch, [])
    assert_one_error(invoke("org/set", tmp_path, folder), "org/set is empty")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert_one_error(invoke("org/set", tmp_path, folder), r"pip install 'dflash-research\[hub\]'")


def test_reading_a_file_never_asks_for_the_hub_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "org").mkdir()
    write_lines(tmp_path / "org/set", '{"prompt": "a"}')
    monkeypatch.chdir(tmp_path)
    assert len(read_conversations("org/set")) == 1
    with pytest.raises(DataError, match=r"There is no file 'data/none.jsonl'"):
        read_conversations("data/none.jsonl")


# --- tokens and masks -----------------------------------------------------------------------------------------


def with_template(template: str) -> LoadedTargetModel:
    tokenizer = byte_tokenizer().__class__(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token=STOP)
    tokenizer.chat_template = template
    return LoadedTargetModel(tiny_model(), tokenizer)


def turns(*contents: str) -> Conversation:
    roles = ("user", "assistant") * len(contents)
    return Conversation(tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=False)), "line 1")


def responses_of(conversation: Conversation, target: LoadedTargetModel, chat: bool = True, **switches) -> list[str]:
    """Every run of response tokens, decoded."""
    row = encode(conversation, target, chat, switches)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.response.astype(int), [0]])))
    return [byte_tokenizer().decode(row.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\ue000\ue001"), min_size=1, max_size=12)


@settings(max_examples=25)
@given(st.lists(TEXT, min_size=2, max_size=6))
def test_the_mask_is_every_response_with_its_stop_token_and_nothing_else(target, contents):
    talk = turns(*contents[: len(contents) // 2 * 2])
    row = encode(talk, target, True, {})
    assert row.tokens.tolist() == target.tokenizer.apply_chat_template(list(talk.messages))
    expected = []
    for message in talk.messages:
        own = target.tokenizer.encode(f"<|im_start|>{message['role']}\n", add_special_tokens=False)
        wrote = target.tokenizer.encode(message["content"] + STOP, add_special_tokens=False)
        expected += [False] * len(own) + [message["role"] == "assistant"] * len(wrote) + [False]
    if len(expected) == len(row.tokens):  # else a merge crosses a border
        assert row.response.tolist() == expected


def test_a_prompt_without_response_ends_where_the_target_begins(target):
    row = encode(turns("Hi"), target, True, {})
    assert row.response is None
    assert row.tokens.tolist() == target.build_prompt("Hi")


TURN = "<|im_start|>{{ m.role }}\n%s<|im_end|>\n"
EACH = "{% for m in messages %}%s{% endfor %}"
THINKING = EACH.replace(
    "%s",
    TURN % "{% set t = m.content.split('</think>') %}{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ t[0].split('<think>')[-1].strip() if t | length > 1 }}\n</think>\n\n{% endif %}{{ t[-1].lstrip('\n') }}",
)


def test_responses_are_found_where_a_template_trims_them():
    trims = with_template(EACH.replace("%s", TURN % "{{ m.content | trim }}"))
    assert responses_of(turns("q", " one ", "r", "two\n"), trims) == ["one" + STOP, "two" + STOP]


def test_a_first_token_that_takes_in_a_space_of_the_template_is_of_the_response():
    spaced = with_template(EACH.replace("%s", "[{{ m.role }}] {{ m.content }}"))
    assert responses_of(turns("q", "two", "r", "one"), spaced) == [" two", "one"]  # " t" is one token, " o" is two


def test_what_follows_a_response_belongs_to_it_only_if_it_is_a_stop_token():
    lines = with_template(EACH.replace("%s", "{{ m.content }}\n"))
    assert responses_of(turns("q", "one", "r", "two"), lines) == ["one", "two"]


def test_responses_are_found_where_a_template_adds_and_drops_thoughts():
    thinks = with_template(THINKING)
    assert responses_of(turns("q", "one", "r", "two"), thinks) == ["one" + STOP, "two" + STOP]
    thought = turns("q", "<think>\nhm\n</think>\n\none", "r", "<think>\nso\n</think>\n\ntwo")
    assert responses_of(thought, thinks) == ["one" + STOP, "so\n</think>\n\ntwo" + STOP]


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content | upper }}",  # rewritten
        "{{ m.content }}{{ m.content }}",  # repeated
        "{{ m.content if loop.last or m.role == 'user' }}",  # left out
    ],
)
def test_a_template_that_hides_or_rewrites_a_response_is_refused(content):
    with pytest.raises(DataError, match=r"line 1: the target's chat template does not show the response in message 2"):
        encode(turns("q", "one", "r", "two"), with_template(EACH.replace("%s", TURN % content)), True, {})


def test_a_template_that_refuses_messages_is_quoted():
    refuses = with_template("{{ raise_exception('roles must alternate') }}")
    for talk in (turns("q"), turns("q", "a")):
        with pytest.raises(DataError, match=r"line 1: the target's chat template refuses .* roles must alternate"):
            encode(talk, refuses, True, {})


def test_switches_reach_the_template():
    speaks = with_template("{{ mood }}" + EACH.replace("%s", TURN % "{{ m.content }}"))
    row = encode(turns("q", "a"), speaks, True, {"mood": "calm"})
    assert byte_tokenizer().decode(row.tokens).startswith("calm<|im_start|>")
    assert responses_of(turns("q", "a"), speaks, mood="a") == ["a" + STOP]


def test_without_a_template_prompt_and_response_stand_as_they_are(target):
    row = encode(turns("ab", "c\n"), target, False, {})
    assert byte_tokenizer().decode(row.tokens) == "abc\n" + STOP
    assert byte_tokenizer().decode(row.tokens[row.response]) == "c\n" + STOP
    assert encode(turns("ab"), target, False, {}).tokens.tolist() == target.build_prompt("ab", chat=False)
    with pytest.raises(DataError, match=r"only a prompt and one response .* not messages of user, assistant, user"):
        encode(turns("a", "b", "c"), target, False, {})


def test_a_tokenizer_without_character_offsets_is_refused_for_given_responses_only(target, monkeypatch):
    monkeypatch.setattr(type(target.tokenizer._tokenizer), "is_fast", False)
    assert encode(turns("q"), target, True, {}).response is None
    with pytest.raises(DataError, match="does not say which characters"):
        encode(turns("q", "a"), target, True, {})


def test_the_tokenizer_of_a_larger_model_is_refused(target):
    small = LoadedTargetModel(qwen3_model(1, vocab=100, **TINY), target.tokenizer)
    with pytest.raises(DataError, match=r"line 1: the target knows tokens 0 to 99, .* give 260: .* another model"):
        encode(turns("q"), small, True, {})
    with pytest.raises(DataError, match=r"give none"):
        encode(turns("q"), with_template(""), True, {})


def test_spans_are_found_whatever_stands_around_them():
    def render(messages):
        return "|".join(m["content"] for m in messages)

    talk = turns("b", "ab", "ab", "b|").messages
    assert response_spans(render, talk, "b|ab|ab|b|") == [(2, 4), (8, 10)]


# --- the dataset ----------------------------------------------------------------------------------------------


def test_responses_are_the_targets_own_greedy_ones(target, tmp_path):
    prepare(prompts(7), target, PrepareSettings(max_tokens=9, shard_size=3, heldout_percent=0), tmp_path)
    made = open_dataset(tmp_path, "train", target)
    starts = made.starts
    for i, talk in enumerate(prompts(7)):
        tokens = made.tokens[starts[i] : starts[i] + made.lengths[i]].tolist()
        wrote = made.response[starts[i] : starts[i] + made.lengths[i]]
        prompt = target.build_prompt(talk.messages[0]["content"])
        assert wrote.tolist() == [False] * len(prompt) + [True] * 9
        assert tokens == prompt + plain_greedy(target.model, prompt, 9)[0]


class Stopping(LoadedTargetModel):
    """Every sixth token ends a response, so that random models end theirs."""

    def stop_token_ids(self):
        return frozenset(range(0, TEXT_VOCAB, 6))


def test_a_response_ends_with_its_stop_token_or_is_counted_as_cut(target, tmp_path):
    stopping = Stopping(target.model, target.tokenizer)
    manifest = prepare(prompts(40), stopping, PrepareSettings(max_tokens=5, temp=1.0, heldout_percent=0), tmp_path)
    made = open_dataset(tmp_path, "train", stopping)
    ends = np.isin(made.tokens[np.cumsum(made.lengths) - 1], list(stopping.stop_token_ids()))
    assert 0 < (~ends).sum() == manifest["splits"]["train"]["cut"] < len(made)
    assert (made.response_lengths[~ends] == 5).all()
    assert (made.response_lengths >= 2).all()  # a response of nothing but its end is left out, and counted
    assert manifest["dropped"]["no_response"] == 40 - len(made) > 0


def test_what_is_given_is_used_and_what_is_missing_is_written(target, tmp_path):
    talks = [*prompts(3), turns("q", "given"), *prompts(5)[3:]]
    options = PrepareSettings(max_tokens=4, heldout_percent=0)
    manifest = prepare(talks, target, options, tmp_path / "kept")
    assert manifest["splits"]["train"]["cut"] == 5  # all but the given one
    made = texts(open_dataset(tmp_path / "kept", "train", target))
    assert made[3] == "given" + STOP
    assert len(made) == 6
    prepare(talks, target, PrepareSettings(max_tokens=4, heldout_percent=0, regenerate=True), tmp_path / "new")
    again = texts(open_dataset(tmp_path / "new", "train", target))
    assert again[3] != made[3]
    assert again[:3] == made[:3]


def test_of_a_conversation_only_the_new_response_counts_when_the_target_writes_one(target, tmp_path):
    prepare([turns("q", "a", "r")], target, PrepareSettings(max_tokens=4, heldout_percent=0), tmp_path)
    made = open_dataset(tmp_path, "train", target)
    assert np.flatnonzero(made.response).tolist() == list(range(len(made.tokens) - 4, len(made.tokens)))
    assert texts(made, wrote=False)[0].endswith(f"a{STOP}\n<|im_start|>user\nr{STOP}\n<|im_start|>assistant\n")


def test_repeated_prompts_stay_once_and_long_sequences_are_dropped(target, tmp_path):
    talks = [
        turns("q", "a"),
        turns("q", "b"),
        turns("q"),
        turns("q", "a", "q", "c"),
        turns("x" * 99),
        turns("r", "y" * 99),
    ]
    manifest = prepare([*talks, turns("e", "")], target, PrepareSettings(max_length=90, heldout_percent=0), tmp_path)
    assert manifest["dropped"] == {"duplicate": 2, "too_long": 2, "no_response": 1}
    assert texts(open_dataset(tmp_path, "train", target)) == ["a" + STOP, f"a{STOP}c{STOP}"]


def test_no_sequence_is_longer_than_asked_or_than_the_target_can_read(target, tmp_path):
    prepare(prompts(4), target, PrepareSettings(max_length=60, max_tokens=300, heldout_percent=0), tmp_path / "asked")
    assert (open_dataset(tmp_path / "asked", "train", target).lengths == 60).all()
    short = LoadedTargetModel(qwen3_model(1, TEXT_VOCAB, **TINY, max_position_embeddings=50), target.tokenizer)
    prepare(prompts(4), short, PrepareSettings(heldout_percent=0), tmp_path / "able")
    assert (open_dataset(tmp_path / "able", "train", short).lengths == 50).all()


def test_a_prompt_is_held_out_whatever_surrounds_it_and_the_share_is_as_asked(target, tmp_path):
    held = [is_held_out(c, 10) for c in prompts(2000)]
    assert 150 < sum(held) < 250
    assert all(is_held_out(c, 20) for c, h in zip(prompts(2000), held, strict=True) if h)
    assert is_held_out(turns("q"), 50) == is_held_out(turns("q", "a", "b", "c"), 50)
    prepare(prompts(30), target, PrepareSettings(max_tokens=2, heldout_percent=20, shard_size=4), tmp_path)
    parts = {split: texts(open_dataset(tmp_path, split, target), wrote=False) for split in ("train", "heldout")}
    asked = {True: [], False: []}
    for talk in prompts(30):
        asked[is_held_out(talk, 20)].append(byte_tokenizer().decode(target.build_prompt(talk.messages[0]["content"])))
    assert parts == {"train": asked[False], "heldout": asked[True]}
    assert asked[True]


def test_samples_depend_on_seed_and_shard_and_follow_the_temperature(target, tmp_path):
    def sampled(name: str, **options) -> list[str]:
        mx.random.seed(random.randrange(1000))  # whatever happened before
        prepare(prompts(6), target, PrepareSettings(max_tokens=8, heldout_percent=0, **options), tmp_path / name)
        return texts(open_dataset(tmp_path / name, "train", target))

    greedy, one, again = sampled("greedy"), sampled("one", temp=1.0), sampled("again", temp=1.0)
    assert one == again != greedy
    assert sampled("seed", temp=1.0, seed=1) != one
    assert sampled("p", temp=1.0, top_p=1e-6) == sampled("k", temp=1.0, top_k=1) == greedy
    assert tree(tmp_path / "one") == tree(tmp_path / "again")
    rows = [encode(talk, target, True, {}) for talk in prompts(4)]
    shards_of_one_text = [
        [
            tokens.tolist()
            for tokens, _ in preparing.answer_shard(rows, target, PrepareSettings(max_tokens=8, temp=1.0), name)
        ]
        for name in ("train 0", "train 1", "train 0")
    ]
    assert shards_of_one_text[0] == shards_of_one_text[2] != shards_of_one_text[1]


# --- resuming -------------------------------------------------------------------------------------------------

OPTIONS = PrepareSettings(max_tokens=6, temp=1.0, shard_size=2, heldout_percent=25)


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def test_stopped_before_and_after_every_file_it_ends_with_the_same_bytes(target, tmp_path, monkeypatch):
    prepare(prompts(9), target, OPTIONS, tmp_path / "whole", "p")
    replace, left = os.replace, [0]

    def killed_replace(source, destination):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        replace(source, destination)
        if left[0] == -1:
            raise Killed

    monkeypatch.setattr("dflash.files.os.replace", killed_replace)
    files = len(tree(tmp_path / "whole"))
    for before in range(1, files + 1):
        place = tmp_path / str(before)
        left[0] = before
        with pytest.raises(Killed):
            prepare(prompts(9), target, OPTIONS, place, "p")
        (place / ".plan-x1.json").write_text("{")  # what a kill in the middle of writing leaves
        left[0] = 0  # the next file is written, then it is killed
        if len(tree(place)) <= files - 1:
            with pytest.raises(Killed):
                prepare(prompts(9), target, OPTIONS, place, "p")
        left[0] = files + 9
        prepare(prompts(9), target, OPTIONS, place, "p")
        assert tree(place) == tree(tmp_path / "whole")


COMMAND = [sys.executable, "-c", "from dflash.cli import main; main()"]


def command(data: Path, output: Path, target: Path) -> list[str]:
    options = "--max-tokens 24 --temp 1 --seed 3 --shard-size 4 --heldout-percent 20".split()
    return [*COMMAND, "prepare", str(data), "--output", str(output), "--target", str(target), *options]


def shard_count(folder: Path) -> int:
    return len(list(folder.glob("*/[0-9]*.safetensors")))


def test_killed_ten_times_it_ends_with_the_same_bytes(folder, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", *(json.dumps({"prompt": f"Say {i}"}) for i in range(240)))
    assert subprocess.run(command(data, tmp_path / "whole", folder), capture_output=True).returncode == 0
    whole, rng = tree(tmp_path / "whole"), random.Random(0)
    killed = tmp_path / "killed"
    for _ in range(10):
        wanted = shard_count(killed) + rng.randint(0, 3)  # 0: before the first new one
        process = subprocess.Popen(command(data, killed, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while shard_count(killed) < wanted and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (killed / "manifest.json").exists()
        assert all(whole[name] == data for name, data in tree(killed).items() if "/." not in f"/{name}")
    last = subprocess.run(command(data, killed, folder), capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert tree(killed) == whole


def test_a_finished_dataset_is_left_as_it_is(target, tmp_path, monkeypatch):
    first = prepare(prompts(5), target, OPTIONS, tmp_path)
    monkeypatch.setattr(preparing, "write_responses", None)
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.*")}
    assert prepare(prompts(5), target, OPTIONS, tmp_path) == first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.*")} == times


def test_the_bar_counts_every_sequence_once_and_starts_where_the_work_was(target, tmp_path, monkeypatch):
    bars = []

    class Bar(preparing.tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **options | {"disable": False, "file": io.StringIO()})
            bars.append(self)

    monkeypatch.setattr(preparing, "tqdm", Bar)
    talks = [*prompts(8), turns("q", "a")]
    prepare(talks, target, OPTIONS, tmp_path)
    (tmp_path / "train/000001.safetensors").unlink()
    prepare(talks, target, OPTIONS, tmp_path)
    _, first, _, second = bars
    assert [first.initial, first.n, first.total] == [0, 9, 9]
    assert [second.initial, second.n, second.total] == [7, 9, 9]
    assert re.search(r"\[\d\d:\d\d<.*sequences/s\]|s/ sequences", first.fp.getvalue())  # time left, rate


def test_other_settings_input_or_target_do_not_continue_a_dataset(target, tmp_path, monkeypatch):
    prepare(prompts(5), target, OPTIONS, tmp_path)

    def refused(talks, target, options):
        with pytest.raises(DataError) as error:
            prepare(talks, target, options, tmp_path)
        return str(error.value)

    changed = PrepareSettings(max_tokens=6, temp=0.5, shard_size=2, heldout_percent=25)
    assert "begun with other input: temp was 1.0, now it is 0.5" in refused(prompts(5), target, changed)
    assert "other conversations" in refused(prompts(6), target, OPTIONS)
    other = LoadedTargetModel(tiny_model(seed=2), target.tokenizer)
    assert "another target" in refused(prompts(5), other, OPTIONS)
    dated = with_template("Today. " + byte_tokenizer().chat_template)
    dated.model = target.model
    assert "the chat template gives other text" in refused(prompts(5), dated, OPTIONS)
    (tmp_path / "plan.json").unlink()
    assert "without its plan.json" in refused(prompts(5), target, OPTIONS)


# --- opening --------------------------------------------------------------------------------------------------


def test_a_fine_tuned_copy_is_another_target_and_a_cast_one_is_not(target, folder):
    again = LoadedTargetModel(tiny_model(), target.tokenizer)
    again.model.apply(lambda w: w.astype(mx.bfloat16))
    assert target_fingerprint(again) == target_fingerprint(target) == target_fingerprint(dflash.load_target(folder))
    layer = again.model.layers[0].self_attn.o_proj
    layer.weight = layer.weight * 1.1
    assert target_fingerprint(again) != target_fingerprint(target)
    longer = LoadedTargetModel(qwen3_model(1, TEXT_VOCAB, **TINY, rope_theta=5_000.0), target.tokenizer)
    assert target_fingerprint(longer) != target_fingerprint(target)


def test_another_target_or_tokenizer_is_refused(target, tmp_path):
    prepare(prompts(3), target, PrepareSettings(max_tokens=3, heldout_percent=0), tmp_path)
    assert len(open_dataset(tmp_path, "train", None)) == len(open_dataset(tmp_path, "train", target)) == 3
    with pytest.raises(DataError, match="was made with another target"):
        open_dataset(tmp_path, "train", LoadedTargetModel(tiny_model(seed=2), target.tokenizer))
    tokenizer = byte_tokenizer().__class__(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token=STOP)
    tokenizer.add_tokens(["<new>"])
    other = LoadedTargetModel(target.model, tokenizer)
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(target)
    with pytest.raises(DataError, match="was made with another tokenizer"):
        open_dataset(tmp_path, "train", other)


def spoil_shard(folder: Path) -> None:
    path = folder / "train/000001.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def spoil_manifest(folder: Path, **changes) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SPOILED = {
    "unfinished": (lambda f: (f / "manifest.json").unlink(), "is not finished; give its 'dflash prepare' command"),
    "nothing": (lambda f: [(f / n).unlink() for n in ("manifest.json", "plan.json")], "holds no dataset"),
    "missing shard": (lambda f: (f / "train/000001.safetensors").unlink(), "000001.safetensors is missing"),
    "damaged shard": (spoil_shard, "000001.safetensors is damaged"),
    "exchanged shard": (
        lambda f: (f / "train/000000.safetensors").write_bytes((f / "train/000001.safetensors").read_bytes()),
        "holds 4 sequences, but its manifest says 5",
    ),
    "version": (lambda f: spoil_manifest(f, version=9), "version 9; expected 'dflash-dataset', version 1"),
    "format": (lambda f: spoil_manifest(f, format="other"), "is of format 'other'"),
    "no splits": (lambda f: spoil_manifest(f, splits={}), "manifest.json is damaged"),
    "json": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is not valid JSON"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_a_spoiled_dataset_is_refused(kind, target, tmp_path):
    spoil, message = SPOILED[kind]
    prepare(prompts(5), target, PrepareSettings(max_tokens=3, shard_size=3, heldout_percent=0), tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError, match=re.escape(message)):
        open_dataset(tmp_path, "train", target)


def test_an_empty_split_is_refused(target, tmp_path):
    prepare(prompts(3), target, PrepareSettings(max_tokens=3, heldout_percent=0), tmp_path)
    with pytest.raises(DataError, match="no sequences in its split 'heldout'"):
        open_dataset(tmp_path, "heldout", target)


def test_a_missing_or_damaged_shard_is_made_again(target, tmp_path):
    prepare(prompts(9), target, OPTIONS, tmp_path)
    whole = tree(tmp_path)
    spoil_shard(tmp_path)
    with pytest.raises(DataError, match=r"damaged: .* remove it and give the 'dflash prepare' command again"):
        prepare(prompts(9), target, OPTIONS, tmp_path)
    (tmp_path / "train/000001.safetensors").unlink()
    prepare(prompts(9), target, OPTIONS, tmp_path)
    assert tree(tmp_path) == whole


# --- the command ----------------------------------------------------------------------------------------------


def invoke(data: object, output: Path, target: Path, *options: str):
    args = ["prepare", data, "--output", output / "made", "--target", target, *options]
    return CliRunner().invoke(cli.app, [str(a) for a in args])


def assert_one_error(result, message: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert re.search(message, result.stderr), result.stderr


def test_the_command_makes_a_dataset_and_says_what_is_in_it(folder, target, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", *['{"prompt": "a"}'] * 2, '{"prompt": "b", "response": "c"}')
    result = invoke(data, tmp_path, folder, "--max-tokens", "5", "--heldout-percent", "0")
    assert result.exit_code == 0, result.output
    assert "train    2 sequences" in result.stdout
    assert "1 duplicate, 0 too long" in result.stdout
    assert len(open_dataset(tmp_path / "made", "train", target)) == 2
    assert json.loads((tmp_path / "made/manifest.json").read_text())["source"] == "p.jsonl"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-length", "9"], r"None of the 1 conversations can be used \(1 too long\); max_length 9"),
        (["--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["--max-length", "2"], "max_length must be more than 2"),
        (["--heldout-percent", "100"], "heldout_percent must be at least 0 and below 100"),
        (["--top-p", "2"], "top_p must be between 0 and 1"),
        (["--top-k", "999"], "top_k must be below the target's 264 tokens"),
        (["--temp", "-1"], "temp must be at least 0"),
        (["--chat-template-config", "{"], "--chat-template-config is not valid JSON"),
        (["--chat-template-config", "[1]"], "--chat-template-config must be a JSON object"),
        (["--target", "no/such folder"], "No checkpoint folder at 'no/such folder'"),
    ],
)
def test_bad_options_are_one_line_of_error(folder, tmp_path, options, message):
    data = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}')
    assert_one_error(invoke(data, tmp_path, folder, *options), message)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_one_line_of_error(folder, tmp_path, content):
    data = write_lines(tmp_path / "p.jsonl", content)
    assert_one_error(invoke(data, tmp_path, folder), "p.jsonl is empty; expected lines such as")


def test_a_missing_file_and_a_folder_are_one_line_of_error(folder, tmp_path):
    assert_one_error(invoke(tmp_path / "none.jsonl", tmp_path, folder), "There is no file '.*none.jsonl'")
    assert_one_error(invoke(tmp_path, tmp_path, folder), "Cannot read .*: Is a directory")


def test_conversations_without_response_tokens_are_one_line_of_error(folder, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", '{"prompt": "a", "response": ""}')
    assert_one_error(invoke(data, tmp_path, folder), r"None of the 1 conversations can be used \(1 no response\)")


def test_an_unwritable_folder_is_one_line_of_error(folder, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}')
    (tmp_path / "made").write_text("a file stands where the folder should be")
    assert_one_error(invoke(data, tmp_path, folder), "Cannot write to .*made: File exists")
    assert_one_error(invoke(data, Path("/proc"), folder), "Cannot write to /proc/made: ")


ALMOST_FULL = """
import resource, dflash.target, mlx.core as mx
from dflash.cli import main
mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))  # MKL makes its own small files
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # bytes of one file: the plan fits, a shard does not
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits for the size of a file")
def test_a_full_disk_is_one_line_of_error_and_the_same_command_continues(folder, target, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", *(json.dumps({"prompt": f"Say {i}"}) for i in range(8)))
    options = [str(data), "--target", str(folder), "--max-tokens", "50", "--shard-size", "4", "--output"]
    arguments = [sys.executable, "-c", ALMOST_FULL, "prepare", *options, str(tmp_path / "made")]
    full = subprocess.run(arguments, capture_output=True, text=True)
    assert full.returncode == 1
    assert re.fullmatch(
        r"error: Cannot write to \S+made: .* Make room or .* continues where it stopped\.\n", full.stderr
    )
    assert set(tree(tmp_path / "made")) == {"plan.json"}
    for name in ("made", "quiet"):
        assert CliRunner().invoke(cli.app, ["prepare", *options, str(tmp_path / name)]).exit_code == 0
    assert tree(tmp_path / "made") == tree(tmp_path / "quiet")


def test_a_target_that_cannot_be_batched_is_refused_before_the_work(target, tmp_path, monkeypatch):
    class Solitary:
        pass

    monkeypatch.setattr(preparing, "make_prompt_cache", lambda model: [Solitary()])
    with pytest.raises(DataError, match="layer 0 keeps a Solitary"):
        prepare(prompts(2), target, PrepareSettings(), tmp_path)
    prepare([turns("q", "a")], target, PrepareSettings(heldout_percent=0), tmp_path / "given")


def test_unfinished_files_of_a_killed_run_are_removed_and_others_are_not(tmp_path):
    (tmp_path / "train").mkdir()
    kept = [tmp_path / ".my-own.json", tmp_path / "train/000000.safetensors"]
    gone = [tmp_path / ".manifest-a1_b.json", tmp_path / "train/.000001-xyz.safetensors"]
    for file in kept + gone:
        file.write_text("")
    shards.remove_unfinished(tmp_path)
    assert [f.exists() for f in kept + gone] == [True, True, False, False]
