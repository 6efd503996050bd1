"""Datasets: who wrote what, what goes where, and the same bytes however often it was killed."""

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

import mlx.core as mx
import numpy as np
import pytest
from support.conversations import (
    TINY,
    assert_one_error,
    invoke,
    prompts,
    texts,
    tiny_model,
    tree,
    turns,
    with_template,
    write_lines,
)
from support.models import STOP, TEXT_VOCAB, byte_tokenizer, plain_greedy, qwen3_model
from typer.testing import CliRunner

from dflash import LoadedTargetModel, cli
from dflash.errors import DataError
from dflash.training.data import prepare as preparing
from dflash.training.data.chat import Row, encode, encode_draft
from dflash.training.data.dataset import open_dataset
from dflash.training.data.prepare import PrepareSettings, is_heldout, prepare
from dflash.training.data.responses import generate_responses


def test_responses_are_the_targets_own_greedy_ones(target, tmp_path):
    prepare(prompts(7), target, PrepareSettings(max_tokens=9, shard_size=3, heldout_percent=0), tmp_path)
    made = open_dataset(tmp_path, "train", target)
    starts = made.starts
    for i, talk in enumerate(prompts(7)):
        tokens = made.tokens[starts[i] : starts[i] + made.lengths[i]].tolist()
        wrote = made.loss_mask[starts[i] : starts[i] + made.lengths[i]]
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
    written = np.add.reduceat(made.loss_mask, made.starts, dtype=int)
    assert (written[~ends] == 5).all()
    assert (written >= 2).all()  # a response of nothing but its end is left out, and counted
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


@pytest.mark.parametrize("guess", ["right", "wrong in the middle", "wrong at once", "too short", "too long"])
def test_given_responses_that_are_the_targets_own_are_not_decoded_again(target, tmp_path, monkeypatch, guess):
    options = PrepareSettings(max_tokens=12, heldout_percent=0, regenerate=True)
    prepare([turns("q")], target, options, tmp_path / "plain")
    own = open_dataset(tmp_path / "plain", "train", target)
    response = own.tokens[own.loss_mask].tolist()
    other = (response[5] + 1) % 200
    tries = {
        "right": response,
        "wrong in the middle": [*response[:5], other, *response[6:]],
        "wrong at once": [(response[0] + 1) % 200, *response],
        "too short": response[:4],
        "too long": [*response, 7],
    }
    decoded = []

    def counted(model, prompts, stops, max_tokens, *others):
        decoded.extend(max_tokens)
        return generate_responses(model, prompts, stops, max_tokens, *others)

    monkeypatch.setattr(preparing, "generate_responses", counted)
    row = Row(encode(turns("q"), target, True, {}).tokens, None, np.array(tries[guess]))
    ((tokens, wrote),) = preparing.answer_shard([row], target, options, "train 0")
    assert tokens.tolist() == own.tokens.tolist()
    assert wrote.tolist() == own.loss_mask.tolist()
    left = {"wrong in the middle": [7], "wrong at once": [12], "too short": [8]}
    assert decoded == left.get(guess, [])


def test_a_guess_ends_with_the_targets_stop_token(target):
    stops = frozenset(range(0, TEXT_VOCAB, 6))
    stopping = Stopping(target.model, target.tokenizer)
    rows = [encode(talk, target, True, {}) for talk in prompts(20)]
    options = PrepareSettings(max_tokens=12)
    own = preparing.answer_shard(rows, stopping, options, "train 0")
    guessing = [
        Row(row.tokens, None, np.append(tokens[len(row.tokens) :], 5))
        for row, (tokens, _) in zip(rows, own, strict=True)
    ]
    again = preparing.answer_shard(guessing, stopping, options, "train 0")
    assert any(tokens[-1] in stops for tokens, _ in own)
    assert [tokens.tolist() for tokens, _ in again] == [tokens.tolist() for tokens, _ in own]


def test_the_given_response_is_the_guess_where_it_can_be_told(target):
    def guess(talk, by):
        return encode_draft(talk, by, True, {}, encode(talk.unanswered(), by, True, {}).tokens)

    assert byte_tokenizer().decode(guess(turns("q", "ab"), target)) == "ab" + STOP
    assert guess(turns("q"), target) is None
    shouting = with_template("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    assert guess(turns("q", "ab"), shouting) is None


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_only_greedy_responses_are_guessed(target, tmp_path, monkeypatch, temp):
    checked = []
    monkeypatch.setattr(
        preparing,
        "accepted_prefixes",
        lambda target, prompts, guesses: checked.extend(guesses) or [],
    )
    options = PrepareSettings(max_tokens=5, heldout_percent=0, regenerate=True, temp=temp)
    prepare([turns("q", "a"), turns("r", "b")], target, options, tmp_path / "given")
    prepare([turns("q"), turns("r")], target, options, tmp_path / "bare")
    assert len(checked) == (2 if temp == 0 else 0)
    given, bare = (open_dataset(tmp_path / name, "train", target) for name in ("given", "bare"))
    assert texts(given) == texts(bare)


def test_of_a_conversation_only_the_new_response_counts_when_the_target_writes_one(target, tmp_path):
    prepare([turns("q", "a", "r")], target, PrepareSettings(max_tokens=4, heldout_percent=0), tmp_path)
    made = open_dataset(tmp_path, "train", target)
    assert np.flatnonzero(made.loss_mask).tolist() == list(range(len(made.tokens) - 4, len(made.tokens)))
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


def test_a_prompt_is_heldout_whatever_surrounds_it_and_the_share_is_as_asked(target, tmp_path):
    held = [is_heldout(c, 10) for c in prompts(2000)]
    assert 150 < sum(held) < 250
    assert all(is_heldout(c, 20) for c, h in zip(prompts(2000), held, strict=True) if h)
    assert is_heldout(turns("q"), 50) == is_heldout(turns("q", "a", "b", "c"), 50)
    prepare(prompts(30), target, PrepareSettings(max_tokens=2, heldout_percent=20, shard_size=4), tmp_path)
    parts = {split: texts(open_dataset(tmp_path, split, target), wrote=False) for split in ("train", "heldout")}
    asked = {True: [], False: []}
    for talk in prompts(30):
        asked[is_heldout(talk, 20)].append(byte_tokenizer().decode(target.build_prompt(talk.messages[0]["content"])))
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


def test_no_heldout_sequence_is_said_before_the_work(target, tmp_path, monkeypatch, caplog):
    class Begun(BaseException):
        pass

    def begun(*_):
        raise Begun

    monkeypatch.setattr(preparing, "generate_responses", begun)
    with pytest.raises(Begun):
        prepare(prompts(5), target, PrepareSettings(heldout_percent=1e-9), tmp_path / "none")
    assert "greater --heldout-percent" in caplog.text
    caplog.clear()
    with pytest.raises(Begun):
        prepare(prompts(5), target, PrepareSettings(heldout_percent=0), tmp_path / "not asked for")
    assert not caplog.text


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


def test_killed_ten_times_it_ends_with_the_same_bytes(target_folder, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", *(json.dumps({"prompt": f"Say {i}"}) for i in range(240)))
    assert subprocess.run(command(data, tmp_path / "whole", target_folder), capture_output=True).returncode == 0
    whole, rng = tree(tmp_path / "whole"), random.Random(0)
    killed = tmp_path / "killed"
    for _ in range(10):
        wanted = shard_count(killed) + rng.randint(0, 3)  # 0: before the first new one
        process = subprocess.Popen(
            command(data, killed, target_folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while shard_count(killed) < wanted and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (killed / "manifest.json").exists()
        assert all(whole[name] == data for name, data in tree(killed).items() if "/." not in f"/{name}")
    last = subprocess.run(command(data, killed, target_folder), capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert tree(killed) == whole


def test_a_missing_or_damaged_shard_is_made_again(target, tmp_path):
    prepare(prompts(9), target, OPTIONS, tmp_path)
    whole = tree(tmp_path)
    damaged = tmp_path / "train/000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"damaged: .* remove it and give the 'dflash prepare' command again"):
        prepare(prompts(9), target, OPTIONS, tmp_path)
    damaged.unlink()
    prepare(prompts(9), target, OPTIONS, tmp_path)
    assert tree(tmp_path) == whole


def test_a_finished_dataset_is_left_as_it_is(target, tmp_path, monkeypatch):
    first = prepare(prompts(5), target, OPTIONS, tmp_path)
    monkeypatch.setattr(preparing, "generate_responses", None)
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


# --- the command ----------------------------------------------------------------------------------------------


def test_the_command_makes_a_dataset_and_says_what_is_in_it(target_folder, target, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", *['{"prompt": "a"}'] * 2, '{"prompt": "b", "response": "c"}')
    result = invoke(data, tmp_path, target_folder, "--max-tokens", "5", "--heldout-percent", "0")
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
def test_bad_options_are_one_line_of_error(target_folder, tmp_path, options, message):
    data = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}')
    assert_one_error(invoke(data, tmp_path, target_folder, *options), message)


def test_conversations_without_response_tokens_are_one_line_of_error(target_folder, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", '{"prompt": "a", "response": ""}')
    assert_one_error(
        invoke(data, tmp_path, target_folder), r"None of the 1 conversations can be used \(1 no response\)"
    )


def test_an_unwritable_folder_is_one_line_of_error(target_folder, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}')
    (tmp_path / "made").write_text("a file stands where the target_folder should be")
    assert_one_error(invoke(data, tmp_path, target_folder), "Cannot write to .*made: File exists")
    assert_one_error(invoke(data, Path("/proc"), target_folder), "Cannot write to /proc/made: ")


ALMOST_FULL = """
import resource, dflash.target, mlx.core as mx
from dflash.cli import main
mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))  # MKL makes its own small files
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # bytes of one file: the plan fits, a shard does not
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits for the size of a file")
def test_a_full_disk_is_one_line_of_error_and_the_same_command_continues(target_folder, target, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", *(json.dumps({"prompt": f"Say {i}"}) for i in range(8)))
    options = [str(data), "--target", str(target_folder), "--max-tokens", "50", "--shard-size", "4"]
    options += ["--heldout-percent", "0", "--output"]
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
