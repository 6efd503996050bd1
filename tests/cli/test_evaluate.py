"""``dflash eval``: a score by decoding, partial results, prompts of every form."""

import json

import pytest
from support.cli import assert_one_error, invoke

from dflash.decoding.trace import read_records
from dflash.evaluation import acceptance


@pytest.fixture
def asked(pair, prompts) -> list[str]:
    return ["eval", pair[3], *pair[:2], "--prompts", prompts, "--max-tokens", "12"]


def score_of(*args: object) -> dict:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_score_adds_up_over_prompts_and_traces(asked, pair, tmp_path):
    trace = tmp_path / "a.jsonl"
    score = score_of(*asked, "--trace", trace)
    each = score["by_prompt"]
    assert score["prompts"] == len(each) == 2
    assert score["blocks"] == sum(p["blocks"] for p in each)
    assert score["generated_tokens"] == 22  # 12 tokens each, the first by no block
    assert score["acceptance_length"] == pytest.approx(22 / score["blocks"])
    assert len(score["acceptance_by_position"]) == 7
    assert score["settings"]["prompts"]["sha256"]
    assert score["environment"]["versions"]["mlx"]
    assert f"{score['blocks']} blocks, 22 tokens in them" in invoke(*asked).stdout
    records = list(read_records(trace))
    assert [r["drafter"] for r in records if r["record"] == "request"] == [pair[3]] * 2
    blocks = [r for r in records if r["record"] == "block" and r["number"] > 0]
    assert (len(blocks), sum(len(b["tokens"]) for b in blocks)) == (score["blocks"], score["generated_tokens"])


def test_every_draft_is_verified_unless_a_policy_or_a_block_size_says_otherwise(asked):
    assert score_of(*asked)["by_prompt"] == score_of(*asked, "--policy", "full")["by_prompt"]
    assert score_of(*asked, "--policy", "0")["blocks"] == 22
    assert len(score_of(*asked, "--block-size", "4")["acceptance_by_position"]) == 3


def test_limit_and_template_choose_and_make_the_prompts(asked, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "How many?", "answer": "3"}\n{"question": "Why?"}\n')
    asked = [file if part == asked[5] else part for part in asked]
    assert_one_error(invoke(*asked), "has no 'prompt' or 'messages'")
    assert score_of(*asked, "--template", "Q: {question}", "--limit", "1")["prompts"] == 1
    assert_one_error(invoke(*asked[:-1], "1", "--template", "{question}"), "No answer was long enough for a block")


def test_ctrl_c_leaves_the_score_of_what_was_answered(asked, monkeypatch):
    true_each = acceptance.measure_each

    def interrupted(*args, **options):
        yield next(true_each(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(acceptance, "measure_each", interrupted)
    result = invoke(*asked)
    assert result.exit_code == 130
    assert "1 prompts, " in result.stdout
    assert result.stderr == "Stopped after 1 of 2 prompts.\n"


def test_suites_and_kinds_have_rows_of_their_own(asked, tmp_path):
    turns, problem, kinds = tmp_path / "turns.jsonl", tmp_path / "problem.jsonl", tmp_path / "kinds.jsonl"
    turns.write_text('{"prompt": ["Hi", "And?"], "category": "writing"}\n')
    problem.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?", "answer": "4"}\n')
    kinds.write_text('{"prompt": "Hi", "kind": "chat"}\n{"prompt": "f", "kind": "code"}\n{"prompt": "x"}\n')
    drafter, rest = asked[:4], asked[6:]
    suites = ["--suite", f"mt-bench={turns}", "--suite", f"gsm8k={problem}"]
    score = score_of(*drafter, *suites, *rest, "--limit", "1")
    assert {name: row["generated_tokens"] for name, row in score["by_kind"].items()} == {"mt-bench": 22, "gsm8k": 11}
    assert [p["kind"] for p in score["by_prompt"]] == ["mt-bench", "gsm8k"]
    assert score["settings"]["prompts"]["source"] == f"mt-bench={turns}, gsm8k={problem}"
    score = score_of(*drafter, "--prompts", kinds, *rest)
    assert (score["prompts"], list(score["by_kind"])) == (3, ["chat", "code"])
    assert "tau" in invoke(*drafter, *suites, *rest).stdout
    assert_one_error(invoke(*asked, *suites), "leave --prompts out")
    assert_one_error(invoke(*drafter, *suites, "--template", "{x}"), "leave --template out")
    assert_one_error(invoke(*drafter, *suites, "--raw"), "turns.jsonl, line 1: Messages, .* need the chat template")
