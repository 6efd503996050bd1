"""Tables of traces hold what the records hold, and the standard quantities are those counted by hand."""

import json
import sys

import numpy as np
import pytest
from support.errors import refused
from support.models import writer

from dflash.core.errors import DataError, DFlashError
from dflash.evaluation import traces as t
from dflash.evaluation.acceptance import measure_one
from dflash.evaluation.statistics import Ratio


def request(tokens: list[int]) -> dict:
    return {"record": "request", "format": 1, "target": "T", "drafter": "D", "prompt_tokens": tokens, "options": {}}


def block(number: int, verified: int, accepted: int, probabilities: list[float], time: float, **more) -> dict:
    """Drafts are tokens 0, 1, ..; the accepted ones and one token more are committed."""
    tokens = [*range(accepted), 99]
    made = {"record": "block", "number": number, "position": 10 * number, "asleep": False, "source": "", "why": {}}
    made |= {"drafts": list(range(len(probabilities))), "verified": verified, "accepted": accepted, "tokens": tokens}
    made |= {"draft_probability": probabilities, "texts": {str(i): f"t{i}" for i in range(100)}, "time": time}
    made |= {"target_probability": [0.5] * verified, "finish_reason": None}
    made |= {"seconds": {"draft": 0.25, "verify": 0.5, "rewind": 0.125, "host": 0.125}}
    return made | more


@pytest.fixture
def by_hand() -> list[dict]:
    """Two requests: blocks of 2, 0 and 3 accepted drafts of 3, a plain step, and one cut by a stop token."""
    first = block(0, 0, 0, [], 1.0, seconds={"prefill": 1.0, "host": 0.0})
    return [
        request([1, 2]),
        first,
        block(1, 3, 2, [0.95, 0.95, 0.15, 0.5], 2.0, why={"tokens": 2.5}),
        block(2, 3, 0, [0.95, 0.95, 0.95, 0.5], 3.0, why={"tokens": 1.5}),
        block(3, 0, 0, [], 3.5, asleep=True, seconds={"plain": 0.5, "host": 0.0}),
        request([1, 2, 3]),
        first,
        block(1, 3, 3, [0.95, 0.85, 0.85, 0.5], 2.0),
        block(2, 3, 3, [0.95, 0.85, 0.85, 0.5], 3.0, tokens=[0, 1], finish_reason="stop"),
    ]


def test_tables_have_a_row_each(by_hand):
    tables = t.read_traces(by_hand)
    assert tables.names == ["1"]
    assert tables.requests.prompt_length.tolist() == [2, 3]
    assert tables.requests.tokens.tolist() == [1 + 3 + 1 + 1, 1 + 4 + 2]
    assert tables.requests.seconds.tolist() == [2.5, 2.0]
    assert len(tables.blocks) == 7
    assert tables.blocks.why_tokens.dropna().tolist() == [2.5, 1.5]
    assert len(tables.drafts) == 16
    assert tables.drafts.text[:4].tolist() == ["t0", "t1", "t2", "t3"]
    last = tables.drafts[-4:]  # the answer ended with the second draft: nothing is known of the third
    assert last.verified.tolist() == last.reached.tolist() == last.accepted.tolist() == [True, True, False, False]


def test_quantities_are_those_counted_by_hand(by_hand):
    tables = t.read_traces(by_hand)
    length = t.acceptance_length(tables.blocks)
    assert length.value == (3 + 1 + 4 + 2) / 4  # the plain step is no block
    assert length == Ratio.of([4, 6], [2, 2]).interval().bounded(1)  # of whole requests
    assert t.tokens_per_second(tables.requests).value == (5 + 6) / 4.5
    survival = t.survival(tables.drafts)
    assert survival.position.tolist() == [1, 2, 3]
    assert survival.blocks.tolist() == [4, 4, 3]
    assert survival.survival.tolist() == pytest.approx([3 / 4, 3 / 4, 1 / 3])
    assert survival.low.notna().all()
    assert survival.acceptance.tolist() == pytest.approx([3 / 4, 1, 1 / 2])
    assert t.acceptance_counts(tables.blocks).tolist() == [1, 0, 1, 2]
    assert t.time_by_part(tables.blocks).to_dict() == {
        **{"prefill": 2.0, "draft": 1.0, "verify": 2.0, "rewind": 0.5},
        **{"plain": 0.5, "host": 0.5},
    }
    alone = t.survival(tables.drafts[tables.drafts.request == 0])
    assert alone.low.isna().all()  # one request says nothing of others
    assert t.acceptance_length(t.read_traces(by_hand[:5]).blocks).low is None


def test_calibration_counts_the_drafts_that_were_reached(by_hand):
    """By the confidence head's probabilities where there is one, and not at all where there are none."""
    table = t.calibration(t.read_traces(by_hand).drafts)
    assert table.low.tolist() == pytest.approx([0.1, 0.8, 0.9])
    assert table.drafts.tolist() == [1, 3, 5]
    assert table.probability.tolist() == pytest.approx([0.15, 0.85, 0.95])
    assert table.accepted.tolist() == pytest.approx([0, 1, 4 / 5])
    assert t.calibration_error(table) == pytest.approx((0.15 + 3 * 0.15 + 5 * 0.15) / 9)
    head = [record | {"confidence": [0.35] * len(record.get("drafts", ()))} for record in by_hand]
    assert t.calibration(t.read_traces(head).drafts).probability.tolist() == pytest.approx([0.35])
    for record in by_hand:
        record.pop("draft_probability", None)
    tables = t.read_traces(by_hand)
    assert np.isnan(t.calibration_error(t.calibration(tables.drafts)))
    assert t.summary(tables).acceptance_length.to_dict() == {"1": 2.5}


def test_acceptance_of_a_real_trace_is_that_of_eval(tmp_path):
    """The same answers, counted by the response and by the trace, a stop token inside the last block."""
    decoder = writer("one two three four five six seven", p=0.7, policy="full")
    path = tmp_path / "a.jsonl"
    decoder.generate([65, 66], trace=path)
    tables = t.read_traces(path)
    decoder.draft_model.random.seed(0)
    counts, _ = measure_one(decoder, [65, 66], 200)
    assert t.acceptance_length(tables.blocks).value == counts.length
    survival = t.survival(tables.drafts)
    assert survival.blocks.tolist() == counts.verified[counts.verified > 0].tolist()
    assert survival.survival.tolist() == pytest.approx(counts.by_position[: len(survival)])


def test_files_are_named_by_their_stems_or_paths(by_hand, tmp_path):
    paths = [tmp_path / name for name in ("a/x.jsonl", "b/x.jsonl", "b/y.jsonl")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in by_hand))
    assert t.read_traces(paths[0], paths[2]).names == ["x", "y"]
    assert t.read_traces(*paths[:2]).names == [str(path) for path in paths[:2]]
    with pytest.raises(DataError) as error:
        t.read_traces(paths[0], paths[0])
    refused(error, "twice", "x.jsonl")


@pytest.mark.parametrize(
    ("part", "message"), [(slice(0, 1), "no answer"), (slice(1, None), "does not begin with a re")]
)
def test_traces_without_an_answer_are_refused(by_hand, part, message):
    with pytest.raises(DataError) as error:
        t.read_traces(by_hand[part])
    refused(error, message)


def test_without_pandas_the_extra_is_named(monkeypatch, by_hand):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DFlashError) as error:
        t.read_traces(by_hand)
    refused(error, "pandas", "pip install '.[study]'")
