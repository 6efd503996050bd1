"""Datasets: what the target wrote, in the same bytes however often the work was stopped."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.cli import invoke
from support.conversations import (
    NO_HELDOUT,
    Stopping,
    prompts,
    texts,
    tiny_model,
    tree,
    turns,
    with_template,
    write_lines,
)
from support.models import STOP, byte_tokenizer, plain_greedy

from dflash import LoadedTargetModel
from dflash.core.errors import DataError
from dflash.training.data import prepare as preparing
from dflash.training.data.dataset import change_split, open_dataset
from dflash.training.data.prepare import HeldoutRule, PrepareSettings, prepare
from dflash.training.data.text import read_dataset


def test_responses_are_the_targets_own_greedy_ones(target, tmp_path):
    prepare(prompts(7), target, PrepareSettings(max_tokens=9, shard_size=3), tmp_path, heldout=NO_HELDOUT)
    made = open_dataset(tmp_path, "train", target)
    for talk, start, length in zip(prompts(7), made.starts, made.lengths, strict=True):
        prompt = target.build_prompt(talk.messages[0]["content"])
        part = slice(start, start + length)
        assert made.loss_mask[part].tolist() == [False] * len(prompt) + [True] * 9
        assert made.tokens[part].tolist() == prompt + plain_greedy(target.model, prompt, 9)[0]


def test_a_response_ends_with_its_stop_token_or_is_counted_as_cut(target, tmp_path):
    stopping = Stopping(target.model, target.tokenizer)
    settings = PrepareSettings(max_tokens=5, temp=1.0)
    manifest = prepare(prompts(40), stopping, settings, tmp_path, heldout=NO_HELDOUT)
    made = open_dataset(tmp_path, "train", stopping)
    ends = np.isin(made.tokens[np.cumsum(made.lengths) - 1], list(stopping.stop_token_ids()))
    assert 0 < (~ends).sum() == manifest["splits"]["train"]["cut"] < len(made)
    written = np.add.reduceat(made.loss_mask, made.starts, dtype=int)
    assert (written[~ends] == 5).all()
    assert (written >= 2).all()  # a response of nothing but its end is left out, and counted
    assert manifest["dropped"]["no_response"] == 40 - len(made) > 0
    told = [(row.text["messages"][-1]["content"], row.text["finish_reason"]) for row in read_dataset(tmp_path)]
    expected = []
    for start, count, length, ended in zip(made.starts, written, made.lengths, ends, strict=True):
        response = made.tokens[start + length - count : start + length - ended]  # without its stop token
        expected.append((byte_tokenizer().decode(response), "stop" if ended else "length"))
    assert told == expected


def test_what_is_given_is_used_and_what_is_missing_is_written(target, tmp_path):
    talks = [*prompts(3), turns("q", "given"), *prompts(5)[3:]]
    settings = PrepareSettings(max_tokens=4)
    manifest = prepare(talks, target, settings, tmp_path / "kept", heldout=NO_HELDOUT)
    assert manifest["splits"]["train"]["cut"] == 5  # all but the given one
    made = texts(open_dataset(tmp_path / "kept", "train", target))
    assert made[3] == "given" + STOP
    assert len(made) == 6
    settings = PrepareSettings(max_tokens=4, regenerate=True)
    prepare(talks, target, settings, tmp_path / "new", heldout=NO_HELDOUT)
    again = texts(open_dataset(tmp_path / "new", "train", target))
    assert again[3] != made[3]
    assert again[:3] == made[:3]


def test_of_a_conversation_only_the_new_response_counts_when_the_target_writes_one(target, tmp_path):
    prepare([turns("q", "a", "r")], target, PrepareSettings(max_tokens=4), tmp_path)
    made = open_dataset(tmp_path, "train", target)
    assert np.flatnonzero(made.loss_mask).tolist() == list(range(len(made.tokens) - 4, len(made.tokens)))
    assert texts(made, responses=False)[0].endswith(f"a{STOP}\n<|im_start|>user\nr{STOP}\n<|im_start|>assistant\n")


# --- the split ------------------------------------------------------------------------------------------------


def test_another_split_needs_no_new_responses_and_stays_until_it_is_changed(target, tmp_path, monkeypatch):
    settings = PrepareSettings(max_tokens=2, shard_size=4)
    prepare(prompts(30), target, settings, tmp_path)
    monkeypatch.setattr(preparing, "answer_rows", None)
    for heldout in (HeldoutRule(20), None):  # None: as it was
        counts = prepare(prompts(30), target, settings, tmp_path, heldout=heldout)["splits"]
        assert counts["heldout"]["sequences"] > 1
        assert counts["heldout"]["sequences"] + counts["train"]["sequences"] == 30
    change_split(tmp_path, HeldoutRule(0))
    assert len(open_dataset(tmp_path, "train", target)) == 30
    assert prepare(prompts(30), target, settings, tmp_path)["heldout"]["percent"] == 0


# --- resuming -------------------------------------------------------------------------------------------------

SETTINGS = PrepareSettings(max_tokens=6, temp=1.0, shard_size=2)


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def test_stopped_before_and_after_every_file_it_ends_with_the_same_bytes(target, tmp_path, monkeypatch):
    talks = prompts(3)  # in two shards
    prepare(talks, target, SETTINGS, tmp_path / "whole", "p")
    renamed, left = os.replace, [0]

    def killed_replace(source, destination):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        renamed(source, destination)
        if left[0] == -1:
            raise Killed

    monkeypatch.setattr("dflash.core.files.os.replace", killed_replace)
    files = len(tree(tmp_path / "whole"))
    for before in range(1, files + 1):
        place = tmp_path / str(before)
        left[0] = before
        with pytest.raises(Killed):
            prepare(talks, target, SETTINGS, place, "p")
        place.mkdir(exist_ok=True)  # one that held nothing is gone
        (place / ".plan-x1.json").write_text("{")  # what a kill in the middle of writing leaves
        left[0] = 0  # the next file is written, then it is killed
        if len(tree(place)) <= files - 1:
            with pytest.raises(Killed):
                prepare(talks, target, SETTINGS, place, "p")
        left[0] = files + 9
        prepare(talks, target, SETTINGS, place, "p")
        assert tree(place) == tree(tmp_path / "whole")


def command(data: Path, output: Path, target: Path) -> list[str]:
    options = "--max-tokens 24 --temp 1 --seed 3 --shard-size 4 --heldout-percent 20".split()
    return ["prepare", str(data), str(output), "--target", str(target), *options]


def shard_count(folder: Path) -> int:
    return len(list(folder.glob("shards/[0-9]*.safetensors")))


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_again_and_again_it_ends_with_the_same_bytes(kills, target_folder, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", *(json.dumps({"prompt": f"Say {i}"}) for i in range(12 * kills)))
    assert invoke(*command(data, tmp_path / "whole", target_folder)).exit_code == 0
    whole, rng = tree(tmp_path / "whole"), random.Random(0)
    killed = tmp_path / "killed"
    for kill in range(kills):
        wanted = shard_count(killed) + rng.randint(kill == 0, 3)  # 0: before the first new one
        arguments = [sys.executable, "-m", "dflash", *command(data, killed, target_folder)]
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while shard_count(killed) < wanted and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (killed / "manifest.json").exists()
        assert all(whole[name] == data for name, data in tree(killed).items() if "/." not in f"/{name}")
    last = invoke(*command(data, killed, target_folder))
    assert last.exit_code == 0, last.output
    assert tree(killed) == whole


def test_missing_files_are_made_again_damaged_ones_named_and_finished_datasets_left(target, tmp_path, monkeypatch):
    first = prepare(prompts(5), target, SETTINGS, tmp_path)
    whole = tree(tmp_path)
    for suffix in ("safetensors", "jsonl"):
        (tmp_path / f"shards/000001.{suffix}").unlink()
        prepare(prompts(5), target, SETTINGS, tmp_path)
        assert tree(tmp_path) == whole
    monkeypatch.setattr(preparing, "answer_rows", None)
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.*")}
    assert prepare(prompts(5), target, SETTINGS, tmp_path) == first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.*")} == times
    damaged = tmp_path / "shards/000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"damaged: .* remove it and give the 'dflash prepare' command again"):
        prepare(prompts(5), target, SETTINGS, tmp_path)


def test_progress_counts_every_sequence_once_and_starts_where_the_work_was(target, tmp_path, monkeypatch):
    counted = []

    def progress(items, what, total=None, done=0):
        items = list(items)
        counted.append((what, total, done, len(items)))
        return items

    monkeypatch.setattr(preparing, "progress", progress)
    talks = [*prompts(8), turns("q", "a")]
    prepare(talks, target, SETTINGS, tmp_path)
    (tmp_path / "shards/000001.safetensors").unlink()
    prepare(talks, target, SETTINGS, tmp_path)
    assert counted == [("responses", 9, 0, 9), ("responses", 9, 7, 2)]


def test_other_settings_input_or_target_do_not_continue_a_dataset(target, tmp_path):
    prepare(prompts(5), target, SETTINGS, tmp_path)
    dated = with_template("Today. " + byte_tokenizer().chat_template)
    dated.model = target.model
    begun = {"talks": prompts(5), "target": target, "settings": SETTINGS}
    for now, message in (
        ({"settings": replace(SETTINGS, temp=0.5)}, "begun with other input: temp was 1.0, now it is 0.5"),
        ({"talks": prompts(6)}, "other conversations"),
        ({"target": LoadedTargetModel(tiny_model(seed=2), target.tokenizer)}, "another target"),
        ({"target": dated}, "the chat template gives other text"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(*(begun | now).values(), tmp_path)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(DataError, match=r"without its plan\.json"):
        prepare(*begun.values(), tmp_path)
