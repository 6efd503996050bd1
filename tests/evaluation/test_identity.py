"""Where two answers part is found, with how close the choice was."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import target

from dflash import evaluation as bench

TOKENS = st.lists(st.integers(0, 3), max_size=8)


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
