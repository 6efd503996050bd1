"""Predicted speed-ups: the arithmetic, the curves, what is refused, and where the command prints them."""

import pytest
from support.cli import assert_one_error, invoke

from dflash.core.errors import DFlashError
from dflash.evaluation.prediction import DRAFTING, PUBLISHED, CostCurve, acceptance_of, predicted, prediction_report

ACCEPTANCE = [0.5, 0.25, 0.125]


def test_a_block_brings_its_right_drafts_and_one_token_for_its_cost():
    """The expected tokens of a block, counted over every number of right drafts."""
    right = [0.5, 0.25, 0.125, 0.125]  # chance of exactly 0, 1, 2 and 3 right drafts in a block of 3
    tokens = {k: sum(chance * (1 + min(n, k)) for n, chance in enumerate(right)) for k in (0, 1, 2, 3)}
    costs = {0: 1.0, 1: 1.1, 2: 1.5, 3: 3.0}
    assert predicted(ACCEPTANCE, costs) == pytest.approx({k: tokens[k] / costs[k] for k in costs})
    assert predicted(ACCEPTANCE[:2], costs).keys() == {0, 1, 2}


def test_a_curve_is_a_line_between_known_passes_and_ends_at_the_longest():
    curve = CostCurve("one", {1: 1.0, 2: 1.2, 6: 2.0}, "here")
    assert [curve.block(k) for k in (1, 3, 5, 6)] == [pytest.approx(cost + DRAFTING) for cost in (1.2, 1.6, 2.0)] + [
        None
    ]
    for curve in PUBLISHED:
        costs = [cost for k in range(64) if (cost := curve.block(k)) is not None]
        assert costs[0] == 1 + DRAFTING
        assert costs == sorted(costs)
        assert "#" in curve.source or curve.name == "flat"


def test_the_report_has_a_row_for_each_machine_and_stars_the_best_length():
    rows = prediction_report(ACCEPTANCE, {0: 1.0, 1: 1.25, 2: 1.25, 3: 2.5, 5: 9.0})
    assert rows[0] == ("this machine", "1.20", "1.40*", "0.75", "measured above")
    assert [row[0] for row in rows[1:]] == [curve.name for curve in PUBLISHED]
    flat = dict(zip(("name", 1, 2, 3), rows[1], strict=False))
    assert (flat[1], flat[3]) == (f"{1.5 / (1 + DRAFTING):.2f}", f"{1.875 / (1 + DRAFTING):.2f}*")
    worse = prediction_report([0.09], {0: 1.0, 1: 2.0})
    assert not any("*" in row[1] for row in worse), "plain decoding is the best everywhere"


@pytest.mark.parametrize("text", ["", "a", "0.5,", "0.5,0.6", "1.2", "-0.1", "nan", "0.5;0.2"])
def test_shares_that_cannot_be_are_one_line(text):
    with pytest.raises(DFlashError, match=r"^--acceptance takes .*0\.57,0\.27,0\.11.*; got "):
        acceptance_of(text)


def test_doctor_predicts_for_a_target_and_refuses_before_it_loads(monkeypatch):
    monkeypatch.setattr("dflash.evaluation.doctor._ROUNDS", 1)
    answer = invoke("doctor", "--target", "bundled", "--acceptance", "0.9,0.8,0.7")
    assert answer.exit_code == 0, answer.stderr
    table = answer.stdout[answer.stdout.index("predicted speed-up") :]
    assert all(f" {name} " in table for name in ("this machine", *(curve.name for curve in PUBLISHED)))
    assert "A prediction, not a measurement" in table
    assert_one_error(invoke("doctor", "--acceptance", "0.5"), "--acceptance needs the target")
    assert_one_error(invoke("doctor", "--target", "no/such", "--acceptance", "x"), "--acceptance takes")
