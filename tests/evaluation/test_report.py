"""A report says what was found, and no more."""

import json
from dataclasses import replace

import pytest
from support.bench import rendered, result, run

from dflash import evaluation as bench
from dflash.evaluation.report import Report, render_several, several_dict
from dflash.evaluation.speedup import Limit


def test_the_report_says_where_tokens_differ_and_how_close_it_was():
    same, other = result([run()], [run()]), result([run()], [run()], bench.Difference(7, 1, 2, 0.00012))
    report = Report({}, [same, other], greedy=True, limit=Limit(5.0, 0.004, 0.002, 0.003))
    assert not report.lossless
    text = rendered(report.render())
    assert "different at 7 (logit margin 0.00012)" in text
    assert "DIFFERENT on 1 of 2" in text
    assert "ceiling      4.00 = 5.00 x 4.00 ms / (2.00 ms + 3.00 ms)" in text
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [p["identical"] for p in plain["prompts"]] == [True, False]
    assert plain["prompts"][1]["difference"] == {"position": 7, "plain": 1, "dflash": 2, "margin": 0.00012}
    assert plain["limit"]["fraction_reached"] == pytest.approx(1 / 4)


def test_a_sampled_report_of_one_token_answers_claims_no_identity_and_has_gaps_not_numbers():
    report = Report({}, [result([run([1])], [run([1], committed=[])])], greedy=False)
    assert report.lossless
    text = rendered(report.render())
    assert "sampled" in text
    assert "not measured" in text
    assert "identical" not in text
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["prompts"][0]["identical"] is plain["total"]["identical"] is None
    assert plain["limit"] is plain["total"]["ratio"] is plain["total"]["acceptance_length"] is None


def test_several_drafters_stand_side_by_side_on_the_same_prompts():
    plain = [run(seconds=4.0)]
    better = result(plain, [run(seconds=1.0, committed=[10])])
    worse = result(plain, [run(seconds=2.0, committed=[4, 6])], bench.Difference(7, 1, 2, 0.1))
    reports = {"mine": Report({"runs": 1}, [better], True), "theirs": Report({"runs": 1}, [worse], True)}
    text = rendered(render_several(reports))
    assert "4.00 x, 10.00" in text
    assert "2.00 x, 5.00, differs at 7" in text
    plain_data = json.loads(json.dumps(several_dict(reports), allow_nan=False))
    assert plain_data["settings"] == {"runs": 1}
    taus = [plain_data["drafters"][name]["total"]["acceptance_length"] for name in ("mine", "theirs")]
    assert taus == [10.0, 5.0]


def test_prompts_of_several_kinds_have_a_row_a_kind():
    answer = bench.Run([1, 2, 3, 4], "x", 1.0, committed=[10], drafted=[12], accepted=[9])
    good, bad = result([run()], [answer]), result([run()], [run(committed=[1])], bench.Difference(7, 1, 2))
    results = [
        replace(r, prompt=bench.BenchPrompt("x", [1], kind=k)) for r, k in ((good, "a"), (bad, "b"), (bad, None))
    ]
    report = Report({}, results, greedy=True, verdicts=[(True, False), None, None])
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [p["kind"] for p in found["prompts"]] == ["a", "b", None]
    rows = {
        kind: (row["prompts"], row["acceptance_length"], row["identical"]) for kind, row in found["by_kind"].items()
    }
    assert rows == {"a": (1, 10.0, 1), "b": (1, 1.0, 0)}
    blocks = [found["prompts"][0][key] for key in ("committed", "drafted", "accepted")]
    assert blocks == [[[10]], [[12]], [[9]]]
    assert found["total"]["correct"] == found["by_kind"]["a"]["correct"] == {"plain": 1, "dflash": 0, "of": 1}
    assert "plain 1, DFlash 0 of 1" in rendered(report.render())
    assert "DIFFERENT on 1 of 1" in rendered(report.render())
    assert "mine, b" in rendered(render_several({"mine": report}))
