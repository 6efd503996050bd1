"""``dflash adapt``: a drafter learns from a record, and the new one is taken only if it is better."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from support.cli import assert_one_error, invoke
from support.runs import recipe

import dflash
from dflash.core.files import exclusive_lock
from dflash.evaluation.replay import measure_on
from dflash.evaluation.texts import Text, Texts
from dflash.serving.record import Record
from dflash.training import adapt as adapting
from dflash.training.adapt import heldout_texts
from dflash.training.data.join import join
from dflash.training.data.text import read_dataset
from dflash.training.train import train

SMALL = (
    *("data.max_blocks_per_batch=16", "data.anchors=8", "data.batch_tokens=128", "data.max_length=40"),
    "optimizer.learning_rate=0.02",
)
SETTINGS = [word for setting in SMALL for word in ("--set", setting)]


def write_record(
    folder: Path, target: dflash.LoadedTargetModel, greedy: bool = True, count: int = 40, most: int | None = None
) -> Path:
    """Answers that repeat two letters in turns, as those that the drafter was trained on, which it had one step for."""
    folder.mkdir()
    record, rng = Record(folder, 1 << 20, []), np.random.default_rng(5)
    record.begin(target)
    for _ in range(count):
        pair = rng.integers(60, 68, 2).tolist()
        messages = [{"role": "user", "content": "".join(map(chr, pair))}]
        record.add(messages, [65, *pair], (pair * int(rng.integers(4, 9)))[:most], greedy=greedy)
    return folder


@pytest.fixture(scope="module")
def target(folder) -> dflash.LoadedTargetModel:
    return dflash.load_target(folder / "target")


@pytest.fixture(scope="module")
def record(folder, target) -> Path:
    return write_record(folder / "record", target)


@pytest.fixture(scope="module")
def single(folder, target) -> Path:
    return write_record(folder / "single", target, count=1)


@pytest.fixture(scope="module")
def short(folder, target) -> Path:
    return write_record(folder / "short", target, most=1)


@pytest.fixture(scope="module")
def begun(folder) -> Path:
    """A drafter after one step."""
    return train(recipe(folder, "begun", "run.steps=1"))


def adapt(folder: Path, record: Path, drafter: Path, output: Path, *options: object):
    where = ("--target", folder / "target", "--drafter", drafter, "--output", output)
    return invoke("adapt", record, *where, *SETTINGS, *options)


@pytest.fixture(scope="module")
def adapted(folder, record, begun):
    """The folder of a drafter that became better, and what the command said."""
    return folder / "adapted", adapt(folder, record, begun, folder / "adapted", "--steps", 60)


def test_a_drafter_that_is_better_is_taken_and_the_figures_are_those_of_eval(folder, target, record, begun, adapted):
    output, result = adapted
    assert result.exit_code == 0, result.output
    assert "Better: the new drafter is in" in result.stdout
    texts = [text for _, text in heldout_texts(folder / "adapted.adapt" / "data", target)]
    lengths = []
    for drafter in (begun, output):
        counts = [own for (own,) in measure_on(target, [dflash.load_drafter(drafter)], texts)]
        lengths.append(sum(own.committed for own in counts) / sum(own.blocks for own in counts))
    assert f"{len(texts)} held-out requests: {lengths[0]:.3f} tokens per target pass before, " in result.stdout
    assert f"{lengths[1]:.3f} now" in result.stdout
    assert lengths[1] > 1.2 * lengths[0]
    again = adapt(folder, record, begun, output, "--steps", 60)
    assert again.stdout == result.stdout
    assert_one_error(adapt(folder, record, begun, output, "--steps", 61), "was begun with other options")


def test_a_drafter_that_is_not_better_is_not_taken(folder, record, begun, tmp_path):
    result = adapt(folder, record, begun, tmp_path / "new", "--steps", 1, "--set", "optimizer.learning_rate=1e-9")
    assert result.exit_code == 3
    assert "now over before: 1.000 (1.000-1.000)" in result.stdout
    assert "Not better by more than the interval" in result.stdout
    assert not (tmp_path / "new").exists()


def test_ctrl_c_loses_nothing(folder, record, begun, adapted, tmp_path, monkeypatch):
    def stop(line: dict) -> None:
        if line["step"] == 18:
            signal.raise_signal(signal.SIGINT)

    output = tmp_path / "new"
    monkeypatch.setattr(adapting, "train", lambda recipe, **options: train(recipe, stop, **options))
    assert adapt(folder, record, begun, output, "--steps", 60).exit_code == 130
    monkeypatch.undo()
    log = output.with_name("new.adapt") / "run" / "log.jsonl"
    assert max(json.loads(line).get("step", 0) for line in log.read_text().splitlines()) == 18
    result = adapt(folder, record, begun, output, "--steps", 60)
    assert result.stdout.splitlines()[:2] == adapted[1].stdout.splitlines()[:2]
    assert len(list(read_dataset(output.with_name("new.adapt") / "data"))) == 40
    weights = "model.safetensors"
    assert (output / weights).read_bytes() == (adapted[0] / weights).read_bytes()


def test_what_is_mixed_in_leaves_the_record_half_of_the_tokens_and_its_held_out_requests(
    folder, target, begun, tmp_path
):
    """Of few requests the record holds out more than a tenth."""
    record = write_record(tmp_path / "few", target, count=12)
    adapt(folder, record, begun, tmp_path / "new", "--steps", 1, "--mix", folder / "data")
    rows = list(read_dataset(tmp_path / "new.adapt" / "data"))
    own, other = ([row for row in rows if ("greedy" in row.text) == recorded] for recorded in (True, False))
    tokens, mixed = (sum(row.tokens for row in part) for part in (own, other))
    assert mixed <= tokens < mixed + sum(row.tokens for row in read_dataset(record))
    held = {split: [row.text["messages"] for row in read_dataset(record, split)] for split in ("train", "heldout")}
    assert len(held["heldout"]) >= 5
    for row in own:
        assert row.text["messages"] in held[row.split]


def test_of_two_records_only_the_first_is_repeated(target, record, tmp_path):
    few = write_record(tmp_path / "few", target, count=12)
    join([few, record], tmp_path / "both", times=3)
    counts = [len(list(read_dataset(folder))) for folder in (few, record, tmp_path / "both")]
    assert counts[2] == 3 * counts[0] + counts[1]


def test_sampled_answers_are_no_texts_and_each_request_counts_once(target, record, tmp_path):
    sampled = write_record(tmp_path / "sampled", target, greedy=False)
    join([record, sampled, record], tmp_path / "both")
    texts = dict(heldout_texts(tmp_path / "both", target))
    join([sampled], tmp_path / "alone")
    found = heldout_texts(tmp_path / "alone", target)
    assert texts.keys() == dict(found).keys()
    answers = {tuple(text.prompt): text for text in texts.values()}
    for _, text in found:
        assert text == Texts(target).all([text.prompt], text.max_tokens)[0]
        own = answers[tuple(text.prompt)]
        assert own.answer[:2] == own.prompt[1:]
        assert isinstance(own, Text)


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ("data", [], "no record of dflash serve"),
        ("empty", [], "holds no dataset"),
        ("record", ["--mix", "nowhere"], "holds no dataset"),
        ("record", ["--set", "run.step=3"], "unknown key 'step'"),
        ("record", ["--output", "target"], "holds other files"),
        ("single", ["--mix", "data"], "is held out to compare drafters on"),
        ("short", [], "is held out to compare drafters on"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_one_line(
    folder, begun, record, options, message, request, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if record in ("record", "single", "short"):
        request.getfixturevalue(record)
    options = [folder / option if option in ("target", "data") else option for option in options]
    assert_one_error(adapt(folder, folder / record, begun, tmp_path / "new", *options), message)


def test_a_refused_call_leaves_nothing_in_the_way_and_what_it_works_with_is_the_users_alone(
    folder, record, begun, tmp_path
):
    """Before its training an adaptation can be begun again with other options, but not by two processes."""
    output = tmp_path / "new"
    assert_one_error(adapt(folder, record, tmp_path / "nowhere", output, "--steps", 1), "nowhere")
    work = tmp_path / "new.adapt"
    with exclusive_lock(work):
        assert_one_error(adapt(folder, record, begun, output, "--steps", 1), "Another process is writing to")
    assert adapt(folder, record, begun, output, "--steps", 1).exit_code in (0, 3)
    assert (work / "drafter").exists()
    assert work.stat().st_mode & 0o777 == 0o700
