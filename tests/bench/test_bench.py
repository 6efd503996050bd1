"""Benchmarks compare fairly and say what they found: order, identity, statistics, the limit, the report."""

import io
import json

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler
from rich.console import Console
from support.models import bound_drafter, target, writer

from dflash import DFlashError, DFlashSpeculativeDecoder, bench
from dflash.bench import BenchPrompt, PromptResult, Run
from dflash.bench.report import Report
from dflash.bench.speedup import Limit, measure_limit

PROMPTS = [BenchPrompt("one"), BenchPrompt("two", {"kind": "problem", "answer": 3})]
TOKENS = st.lists(st.integers(0, 3), max_size=8)


def run(tokens=range(11), seconds=2.0, accepted=(4, 6), text="") -> Run:
    return Run(list(tokens), text, seconds, list(accepted))


def result(plain: list[Run], dflash: list[Run], difference=None) -> PromptResult:
    return PromptResult(PROMPTS[0], [1, 2], plain, dflash, difference)


def scripted_side(name: str, tokens: list[int], calls: list[str]):
    """Answers with ``tokens`` whatever is asked, and notes that it was asked."""

    def answer(prompt):
        calls.append(name)
        return (([token], "x", int(i > 0)) for i, token in enumerate(tokens))

    return answer


# --- prompts ------------------------------------------------------------------------------------------


def test_prompts_are_read_in_order_with_their_checks(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b", "check": {"kind": "problem"}, "more": 1}\n')
    assert bench.read_prompts(file) == [BenchPrompt("a"), BenchPrompt("b", {"kind": "problem"})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b"\n', "line 2 is not valid JSON"),
        (b'{"prompt": "a"}\n\n{"text": "b"}\n', 'line 3 has no "prompt"'),
        (b'{"prompt": " "}\n', 'line 1 has no "prompt"'),
        (b'["a"]\n', 'line 1 has no "prompt"'),
        (b'{"prompt": "a", "check": 1}\n', "line 1.*must be an object, got int"),
        (b"\n\n", "holds no prompts"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_bad_prompt_file_is_an_error_that_names_the_line(tmp_path, content, message):
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    with pytest.raises(DFlashError, match=message):
        bench.read_prompts(file)


def test_a_missing_prompt_file_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(DFlashError, match=r"nope\.jsonl: No such file"):
        bench.read_prompts(tmp_path / "nope.jsonl")


# --- comparison ---------------------------------------------------------------------------------------


@given(TOKENS, TOKENS)
def test_the_first_difference_ends_the_common_prefix(a, b):
    found = bench.first_difference(a, b)
    assert (found is None) == (a == b)
    if found is not None:
        assert a[: found.position] == b[: found.position]
        assert a[found.position : found.position + 1] == ([] if found.plain is None else [found.plain])
        assert b[found.position : found.position + 1] == ([] if found.dflash is None else [found.dflash])
        assert found.plain != found.dflash


def test_the_margin_is_the_top_logit_less_the_other_tokens():
    loaded, prefix = target("qwen3", 1), [1, 2, 3]
    logits = loaded.model(mx.array([prefix]))[0, -1]
    order = [int(i) for i in mx.argsort(-logits).tolist()]
    lead = (logits[order[0]] - logits[order[1]]).item()
    for a, b in (order[:2], order[1::-1]):
        assert bench.logit_margin(loaded, prefix, a, b) == pytest.approx(lead, abs=1e-4)
    assert bench.logit_margin(loaded, prefix, order[0], None) is None


def test_sides_take_turns_and_the_warm_up_is_not_counted():
    calls: list[str] = []
    loaded = writer("x").loaded_target
    sides = scripted_side("p", [5, 6], calls), scripted_side("d", [5, 6], calls)
    results = list(bench.compare(loaded, *sides, PROMPTS, runs=3))
    assert calls == list("pd" + "pddppd" + "dppddp")
    assert [len(r.plain) for r in results] == [len(r.dflash) for r in results] == [3, 3]
    assert all(r.difference is None for r in results)


def test_a_difference_is_found_with_position_tokens_and_margin():
    decoder = writer("hello")
    text = decoder.tokenizer.encode("hello")
    wrong = [*text[:2], (text[2] + 1) % 200, *text[3:]]
    sides = scripted_side("p", text, []), scripted_side("d", wrong, [])
    (found,) = bench.compare(decoder.loaded_target, *sides, PROMPTS[:1])
    assert (found.difference.position, found.difference.plain, found.difference.dflash) == (2, text[2], wrong[2])
    # Past its script the target wants its last token, the stop token, with logit 100, and all others at 0.
    assert found.difference.margin == pytest.approx(100)


def test_sampled_tokens_are_not_compared():
    sides = scripted_side("p", [1, 2], []), scripted_side("d", [3], [])
    (sampled,) = bench.compare(writer("x").loaded_target, *sides, PROMPTS[:1], greedy=False)
    assert sampled.difference is None


@pytest.mark.parametrize("name", [bench.PLAIN, bench.DFLASH])
def test_a_failing_side_is_an_error_that_names_side_and_prompt(name):
    def broken(prompt):
        raise RuntimeError("out of memory\nin a kernel")

    good = scripted_side("g", [1, 2], [])
    sides = (broken, good) if name == bench.PLAIN else (good, broken)
    with pytest.raises(DFlashError, match=f"^{name} failed on prompt 1: out of memory$"):
        list(bench.compare(writer("x").loaded_target, *sides, PROMPTS))


def test_a_side_that_writes_nothing_is_an_error():
    sides = scripted_side("p", [], []), scripted_side("d", [1], [])
    with pytest.raises(DFlashError, match="plain mlx_lm wrote nothing"):
        list(bench.compare(writer("x").loaded_target, *sides, PROMPTS))


def test_counts_below_one_are_errors():
    decoder = writer("x")
    with pytest.raises(DFlashError, match="max_tokens must be at least 1"):
        bench.plain_side(decoder.loaded_target, -1)
    with pytest.raises(DFlashError, match="runs must be at least 1"):
        next(bench.compare(decoder.loaded_target, *2 * [scripted_side("s", [1], [])], PROMPTS, runs=0))


@pytest.mark.parametrize("max_tokens", [1, 2, 17, 60])
def test_the_real_sides_write_the_same_tokens_and_text(max_tokens):
    prompt = [65, 66]
    decoder = writer("def f(x):\n    return x + 1 — ünïcode 🙂", prompt, p=0.7)
    plain = bench.time_side(bench.plain_side(decoder.loaded_target, max_tokens), prompt)
    shown: list[str] = []
    dflash = bench.time_side(bench.dflash_side(decoder, max_tokens), prompt, shown.append)
    assert plain.tokens == dflash.tokens
    assert plain.text == dflash.text == "".join(shown)
    assert plain.accepted == []
    assert sum(dflash.accepted) + 1 == len(dflash.tokens)


# --- statistics ---------------------------------------------------------------------------------------


def test_speed_counts_tokens_after_the_first():
    assert run().tps == 5.0
    assert run(tokens=[1]).tps is None
    assert bench.overall_tps([run(), run(range(31), 6.0), run([1])]) == 5.0
    assert bench.overall_tps([run([1])]) is None


def test_the_summary_weighs_blocks_and_time_and_keeps_the_spread_of_ratios():
    results = [
        result([run(seconds=4.0), run(seconds=2.0)], [run(seconds=1.0, accepted=[8, 2]), run(seconds=1.0)]),
        result([run(seconds=6.0)], [run(seconds=2.0, accepted=[10])], bench.Difference(1, 2, 3, 0.1)),
    ]
    summary = bench.summarize(results)
    assert summary["ratio"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert summary["overall_ratio"] == pytest.approx(12 / 4)
    assert summary["acceptance_length"] == pytest.approx(30 / 5)
    assert (summary["identical"], summary["prompts"]) == (1, 2)


def test_statistics_of_answers_too_short_to_time_are_absent_not_invented():
    summary = bench.summarize([result([run([1])], [run([1], accepted=[])])])
    assert summary["ratio"] is summary["overall_ratio"] is summary["acceptance_length"] is None


def test_answers_are_judged_in_one_call_and_only_where_there_is_a_check():
    asked = []

    def score(pairs):
        asked.append(pairs)
        return [text == "right" for text, _ in pairs]

    checked = PromptResult(PROMPTS[1], [1], [run(text="right")], [run(text="wrong")], None)
    assert bench.judge([result([run()], [run()]), checked], score) == [None, (True, False)]
    assert asked == [[("right", PROMPTS[1].check), ("wrong", PROMPTS[1].check)]]


# --- the limit ----------------------------------------------------------------------------------------


def test_the_limit_is_tau_plain_steps_over_one_block():
    assert Limit(8.0, plain=0.004, draft=0.002, verify=0.006).speedup == pytest.approx(4.0)


@pytest.mark.parametrize(("kind", "block_size", "tau"), [("qwen3", 16, 3.4), ("sliding", 4, 4.0), ("llama", 1, 1.0)])
def test_the_parts_of_decoding_can_be_replayed_alone(kind, block_size, tau):
    decoder = DFlashSpeculativeDecoder(target(kind, 1), bound_drafter(kind, 1), block_size=block_size)
    limit = measure_limit(decoder, [1, 2, 3], [4, 5, 6, 7, 8], tau, make_sampler(temp=0.0))
    assert limit.acceptance_length == tau
    assert min(limit.plain, limit.draft, limit.verify) > 0


# --- the report ---------------------------------------------------------------------------------------


def rendered(report: Report) -> str:
    console = Console(file=io.StringIO(), width=200, markup=False)
    console.print(report.render())
    return console.file.getvalue()


def test_the_report_says_where_tokens_differ_and_how_close_it_was():
    same, other = result([run()], [run()]), result([run()], [run()], bench.Difference(7, 1, 2, 0.00012))
    report = Report({}, [same, other], greedy=True, limit=Limit(5.0, 0.004, 0.002, 0.003))
    assert not report.lossless
    text = rendered(report)
    assert "different at 7 (logit margin 0.00012)" in text
    assert "DIFFERENT on 1 of 2" in text
    assert "4.00 = 5.00 x 4.00 ms / (2.00 ms + 3.00 ms)" in text
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [p["identical"] for p in plain["prompts"]] == [True, False]
    assert plain["prompts"][1]["difference"] == {"position": 7, "plain": 1, "dflash": 2, "margin": 0.00012}
    assert plain["limit"]["share_reached"] == pytest.approx(1 / 4)


def test_a_sampled_report_claims_neither_identity_nor_difference():
    report = Report({}, [result([run()], [run()])], greedy=False)
    assert report.lossless
    assert "sampled" in rendered(report)
    assert "identical" not in rendered(report)
    plain = report.to_dict()
    assert plain["prompts"][0]["identical"] is plain["total"]["identical"] is None


def test_the_report_of_one_token_answers_has_gaps_not_numbers():
    report = Report({}, [result([run([1])], [run([1], accepted=[])])], greedy=True)
    assert "not measured" in rendered(report)
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["limit"] is None


def test_correct_answers_are_counted_for_each_side():
    report = Report({}, 2 * [result([run()], [run()])], greedy=True, verdicts=[(True, False), None])
    assert report.to_dict()["total"]["correct"] == {"plain": 1, "dflash": 0, "of": 1}
    assert "plain 1, DFlash 0 of 1" in rendered(report)
