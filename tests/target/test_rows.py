"""Rows that keep different numbers of a pass's tokens are what their texts are alone; what cannot be is refused."""

import pytest
from support.rows import ROW_TARGETS, row_target

from dflash import LoadedTargetModel
from dflash.adapters.conformance import small_models as small
from dflash.core.errors import IncompatibleModelsError
from dflash.target.rows import RULES
from dflash.target.trial import Trial, rows_equal_texts


@pytest.mark.parametrize("name", ROW_TARGETS)
def test_rows_equal_their_texts_and_leave_as_these(name):
    rows_equal_texts(Trial(row_target(name), rounds=10))


@pytest.mark.parametrize("name", ["full", "sliding", "gated delta net"])
def test_a_row_that_keeps_too_much_is_noticed(name, monkeypatch):
    for kind, rule in list(RULES.items()):
        monkeypatch.setitem(RULES, kind, lambda cache, length, kept, rule=rule: rule(cache, length, [max(kept)] * 3))
    with pytest.raises(AssertionError, match="row"):
        rows_equal_texts(Trial(row_target(name), rounds=3))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("llama4", "Layer 0 keeps a ChunkedKVCache, of which several texts cannot be decoded at once"),
        ("recurrent_gemma", "something else for several texts at once than for each alone.*layer 0 ArraysCache"),
    ],
)
def test_what_has_no_rule_or_heeds_no_padding_is_refused(model_type, message):
    target = LoadedTargetModel(small.build(model_type))
    for _ in range(2):  # the second time without the passes
        with pytest.raises(IncompatibleModelsError, match=message):
            target.check_batchable()
