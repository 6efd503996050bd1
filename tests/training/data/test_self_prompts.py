"""Requests that a target makes up: distinct, ended by itself, by seed, and the same bytes after any interruption."""

import json
import re
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest
from support.cli import assert_one_error, invoke
from support.conversations import Stopping, tiny_model, with_template
from support.errors import refused
from support.models import STOP, byte_tokenizer, qwen3_model

from dflash import LoadedTargetModel
from dflash.core.errors import DataError
from dflash.prompts.conversations import read_conversations
from dflash.training.data import self_prompts
from dflash.training.data.self_prompts import PromptSettings, unsuitable, user_turn, write_prompts

SETTINGS = PromptSettings(max_tokens=20, round_size=16, batch_size=8, min_p=0.0, seed=3)


@pytest.fixture(scope="module")
def target():
    """Writes random bytes; a sixth of all tokens ends a request."""
    return Stopping(tiny_model(), byte_tokenizer())


@pytest.fixture(autouse=True)
def _bytes_are_words(monkeypatch):
    """Random bytes are hardly ever words, so what is suitable is judged by something that they have."""
    monkeypatch.setattr(self_prompts, "unsuitable", lambda request: len(request) < 2)


def requests(path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def test_requests_are_distinct_and_as_many_as_asked_for(quiet):
    path, counts = quiet
    found = requests(path)
    keys = {re.sub(r"\W+", " ", text.casefold()).strip() for text in found}
    assert len(keys) == len(found) == counts["requests"] == 24
    assert [talk.messages[0]["content"] for talk in read_conversations(path)] == found
    assert counts["unsuitable"] > 0
    dropped = counts["unfinished"] + counts["unsuitable"] + counts["repeated"]
    assert 24 <= counts["sampled"] - dropped < 24 + SETTINGS.round_size
    assert counts["sampled"] % SETTINGS.round_size == 4  # the first round is small


def test_requests_begin_in_the_users_place_in_small_rounds_first_and_begins_alternate(
    target, tmp_path, monkeypatch, caplog
):
    prefix, stops = user_turn(target)
    assert byte_tokenizer().decode(prefix) == "<|im_start|>user\n"
    assert stops == target.stop_token_ids() | {byte_tokenizer().eos_token_id}
    rounds, generate = [], self_prompts.generate_responses

    def recorded(model, prompts, *others, **options):
        assert all(prompt[: len(prefix)] == prefix for prompt in prompts)
        rounds.append([byte_tokenizer().decode(prompt[len(prefix) :]) for prompt in prompts])
        return generate(model, prompts, *others, **options)

    monkeypatch.setattr(self_prompts, "generate_responses", recorded)
    settings = replace(SETTINGS, begins=("", "Write a", "c"))
    with caplog.at_level("INFO"):
        write_prompts(target, 1, tmp_path / "p.jsonl", settings)
    assert rounds == [["", "Write a", "c", ""]]
    write_prompts(target, 16, tmp_path / "p.jsonl", settings)
    assert [len(found) for found in rounds] == [4, 16, 16][: len(rounds)]
    assert rounds[1][:3] == ["Write a", "c", ""]
    assert any(request.startswith("Write a") for request in requests(tmp_path / "p.jsonl"))
    assert re.fullmatch(r"requests: about \d+ s", caplog.messages[0])


def test_a_template_with_a_token_of_its_own_after_the_user_ends_requests_there():
    talk = "{% for m in messages %}<|mask|>{{ m.content }}<|im_start|>{% endfor %}"
    target = with_template(talk + "{% if add_generation_prompt %}>{% endif %}")
    start, mask = byte_tokenizer().convert_tokens_to_ids(["<|im_start|>", "<|mask|>"])
    assert user_turn(target) == ([mask], frozenset({start, byte_tokenizer().eos_token_id}))
    system = with_template("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    prefix, stops = user_turn(system, "Be kind.")
    assert byte_tokenizer().decode(prefix) == "[system] Be kind.\n[user] "
    assert stops == {byte_tokenizer().eos_token_id}


def test_the_shared_prefix_is_read_once_and_changes_no_token():
    model, prompts = qwen3_model(1, 264), [[1, 2, 3, 4, n] for n in range(40, 46)]
    whole = dict(self_prompts.generate_responses(model, prompts, [], [8] * 6, batch=4))
    assert dict(self_prompts.generate_responses(model, prompts, [], [8] * 6, batch=4, shared_prefix=4)) == whole
    assert dict(self_prompts.generate_responses(model, prompts[:1], [], [8], shared_prefix=3)) == {0: whole[0]}


@pytest.fixture(scope="module")
def quiet(target, tmp_path_factory):
    """A file that nothing interrupted, and its counts."""
    path = tmp_path_factory.mktemp("quiet") / "p.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_prompts, "unsuitable", lambda request: len(request) < 2)
        return path, write_prompts(target, 24, path, SETTINGS)


@pytest.mark.parametrize("moment", ["generate_responses", "os.fsync", "write_json"])
def test_a_killed_run_continues_to_the_same_bytes_and_more_can_be_asked_for(
    target, quiet, tmp_path, monkeypatch, moment
):
    killed, name = tmp_path / "killed.jsonl", f"dflash.training.data.self_prompts.{moment}"
    original, calls = attrgetter(moment)(self_prompts), []

    def dies(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            if killed.exists():
                killed.open("a").write('{"prompt": "torn')
            raise KeyboardInterrupt
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(name, dies)
        with pytest.raises(KeyboardInterrupt):
            write_prompts(target, 18, killed, SETTINGS)
    for count in (18, 24, 12):
        after = write_prompts(target, count, killed, SETTINGS)
    assert (killed.read_bytes(), after) == (quiet[0].read_bytes(), quiet[1])


def test_other_settings_another_target_and_a_file_of_somebody_else_are_refused(target, tmp_path):
    path = tmp_path / "p.jsonl"
    write_prompts(target, 4, path, SETTINGS)
    for other, settings, words in [
        (target, replace(SETTINGS, seed=4), ["begun with seed 3, not 4"]),
        (Stopping(tiny_model(7), byte_tokenizer()), SETTINGS, ["another target"]),
    ]:
        with pytest.raises(DataError) as error:
            write_prompts(other, 9, path, settings)
        refused(error, *words, "choose another name")
    path.write_text("")
    with pytest.raises(DataError, match="shorter than it was"):
        write_prompts(target, 9, path, SETTINGS)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "mine"}\n')
    with pytest.raises(DataError, match=r"mine.jsonl is there, but state.json beside it"):
        write_prompts(target, 9, tmp_path / "mine.jsonl", SETTINGS)
    assert (tmp_path / "mine.jsonl").read_text() == '{"prompt": "mine"}\n'


def test_a_target_that_has_said_everything_stops_the_run(target, tmp_path, monkeypatch):
    again = [*byte_tokenizer().encode("The same again."), min(target.stop_token_ids())]

    def same(model, prompts, *_, **__):
        return enumerate([again] * len(prompts))

    monkeypatch.setattr(self_prompts, "generate_responses", same)
    with pytest.raises(DataError) as error:
        write_prompts(target, 2, tmp_path / "p.jsonl", SETTINGS)
    refused(error, "no new request in 320 trials", "holds 1")


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ("What is the capital of Peru?", False),
        ("Write it.", True),
        ("Incomprehensibilities", True),
        ("no no no no no no no yes", True),
        ("Say \ufffd in a sentence please", True),
        ("Say <|im_start|> in a sentence", True),
        ("Draw a\tbox\nwith lines \x1b[0m", True),
        ("Wie heißt die Hauptstadt von Ägypten?\nUnd warum?", False),
    ],
)
def test_what_is_worth_asking(request_, reason):
    assert unsuitable(request_) is reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temp": 0.0}, "temp must be greater than 0, got 0.0: greedy requests"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"min_p": 2.0}, "min_p must be"),
    ],
)
def test_settings_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PromptSettings(**change)


def test_targets_that_cannot_make_up_requests_are_refused(tmp_path):
    for template, words in [(None, "with a chat template"), ("{{ messages[0].role }}", "does not show what the user")]:
        target = LoadedTargetModel(tiny_model(), None) if template is None else with_template(template)
        with pytest.raises(DataError) as error:
            write_prompts(target, 2, tmp_path / "p.jsonl", SETTINGS)
        refused(error, words)


def test_the_command_writes_what_the_function_writes_and_says_how_many(target_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash.target.model.LoadedTargetModel.stop_token_ids", Stopping.stop_token_ids)
    common = ["prompts", "--target", target_folder, "--count", 5, "--max-tokens", "20", "--min-p", "0", "--begin", ""]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        result = invoke(*common, "--output", tmp_path / name / "p.jsonl", "--seed", seed, "--begin", "Say")
        assert result.exit_code == 0, result.output
        assert f"5 requests are in {tmp_path}/{name}/p.jsonl" in result.stdout
        assert "sampled " in result.stdout
    texts = [(tmp_path / name / "p.jsonl").read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]
    assert np.unique(texts[0].splitlines()).size == 5
    assert_one_error(invoke(*common, "--output", tmp_path / "a/p.jsonl", "--seed", 3), "begun with seed 1, not 3")
    assert_one_error(invoke(*common, "--output", tmp_path / "d.jsonl", "--temp", 0), "temp must be greater than 0")
    assert_one_error(invoke(*common, "--output", "."), "Requests go to a file, but . is a folder")
    assert STOP not in texts[0]
