"""Answers are judged by the check that is registered for the kind of their request."""

import pytest

from dflash.core.errors import DFlashError
from dflash.evaluation.checks import check_answers, checks, register_check


def test_each_check_judges_its_own_answers_in_one_call_and_the_order_stays():
    asked = []

    def ends_with(pairs):
        asked.append(pairs)
        return [text.endswith(check["end"]) for text, check in pairs]

    with checks.temporary("ending", ends_with), checks.temporary("never", lambda pairs: [False] * len(pairs)):
        ending, never = {"kind": "ending", "end": "!"}, {"kind": "never"}
        assert check_answers([("a!", ending), ("b!", never), ("c", ending)]) == [True, False, False]
    assert asked == [[("a!", ending), ("c", ending)]]


def test_the_check_of_the_bundled_requests_is_an_entry_point():
    assert check_answers([("Answer: 3", {"kind": "problem", "answer": 3})]) == [True]


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"kind": "riddle"}, "of no known kind, 'riddle'; .*--plugin FILE"),
        ({}, "of no known kind, None"),
        ({"kind": "problem"}, "lacks what its kind needs: KeyError.'answer'"),
    ],
)
def test_a_check_that_cannot_be_carried_out_is_one_line(check, message):
    with pytest.raises(DFlashError, match=message):
        check_answers([("Answer: 3", check)])


def test_registering_takes_the_kind():
    with pytest.raises(TypeError, match="takes the name of the kind of check"):
        register_check()
