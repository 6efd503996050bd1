"""``dflash prepare`` and ``dflash data``: what they print, and one line of error for what cannot be done."""

import json
import re
from pathlib import Path

import pytest
from support.cli import assert_one_error, invoke
from support.conversations import invoke_prepare, tree, write_lines

import dflash.training.data.prepare as preparing
from dflash import load_target
from dflash.core.errors import DataError
from dflash.prompts.conversations import read_conversations
from dflash.training.data.dataset import open_dataset


def test_prepare_makes_a_dataset_and_says_what_is_in_it(target_folder, target, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", *['{"prompt": "a"}'] * 2, '{"prompt": "b", "response": "c"}')
    result = invoke_prepare(data, tmp_path, target_folder, "--max-tokens", "5")
    assert result.exit_code == 0, result.output
    assert "train    1 sequences" in result.stdout
    assert "heldout  1 sequences" in result.stdout
    assert "1 duplicate, 0 too long" in result.stdout
    assert len(open_dataset(tmp_path / "made", "train", target)) == 1
    manifest = json.loads((tmp_path / "made/manifest.json").read_text())
    assert manifest["source"] == "p.jsonl"
    assert "min_p" not in manifest["settings"]  # which older datasets do not have


def test_the_folder_is_an_argument_or_an_option_and_one_of_them(target_folder, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", '{"prompt": "a", "response": "c"}')
    options = ["--target", target_folder]
    result = invoke("prepare", data, "--output", tmp_path / "made", *options)
    assert result.exit_code == 0, result.output
    assert "Nothing is held out" in result.stdout
    for given in ([], [tmp_path / "other", "--output", tmp_path / "made"]):
        result = invoke("prepare", data, *given, *options)
        assert result.exit_code == 2
        assert "Name one folder for the dataset" in result.stderr


def test_every_option_reaches_the_dataset(target_folder, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", '{"prompt": "a", "response": "c"}', '{"prompt": "b", "response": "d"}')
    given = {"max_tokens": 7, "max_length": 90, "temp": 0.5, "top_p": 0.9, "top_k": 3, "seed": 4, "batch_size": 5}
    given |= {"shard_size": 6, "min_p": 0.25}
    options = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    more = ["--regenerate", "--raw", "--chat-template-config", '{"a": 1}', "--heldout-percent", "8"]
    result = invoke_prepare(data, tmp_path, target_folder, *options, *more, "--heldout-at-least", "0")
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "made/manifest.json").read_text())
    assert manifest["settings"] == given | {"regenerate": True, "chat": False, "chat_template_config": {"a": 1}}
    assert manifest["heldout"] == {"percent": 8, "at_least": 0}


def test_a_system_prompt_is_put_before_conversations_that_have_none(target_folder, tmp_path):
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "b"}]
    data = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}', json.dumps({"messages": own}))
    assert invoke_prepare(data, tmp_path, target_folder, "--max-tokens", "3", "--system", "Be brief.").exit_code == 0
    lines = (tmp_path / "made/shards/000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["messages"][0]["content"] for line in lines] == ["Be brief.", "Own."]


def test_a_dataset_is_shown_split_anew_and_exported(target_folder, target, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", *(json.dumps({"q": f"Say {i}", "answer": i}) for i in range(12)))
    made = tmp_path / "made"
    assert invoke_prepare(data, tmp_path, target_folder, "--max-tokens", "5", "--template", "{q}!").exit_code == 0

    shown = invoke("data", "show", made, "--limit", "2")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("\n---") == 2
    assert "[user] Say 0!\n[assistant] " in shown.stdout
    assert '{"q": "Say 0", "answer": 0, "finish_reason": "length"}' in shown.stdout
    assert "heldout  1 sequences" in shown.stdout

    split = invoke("data", "split", made, "--heldout-at-least", "4")
    assert split.exit_code == 0, split.output
    assert "heldout  4 sequences" in split.stdout
    assert len(open_dataset(made, "heldout", target)) == 4
    assert invoke("data", "show", made, "--split", "heldout", "--limit", "9").stdout.count(", heldout: ") == 4

    exported = invoke("data", "export", made, tmp_path / "out.jsonl", "--split", "train")
    assert exported.exit_code == 0, exported.output
    assert "8 conversations are in" in exported.stdout
    assert all(talk.answered and "answer" in talk.extra for talk in read_conversations(tmp_path / "out.jsonl"))


@pytest.mark.parametrize("command", [["show"], ["split"], ["export"]])
def test_a_folder_without_a_dataset_is_one_line_of_error(tmp_path, command):
    more = [tmp_path / "out.jsonl"] if command == ["export"] else []
    assert_one_error(invoke("data", *command, tmp_path, *more), "holds no dataset .* make one with 'dflash prepare'")
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-length", "9"], r"None of the 1 conversations can be used \(1 too long\); max_length is 9"),
        (["--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["--max-length", "2"], "max_length must be above 2"),
        (["--heldout-percent", "100"], "heldout_percent must be at least 0 and below 100"),
        (["--top-k", "999"], "top_k must be less than the target's vocabulary of 264 tokens"),
        (["--split", "main"], "p.jsonl is a file; --split chooses a part of a hub dataset"),
        (["--subset", "main"], "p.jsonl is a file; --subset chooses a part of a hub dataset"),
    ],
)
def test_bad_options_are_one_line_of_error(target_folder, tmp_path, options, message):
    data = write_lines(tmp_path / "p.jsonl", '{"prompt": "a"}')
    assert_one_error(invoke_prepare(data, tmp_path, target_folder, *options), message)
    assert not (tmp_path / "made/plan.json").exists()


def test_a_file_or_a_folder_of_other_things_is_refused_before_the_target_loads(target_folder, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", '{"prompt": "a", "response": ""}')
    message = r"None of the 1 conversations can be used \(1 no response\)"
    assert_one_error(invoke_prepare(data, tmp_path / "other", target_folder), message)
    assert_one_error(invoke_prepare(data, Path("/proc"), target_folder), "Cannot write to /proc/made: ")
    (tmp_path / "made").write_text("")
    result = invoke_prepare(data, tmp_path, tmp_path / "no target")
    assert_one_error(result, r"must go to a folder, but \S+made is none; choose another name")
    (tmp_path / "made").unlink()
    (tmp_path / "made/notes").mkdir(parents=True)
    message = r"made holds other files, such as 'notes'; choose an empty folder for the dataset"
    assert_one_error(invoke_prepare(data, tmp_path, tmp_path / "no target"), message)
    with pytest.raises(DataError, match=message):
        preparing.prepare([], load_target(target_folder), preparing.PrepareSettings(), tmp_path / "made")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (KeyboardInterrupt(), 130, r"Stopped\. What is finished stays in \S+made; the same command continues\.\n\Z"),
        (
            OSError(28, "No space left"),
            1,
            r"^error: Cannot write to \S+made: .* Make room or .* where it stopped\.\n\Z",
        ),
    ],
    ids=["Ctrl-C", "full disk"],
)
def test_what_ends_it_keeps_finished_files_and_the_same_command_continues(
    target_folder, tmp_path, monkeypatch, end, code, said
):
    data = write_lines(tmp_path / "p.jsonl", *(json.dumps({"prompt": f"Say {i}"}) for i in range(6)))
    options = ["--max-tokens", "5", "--shard-size", "2"]
    assert invoke_prepare(data, tmp_path / "quiet", target_folder, *options).exit_code == 0
    write_shard = preparing.write_shard

    def interrupted(folder, number, examples):
        if number == 1:
            raise end
        write_shard(folder, number, examples)

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "write_shard", interrupted)
        stopped = invoke_prepare(data, tmp_path, target_folder, *options)
    assert stopped.exit_code == code
    assert re.search(said, stopped.stderr, re.M)
    assert (tmp_path / "made/shards/000000.safetensors").exists()
    assert invoke_prepare(data, tmp_path, target_folder, *options).exit_code == 0
    assert tree(tmp_path / "made") == tree(tmp_path / "quiet/made")
