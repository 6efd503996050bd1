"""``dflash serve --record``: complete answers as a dataset, and nothing that was not to be kept."""

import json
import logging
import os
import shutil
import stat
from pathlib import Path

import pytest
from support.cli import assert_one_error, invoke

from dflash.cli.requests import PromptFormat, Requests
from dflash.core.errors import DataError, DFlashError
from dflash.evaluation.traces import acceptance_counts, survival
from dflash.serving.record import Record, recorded, recorded_path, recording, shard_numbers
from dflash.study import read_traces
from dflash.training.data.dataset import change_split, open_dataset, read_manifest
from dflash.training.data.join import join
from dflash.training.data.split import HeldoutRule
from dflash.training.data.text import read_dataset

from .conftest import QUESTION, QUESTIONS, endless, process, until


def lines(folder: Path) -> list[dict]:
    return [line for number in shard_numbers(folder) for line in recorded(recorded_path(folder, number))]


def test_a_record_is_a_dataset_of_the_targets_own_tokens(here, decoder, tmp_path):
    folder, user = tmp_path / "record", [{"role": "user", "content": QUESTION}]
    server = here(record=folder)
    asked: list[tuple[dict, dict, bool]] = [
        ({"max_tokens": 200}, {}, True),
        ({"stop": "He buys", "stream": True}, {"stop_strings": ["He buys"]}, True),
        ({"temperature": 0.8, "seed": 7}, {"temperature": 0.8, "seed": 7}, False),
        ({"logit_bias": {"30": -100}}, {"logit_bias": {30: -100.0}}, False),
    ]
    for options, _, _ in asked:
        list(server.chat(QUESTION, **({"max_tokens": 24} | options)))
    usage = server.complete("def total(values):", max_tokens=9).usage.completion_tokens_details
    found = lines(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [line["chat"] for line in found] == [True, True, True, True, False]
    for line, (options, same, greedy) in zip(found, asked, strict=False):
        steps = list(decoder.stream_generate(user, options.get("max_tokens", 24), **same))
        assert line["answer_tokens"] == [token for step in steps for token in step.tokens]
        assert (line["greedy"], line["finish_reason"]) == (greedy, steps[-1].finish_reason)
        text = decoder.tokenizer.decode(line["answer_tokens"]).removesuffix(decoder.tokenizer.eos_token)
        assert line["messages"] == [*user, {"role": "assistant", "content": text}]
        assert line["prompt_tokens"] == decoder.tokenizer.apply_chat_template(user, add_generation_prompt=True)
    drafted, accepted = map(sum, zip(*found[-1]["blocks"], strict=True))
    assert (accepted, drafted - accepted) == (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens)


def test_a_record_is_read_as_a_dataset(decoder, tmp_path):
    first, target = tmp_path / "first", decoder.loaded_target
    record = Record(first, 1 << 20, [])
    record.begin(target)
    for number, content in enumerate(["a", "b", "c", "a"]):
        turns = [{"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}] * (number == 3)
        parts = [{"type": "text", "text": content}]
        record.add([{"role": "user", "content": parts}, *turns], [5, 6], [7, 8, number], number=number)
    change_split(first, HeldoutRule(1.0, 1))
    splits = {split: open_dataset(first, split, target) for split in ("train", "heldout")}
    assert splits["train"].tokens[:4].tolist() == [5, 6, 7, 8]
    assert splits["train"].loss_mask.reshape(-1, 5).tolist() == [[False] * 2 + [True] * 3] * len(splits["train"])
    rows = list(read_dataset(first))
    assert [row.text["number"] for row in rows] == [0, 1, 2, 3]
    assert rows[0].split == rows[3].split, "turns of one conversation stay together"
    assert sum(row.split == "heldout" for row in rows) == len(splits["heldout"]) < 4
    assert read_manifest(first)["splits"]["train"]["sequences"] == len(splits["train"])
    shutil.copytree(first, tmp_path / "again")
    join([first, tmp_path / "again"], tmp_path / "both")
    assert [row.text for row in read_dataset(tmp_path / "both")] == [row.text for row in rows] * 2
    shown = invoke("data", "show", first)
    assert shown.exit_code == 0
    assert '"number": 3' in shown.output


NOT_KEPT = [
    {"store": False},
    {"messages": [{"role": "user", "content": "My number is 555-1234."}]},
    {"messages": [{"role": "system", "content": "Call 555-1234."}, {"role": "user", "content": "Hi"}]},
    {"messages": [{"role": "user", "content": QUESTIONS[1]}], "max_tokens": 30},  # the answer holds it
    {"max_tokens": 0},
    {"logit_bias": {"99999": 1}},
]


def test_what_was_not_to_be_kept_and_what_failed_is_not(here, decoder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert "longest_words" in decoder.generate(QUESTIONS[1], 30)
    (tmp_path / "patterns").write_text(r"\d{3}-\d{4}" + "\n\n" + r"\blongest_words\b" + "\n", encoding="utf-8-sig")
    server = here(record=tmp_path / "record", redact=tmp_path / "patterns")
    for body in NOT_KEPT:
        server.post({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4} | body)
        assert lines(tmp_path / "record") == [], body
    made = server.metric("vllm:generation_tokens_total")
    with server.open({"prompt": "def add(a, b):", "max_tokens": 3000} | endless(decoder)):  # a client that goes away
        until(lambda: server.metric("vllm:generation_tokens_total") > made)
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert lines(tmp_path / "record") == []
    assert "555-1234" not in caplog.text
    server.text(QUESTION, max_tokens=4)
    assert len(lines(tmp_path / "record")) == 1


def test_kill_9_loses_the_request_in_flight_alone_and_the_record_goes_on(here, decoder, tmp_path):
    folder = tmp_path / "record"
    with process("--record", str(folder), "--policy", "0") as server:
        for number in range(2):
            server.text(QUESTION + "!" * number, max_tokens=4)
        flying = server.open({"model": "bundled", "prompt": "def add(a, b):", "max_tokens": 4000} | endless(decoder))
        until(lambda: server.metric("vllm:generation_tokens_total") > 12)
        server.process.kill()
        server.process.wait()
        flying.close()
    assert len(lines(folder)) == 2
    with recorded_path(folder, 0).open("a") as file:
        file.write('{"messages": [{"role": "user", "con')  # as a power cut may leave it
    here(record=folder).text(QUESTION, max_tokens=5)
    assert [len(line["answer_tokens"]) for line in lines(folder)] == [4, 4, 5]
    assert read_manifest(folder)["splits"]["heldout"]["sequences"] >= 1


def test_a_record_is_bounded_and_the_oldest_go(decoder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    most, message = 1 << 16, [{"role": "user", "content": "x"}]
    record = Record(tmp_path, most, [])
    record.begin(decoder.loaded_target)
    for number in range(300):
        record.add(message, [number] * 40, [5] * 40, number=number)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl")) <= most
    numbers = [line["number"] for line in lines(tmp_path)]
    assert numbers == list(range(numbers[0], 300))
    assert 0 < numbers[0] < 250
    assert "its oldest file" in caplog.text
    assert len(open_dataset(tmp_path, "train", decoder.loaded_target)) > 0


def test_a_disk_that_is_full_costs_no_answer(here, tmp_path, monkeypatch, caplog):
    server = here(record=tmp_path)
    with monkeypatch.context() as patched:
        write = os.write
        patched.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
        for _ in range(2):
            assert server.text(QUESTION, max_tokens=4)
    assert "A request is not recorded: the disk" in caplog.text
    server.text(QUESTION, max_tokens=4)
    assert len(lines(tmp_path)) == len(list((tmp_path / "shards").iterdir())) == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"patterns": "fine\n(open\n"}, "line 2 is no regular expression"),
        ({"patterns": b"\xff"}, "Cannot read the patterns"),
        ({"record/other.txt": "mine"}, "holds other files"),
    ],
)
def test_a_record_that_cannot_be_kept_is_refused_before_models_are_loaded(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    options = ["--redact", tmp_path / "patterns"] if "patterns" in files else []
    result = invoke("serve", "--port", 0, "--record", tmp_path / "record", "--target", "/nowhere", *options)
    assert_one_error(result, message)


@pytest.mark.parametrize(
    "manifest", ['{"format": "dflash-dataset", "version": 2}', '{"recorded": true, "target": "another"}']
)
def test_a_folder_of_another_dataset_or_target_is_refused(decoder, tmp_path, manifest):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(DataError, match="no record of this target"):
        Record(tmp_path, 1 << 20, []).begin(decoder.loaded_target)


def test_a_record_belongs_to_one_server(tmp_path):
    again = recording(tmp_path / "record", 1 << 20, None)
    refused = pytest.raises(DFlashError, match="Another process")
    with recording(tmp_path / "record", 1 << 20, None), refused, again:
        pass
    assert not (tmp_path / "record").exists()
    with pytest.raises(DataError, match="give record"), recording(None, 1 << 20, tmp_path):
        pass


def test_a_record_without_requests_says_so(decoder, tmp_path):
    Record(tmp_path, 1 << 20, []).begin(decoder.loaded_target)
    with pytest.raises(DataError, match="No request is in the record"):
        open_dataset(tmp_path, "train", None)
    recorded_path(tmp_path, 0).write_text("no JSON\n" + json.dumps({}) + "\n")
    with pytest.raises(DataError, match="is damaged"):
        read_manifest(tmp_path)


# --- its report -----------------------------------------------------------------------------------------------


def test_the_report_of_a_record_is_what_clients_were_told(here, tmp_path):
    folder, page = tmp_path / "served", tmp_path / "page.html"
    server = here(record=folder)
    told = [server.chat(question, max_tokens=24).metrics["speculative_decoding"] for question in QUESTIONS[:4]]
    traces = read_traces(folder)
    assert traces.names == ["served"]
    accepted = traces.blocks.groupby("request").accepted.sum()
    assert accepted.tolist() == [own["num_accepted_draft_tokens"] for own in told]
    assert len(traces.drafts) == sum(own["num_draft_tokens"] for own in told)
    counts = dict.fromkeys(range(16), 0)
    for own in told:
        for accepted, blocks in own["acceptance_histogram"].items():
            counts[int(accepted)] += blocks
    assert acceptance_counts(traces.blocks).to_dict() == {count: counts[count] for count in range(16)}
    first = survival(traces.drafts).iloc[0]
    assert first.blocks == sum(own["num_spec_steps"] for own in told)
    assert first.survival == pytest.approx(1 - counts[0] / first.blocks)
    assert set(traces.requests.drafter) == {"bundled"}
    assert traces.requests.date.str.match(r"20\d\d-\d\d-\d\dT").all()
    result = invoke("report", folder, "-o", page)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "Request by request" in text
    assert "Recorded by dflash serve, 20" in text
    assert "Where the time goes" not in text
    assert 'aria-labelledby="texts" hidden>' in text
    assert QUESTION not in text


def write_record(folder: Path, decoder, lines: list[dict], content: str = "{}", *more: dict) -> Path:
    folder.mkdir(exist_ok=True)
    record = Record(folder, 1 << 20, [])
    record.begin(decoder.loaded_target)
    for number, about in enumerate(lines):
        record.add([{"role": "user", "content": content.format(number % 20)}, *more], [5, number], [7, 8], **about)
    return folder


def test_a_drafter_that_was_exchanged_has_its_own_figures_and_traces_stand_beside(decoder, tmp_path):
    lines = [{"drafter": "old", "blocks": [(3, 1)]}] * 30 + [{"drafter": "new", "blocks": [(3, 3), (2, 0)]}] * 30
    folder, trace = write_record(tmp_path / "served", decoder, lines), tmp_path / "mine.jsonl"
    decoder.generate("Hi", 12, trace=trace, policy="full")
    traces = read_traces(trace, folder)
    assert traces.names == ["mine", "served, old", "served, new"]
    positions = {name: survival(traces.drafts[traces.drafts.trace == name]) for name in traces.names}
    assert positions["served, old"].survival.tolist() == [1, 0, 0]
    assert positions["served, new"].survival.tolist() == [0.5, 0.5, 1]
    assert positions["served, new"].blocks.tolist() == [60, 60, 30]
    page = tmp_path / "page.html"
    assert invoke("report", trace, folder, "-o", page).exit_code == 0
    text = page.read_text()
    assert "Tokens per block by request: " in text
    assert "served, old 2.00 first and 2.00 last; served, new 2.50 first and 2.50 last" in text
    assert "Where the time goes" in text
    assert "Hi" in text


def test_what_has_no_acceptance_is_refused_in_one_line(decoder, tmp_path):
    (tmp_path / "other").mkdir()
    folders = {
        "no record of dflash serve": tmp_path / "other",
        "holds no block with drafts": write_record(tmp_path / "plain", decoder, [{"blocks": []}]),
        "so there is no acceptance": write_record(tmp_path / "empty", decoder, []),
    }
    for message, folder in folders.items():
        assert_one_error(invoke("report", folder, "-o", tmp_path / "page.html"), message)
    assert not (tmp_path / "page.html").exists()


def test_a_score_takes_what_a_record_holds_out(decoder, tmp_path, caplog):
    folder = write_record(tmp_path / "served", decoder, [{"chat": number != 3} for number in range(40)])
    held = {row.text["messages"][0]["content"] for row in read_dataset(folder, "heldout") if row.text["chat"]}
    found = Requests.read(folder).conversations
    assert [own.unanswered().messages[0]["content"] for own in found] == list(dict.fromkeys(sorted(held, key=int)))
    assert 1 < len(held) < 20
    assert len(Requests.read(str(folder), limit=1).conversations) == 1
    write_record(folder, decoder, [{}] * 40, content=" ")
    texts = [own.messages[0]["content"] for own in Requests.read(folder).conversations]
    assert 1 < len(texts) < 20
    assert all(text.strip() for text in texts)
    assert "Left out, as they are no prompts: 40. The first is" in caplog.text
    write_record(folder, decoder, [{}] * 40, "{}", {"role": "system", "content": "Be short."})
    requests = Requests.read(folder)
    fitting, left_out = requests.fitting(decoder.loaded_target, PromptFormat(), None, 8)
    assert len(fitting) + len(left_out) == len(requests.conversations)
    assert fitting
    assert left_out
    assert all("the last message is the system's" in sentence.lower() for sentence in left_out)
    with pytest.raises(DataError, match="holds out no conversation"):
        Requests.read(write_record(tmp_path / "raw", decoder, [{"chat": False}] * 9))
