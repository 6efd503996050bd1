"""Standard suites: rows in the hub's form become the published prompts, from a file or by the hub's name."""

import json
import sys
from types import SimpleNamespace

import pytest
from support.conversations import write_lines

from dflash.core.errors import DataError, DFlashError
from dflash.evaluation.suites import SUITES, named_suites

ROWS = {
    "gsm8k": {"question": "1+{1}?", "answer": "#### 2"},
    "math500": {"problem": "x^2?", "solution": "s", "answer": "a", "subject": "Algebra", "level": 1, "unique_id": "u"},
    "humaneval": {"task_id": "t", "prompt": "def f():", "canonical_solution": "", "test": "", "entry_point": "f"},
    "mbpp": {"source_file": "s", "task_id": 2, "prompt": "Write f.", "code": "", "test_imports": [], "test_list": []},
    "mt-bench": {"prompt": ["Ask.", "Ask on."], "category": "writing", "prompt_id": 1, "reference": []},
}
FIRST_TURNS = {
    "gsm8k": "1+{1}?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "math500": "x^2?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "humaneval": "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\ndef f():\n```",
    "mbpp": "Write f.",
    "mt-bench": "Ask.",
}


@pytest.mark.parametrize("name", SUITES)
def test_a_row_of_the_hub_becomes_the_published_prompt(name, tmp_path, caplog):
    file = write_lines(tmp_path / "rows.jsonl", json.dumps(ROWS[name]), json.dumps(ROWS[name]), "broken")
    first, _ = SUITES[name].read(str(file), limit=2)
    assert [m["content"] for m in first.messages] == [FIRST_TURNS[name]]
    assert first.later == (("Ask on.",) if name == "mt-bench" else ())
    assert first.extra["kind"] == name
    assert not caplog.records


def test_a_suite_is_read_from_the_hub_by_name_subset_and_split(monkeypatch, caplog):
    calls: list[tuple] = []

    def load_dataset(name, subset, split):
        calls.append((name, subset, split))
        return [ROWS["gsm8k"]]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert len(SUITES["gsm8k"].read()) == 1
    assert calls == [("openai/gsm8k", "main", "test")]
    assert caplog.messages == ["gsm8k has 1 prompts here; expected 1319."]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["gms8k"], "'gms8k' is unknown: did you mean 'gsm8k'"),
        (["gsm8k", "all"], "names gsm8k twice"),
        (["gsm8k="], "names no file of one suite"),
        (["all=x.jsonl"], "names no file of one suite"),
    ],
)
def test_names_files_and_all_are_told_apart_and_others_are_one_error(names, message):
    assert named_suites(["mbpp=a=b.jsonl", "gsm8k"]) == [(SUITES["mbpp"], "a=b.jsonl"), (SUITES["gsm8k"], None)]
    assert named_suites(["all"]) == [(suite, None) for suite in SUITES.values()]
    with pytest.raises(DFlashError, match=message):
        named_suites(names)


@pytest.mark.parametrize("turns", ["Ask.", [], None])
def test_turns_that_are_no_list_are_refused_with_the_line(turns, tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", json.dumps({"prompt": turns}))
    with pytest.raises(DataError, match="line 1: 'prompt' must be a list of the user's turns"):
        SUITES["mt-bench"].read(str(file), limit=1)
