"""``dflash eval``: scores on finished texts and by decoding, partial results, prompts of every form."""

import json
import re

import pytest
from support.cli import assert_one_error, invoke

from dflash.decoding.trace import read_records
from dflash.evaluation import acceptance, texts


@pytest.fixture
def asked(pair, prompts) -> list[str]:
    return ["eval", pair[3], *pair[:2], "--prompts", prompts, "--max-tokens", "12"]


@pytest.fixture(autouse=True)
def texts_of_this_test(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))


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
    assert f"{score['blocks']}, tokens of blocks 22" in invoke(*asked).stdout
    records = list(read_records(trace))
    assert [r["drafter"] for r in records if r["record"] == "request"] == [pair[3]] * 2
    blocks = [r for r in records if r["record"] == "block" and r["number"] > 0]
    assert (len(blocks), sum(len(b["tokens"]) for b in blocks)) == (score["blocks"], score["generated_tokens"])


def test_every_draft_is_verified_unless_a_policy_or_a_block_size_says_otherwise(asked):
    assert score_of(*asked)["by_prompt"] == score_of(*asked, "--policy", "full")["by_prompt"]
    assert score_of(*asked, "--policy", "0")["blocks"] == 22
    assert score_of(*asked, "--policy", "0", "--batch", "2")["blocks"] == 22
    assert score_of(*asked, "--temp", "0.9", "--batch", "2")["generated_tokens"] == 22


def test_the_score_on_texts_is_that_of_decoding(asked, tmp_path):
    scores = [score_of(*asked, *how) for how in ([], ["--decode"], ["--decode", "--batch", 2])]
    assert [score["settings"].pop("decode") for score in scores] == [False, True, True]
    assert [score["settings"].pop("batch") for score in scores] == [None, None, 2]
    for score in scores:
        del score["environment"]
    on_texts, decoded, batched = scores
    assert on_texts == decoded == batched
    assert re.match(r"2 texts, 0\.\d MB and 0\.\d MB of features, in ", invoke("texts").stdout)
    assert json.loads(invoke("texts", "--json").stdout)[0]["texts"] == 2
    assert score_of(*asked, "--texts", tmp_path / "own")["by_prompt"] == on_texts["by_prompt"]
    assert len(list((tmp_path / "own").glob("*/*.json"))) == 3
    assert "deleted from" in invoke("texts", "--delete").stdout
    assert not (tmp_path / "cache" / "texts").exists()


@pytest.mark.parametrize(
    ("options", "decodes"),
    [(["--policy", "2"], True), (["--stop-token", "3", "--seed", "5", "--policy", "full"], False)],
)
def test_what_needs_decoding_decodes(asked, monkeypatch, options, decodes):
    wrong = ("dflash.evaluation.texts.write", acceptance.__name__ + ".measure_turns")[not decodes]
    monkeypatch.setattr(wrong, lambda *_, **__: pytest.fail(wrong))
    assert score_of(*asked, *options)["settings"]["decode"] is decodes
    if decodes:
        assert_one_error(invoke(*asked, *options, "--every-anchor"), "--every-anchor works on finished texts")


@pytest.mark.parametrize("how", [["--every-anchor"], ["--decode", "--batch", "2"]], ids=["texts", "batches"])
def test_later_turns_follow_the_targets_own_answers(asked, tmp_path, monkeypatch, how):
    turns, prompts = tmp_path / "turns.jsonl", []
    turns.write_text('{"prompt": ["Hi", "And?", "So?"]}\n{"prompt": ["Count"]}\n{"prompt": ["Why", "?"]}\n')
    asked = [*asked[:4], "--suite", f"mt-bench={turns}", *asked[6:]]
    for module, name in ((texts, "write"), (acceptance, "measure_batch")):
        answer = getattr(module, name)
        recorded = lambda *args, answer=answer, **kw: prompts.extend(args[1]) or answer(*args, **kw)  # noqa: E731
        monkeypatch.setattr(module, name, recorded)
    stop = []
    for trace in (tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"):
        expected = score_of(*asked, *stop, "--decode", "--trace", trace)
        records, prompts[:] = list(read_records(trace)), []
        found = score_of(*asked, *stop, *how)
        assert found["by_prompt"] == expected["by_prompt"]
        assert sorted(prompts) == sorted(r["prompt_tokens"] for r in records if r["record"] == "request")
        assert len(prompts) == 6
        if not stop and how == ["--every-anchor"]:
            assert found["every_anchor"]["anchors"] == 66
        stop = ["--stop-token", [t for r in records if r["record"] == "block" for t in r["tokens"]][4]]
    assert "stop" in [r.get("finish_reason") for r in records]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--batch is for decoding; give --decode too"),
        (["--temp", "0.5", "--verify", "speculative_sampling"], "verify is for one prompt at a time"),
        *((["--decode", f"--{name}", value], f"{name.replace('-', '_')} is for one prompt at a time")
          for name, value in (("tree", "4"), ("max-kv-size", "64"), ("trace", "t.jsonl"))),
    ],
)  # fmt: skip
def test_what_cannot_be_batched_is_refused_by_name(asked, options, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert_one_error(invoke(*asked, "--batch", "2", *options), message)


def test_drafters_and_block_sizes_are_compared_on_the_same_texts(asked, pair, tmp_path):
    one, wide, plot = score_of(*asked), [*asked[:1], "ngram", *asked[1:]], tmp_path / "plot.svg"
    for how in ([], ["--decode"]):
        found = score_of(*wide, *how, "--plot", plot)["drafters"]
        assert [own["drafter"] for own in found] == ["ngram", pair[3]]
        assert found[1]["by_prompt"] == one["by_prompt"]
        assert found[0]["over_first"]["value"] == 1
        ratio = found[1]["acceptance_length"] / found[0]["acceptance_length"]
        assert found[1]["over_first"]["value"] == pytest.approx(ratio)
        assert "ngram" in plot.read_text()
    sizes = [*asked, "--block-size", "4", "--block-size", "2", "--every-anchor"]
    found = score_of(*sizes)["drafters"]
    assert [len(own["acceptance_by_position"]) for own in found] == [3, 1]
    assert [own["every_anchor"]["anchors"] for own in found] == [22, 22]
    shown = invoke(*sizes).stdout
    assert f"{pair[3]}, blocks of 2" in shown
    assert "right if reached" in shown
    assert len(score_of(*asked, "--block-size", "4")["acceptance_by_position"]) == 3
    assert_one_error(invoke(*wide, "--trace", tmp_path / "t.jsonl"), "--trace records one drafter")
    batched = score_of(*wide, "--decode", "--batch", "2")["drafters"]
    assert batched[1]["by_prompt"] == one["by_prompt"]


def test_what_a_drafter_learns_in_blocks_of_one_size_counts_in_no_other():
    asked = ["eval", "ngram+bundled", "--limit", "2", "--max-tokens", "48"]
    alone = score_of(*asked, "--block-size", "8")
    both = score_of(*asked, "--block-size", "4", "--block-size", "8")["drafters"]
    assert both[1]["by_prompt"] == alone["by_prompt"]


def test_ctrl_c_while_texts_are_written_keeps_them(asked, monkeypatch):
    write = texts.write

    def interrupted(*args):
        yield next(write(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr(texts, "write", interrupted)
    result = invoke(*asked)
    assert result.exit_code == 130
    assert result.stderr == "Stopped; 1 of 2 texts are kept, so the same command goes on.\n"
    assert "1 texts, " in invoke("texts").stdout


def test_limit_and_template_choose_and_make_the_prompts(asked, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "How many?", "answer": "3"}\n{"question": "Why?"}\n')
    asked = [file if part == asked[5] else part for part in asked]
    assert_one_error(invoke(*asked), "has no 'prompt' or 'messages'")
    assert score_of(*asked, "--template", "Q: {question}", "--limit", "1")["prompts"] == 1
    assert_one_error(invoke(*asked[:-1], "1", "--template", "{question}"), "No answer was long enough for a block")


def test_ctrl_c_leaves_the_score_of_what_was_answered(asked, monkeypatch):
    true_turns = acceptance.measure_turns

    def interrupted(*args, **options):
        yield next(true_turns(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(acceptance, "measure_turns", interrupted)
    result = invoke(*asked, "--decode")
    assert result.exit_code == 130
    assert "prompts 1, " in result.stdout
    assert result.stderr == "Stopped after 1 of 2 prompts.\n"


@pytest.mark.parametrize(
    ("first", "message"), [(0, " after 1 of 2 prompts."), (1, " before the first prompt was answered.")]
)
def test_ctrl_c_leaves_the_score_of_the_first_prompts_of_a_batch(asked, monkeypatch, first, message):
    true_batch = acceptance.measure_batch

    def interrupted(*args, **options):
        yield next(found for found in true_batch(*args, **options) if found[0] == first)
        raise KeyboardInterrupt

    monkeypatch.setattr(acceptance, "measure_batch", interrupted)
    result = invoke(*asked, "--decode", "--batch", "2")
    assert result.exit_code == 130
    assert ("prompts 1, " in result.stdout) == (first == 0)
    assert result.stderr == f"Stopped{message}\n"


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
