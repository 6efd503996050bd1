"""Runs are summed up by what they mean: tokens, time, blocks."""

import pytest
from support.bench import PROMPTS, result, run

from dflash import evaluation as bench
from dflash.evaluation import PromptResult


def test_speed_counts_tokens_after_the_first():
    assert run().tps == 5.0
    assert run(tokens=[1]).tps is None
    assert bench.overall_tps([run(), run(range(31), 6.0), run([1])]) == 5.0
    assert bench.overall_tps([run([1])]) is None


def test_the_summary_weighs_blocks_and_time_and_keeps_the_spread_of_ratios():
    results = [
        result([run(seconds=4.0), run(seconds=2.0)], [run(seconds=1.0, committed=[8, 2]), run(seconds=1.0)]),
        result([run(seconds=6.0)], [run(seconds=2.0, committed=[10])], bench.Difference(1, 2, 3, 0.1)),
    ]
    summary = bench.summarize(results)
    assert summary["ratio"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert summary["overall_ratio"] == pytest.approx(12 / 4)
    assert summary["acceptance_length"] == pytest.approx(30 / 5)
    assert (summary["identical"], summary["prompts"]) == (1, 2)


def test_answers_are_judged_in_one_call_and_only_where_there_is_a_check():
    asked = []

    def score(pairs):
        asked.append(pairs)
        return [text == "right" for text, _ in pairs]

    checked = PromptResult(PROMPTS[1], [run(text="right")], [run(text="wrong")], None)
    assert bench.judge([result([run()], [run()]), checked], score) == [None, (True, False)]
    assert asked == [[("right", PROMPTS[1].check), ("wrong", PROMPTS[1].check)]]
