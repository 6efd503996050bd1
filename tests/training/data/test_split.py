"""The split: a rule over digests that holds out the share asked for, and always something to evaluate and train on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.conversations import prompts, turns

from dflash.core.errors import DataError
from dflash.training.data.split import HeldoutRule, is_heldout, opening_digest

DIGESTS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20).map(lambda n: np.array(n, np.uint64))


def test_the_share_is_as_asked_and_a_greater_one_adds_to_a_smaller_one():
    digests = np.array([opening_digest(talk) for talk in prompts(2000)], np.uint64)
    ten, twenty = (is_heldout(digests, HeldoutRule(percent)) for percent in (10, 20))
    assert 150 < ten.sum() < 250
    assert 350 < twenty.sum() < 450
    assert (ten <= twenty).all()


def test_a_conversation_is_on_one_side_whatever_follows_its_opening():
    assert opening_digest(turns("q")) == opening_digest(turns("q", "a", "b", "c")) != opening_digest(turns("r"))


@given(DIGESTS, st.floats(0, 99), st.integers(0, 30))
def test_at_least_so_many_are_held_out_and_some_always_remain_beside_them(digests, percent, at_least):
    held, by_percent = is_heldout(digests, HeldoutRule(percent, at_least)), is_heldout(digests, HeldoutRule(percent, 0))
    distinct, kept = len(np.unique(digests)), len(np.unique(digests[held]))
    assert (by_percent <= held).all()
    if percent == 0:
        assert not held.any()
    else:
        assert kept == max(len(np.unique(digests[by_percent])), min(at_least, distinct - 1))
    assert all(held[digests == digest].all() or not held[digests == digest].any() for digest in digests)


def test_by_default_forty_conversations_are_enough_to_start():
    digests = np.array([opening_digest(talk) for talk in prompts(40)], np.uint64)
    assert is_heldout(digests, HeldoutRule()).sum() == 1
    assert not is_heldout(digests[:1], HeldoutRule()).any()


@pytest.mark.parametrize("values", [{"percent": 100}, {"percent": -1}, {"percent": float("nan")}, {"at_least": -1}])
def test_impossible_rules_are_refused(values):
    with pytest.raises(DataError, match=f"heldout_{next(iter(values))} must be at least 0"):
        HeldoutRule(**values)
