"""``dflash eval``: a score by decoding, partial results, prompts of every form."""

import json

import pytest
from support.cli import assert_one_error, invoke

from dflash.training import evaluate


@pytest.fixture
def asked(pair, prompts) -> list[str]:
    return ["eval", pair[3], *pair[:2], "--prompts", prompts, "--max-tokens", "12"]


def test_the_score_adds_up_over_prompts(asked):
    result = invoke(*asked, "--json")
    assert result.exit_code == 0, result.output
    score = json.loads(result.stdout)
    each = score["by_prompt"]
    assert score["prompts"] == len(each) == 2
    assert score["blocks"] == sum(p["blocks"] for p in each)
    assert score["generated_tokens"] == 22  # 12 tokens each, the first by no block
    assert score["acceptance_length"] == pytest.approx(22 / score["blocks"])
    assert len(score["acceptance_by_position"]) == 7
    assert score["settings"]["prompts"]["sha256"]
    assert score["environment"]["versions"]["mlx"]
    assert f"{score['blocks']} blocks, 22 tokens in them" in invoke(*asked).stdout


def test_limit_and_template_choose_and_make_the_prompts(asked, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "How many?", "answer": "3"}\n{"question": "Why?"}\n')
    at = asked.index("--prompts") + 1
    asked = [*asked[:at], str(file), *asked[at + 1 :]]
    assert_one_error(invoke(*asked), "has no 'prompt' or 'messages'")
    score = json.loads(invoke(*asked, "--template", "Q: {question}", "--limit", "1", "--json").stdout)
    assert score["prompts"] == 1


def test_ctrl_c_leaves_the_score_of_what_was_answered(asked, monkeypatch):
    true_each = evaluate.measure_each

    def interrupted(*args, **options):
        yield next(true_each(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "measure_each", interrupted)
    result = invoke(*asked)
    assert result.exit_code == 130
    assert "1 prompts, " in result.stdout
    assert result.stderr == "Stopped after 1 of 2 prompts.\n"


def test_an_answer_without_a_block_is_one_line(asked):
    assert_one_error(invoke(*asked[:-1], "1"), "No answer was long enough for a block")


def test_suites_and_kinds_have_rows_of_their_own(asked, tmp_path):
    turns, problem, kinds = tmp_path / "turns.jsonl", tmp_path / "problem.jsonl", tmp_path / "kinds.jsonl"
    turns.write_text('{"prompt": ["Hi", "And?"], "category": "writing"}\n')
    problem.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?", "answer": "4"}\n')
    kinds.write_text('{"prompt": "Hi", "kind": "chat"}\n{"prompt": "f", "kind": "code"}\n{"prompt": "x"}\n')
    at = asked.index("--prompts")
    drafter, rest = asked[:at], asked[at + 2 :]
    suites = ["--suite", f"mt-bench={turns}", "--suite", f"gsm8k={problem}"]
    result = invoke(*drafter, *suites, *rest, "--limit", "1", "--json")
    assert result.exit_code == 0, result.output
    score = json.loads(result.stdout)
    rows = score["by_kind"]
    assert {name: row["generated_tokens"] for name, row in rows.items()} == {"mt-bench": 22, "gsm8k": 11}
    assert [p["kind"] for p in score["by_prompt"]] == ["mt-bench", "gsm8k"]
    assert score["settings"]["prompts"]["source"] == f"mt-bench={turns}, gsm8k={problem}"
    score = json.loads(invoke(*drafter, "--prompts", kinds, *rest, "--json").stdout)
    assert (score["prompts"], list(score["by_kind"])) == (3, ["chat", "code"])
    assert "tau" in invoke(*drafter, *suites, *rest).stdout
    assert_one_error(invoke(*asked, *suites), "leave --prompts out")
    assert_one_error(invoke(*drafter, *suites, "--template", "{x}"), "leave --template out")
    assert_one_error(invoke(*drafter, *suites, "--raw"), "turns.jsonl, line 1: Messages, .* need the chat template")
