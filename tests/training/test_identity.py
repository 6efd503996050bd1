"""A folder is continued only with what it was started with."""

import pytest

from dflash.core.errors import TrainingError
from dflash.training.identity import check_same_run, differences


def test_differences_name_nested_keys_and_what_one_side_lacks():
    before, now = {"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"b": 1, "c": [2]}, "e": None}
    assert differences(before, now) == [("a.c", [1], [2]), ("d", 2, None)]


def test_another_run_is_refused_unless_only_what_may_change_differs(tmp_path):
    path = tmp_path / "run.json"
    check_same_run(path, {"a": {"b": 1}, "c": 1})
    check_same_run(path, {"a": {"b": 2}, "c": 1}, may_change={"a"})
    with pytest.raises(TrainingError, match=r"belongs to a run with c 1, this one has 2\. Set another folder"):
        check_same_run(path, {"a": {"b": 2}, "c": 2}, may_change={"a.b"})
    check_same_run(path, {"a": {"b": 2}, "c": 1})
