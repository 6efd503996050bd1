"""What all anchors say of a drafter, from blocks counted by hand."""

import pytest
from support.bench import rendered

from dflash.evaluation.acceptance import Drafted
from dflash.evaluation.anchors import anchor_results, render_anchors


def test_positions_places_and_calibration_count_what_was_reached():
    first = [
        Drafted(0, drafted=3, verified=3, right=2, committed=3, chances=[0.95, 0.91, 0.12]),
        Drafted(1, drafted=3, verified=3, right=0, committed=1, chances=[0.35, 0.99, 0.99]),
        Drafted(20, drafted=3, verified=1, right=1, committed=1, chances=[0.92]),
    ]
    second = [
        Drafted(0, drafted=3, verified=3, right=3, committed=4),
        Drafted(300, drafted=3, verified=0, right=0, committed=1),
    ]
    found = anchor_results([first, second], 5)
    assert found["anchors"] == 5
    rows = [(row["position"], row["reached"]) for row in found["by_position"]]
    assert rows == [(1, 4), (2, 2), (3, 2)], "no block verified a fourth draft"
    assert [row["acceptance"]["value"] for row in found["by_position"]] == pytest.approx([3 / 4, 2 / 2, 1 / 2])
    assert all(row["survival"]["high"] <= 1 for row in found["by_position"])
    assert [row["survival"]["value"] for row in found["by_position"]] == pytest.approx([3 / 4, 2 / 3, 1 / 3])
    places = [(row["from"], row["to"], row["blocks"]) for row in found["by_place"]]
    assert places == [(0, 16, 3), (16, 32, 1), (256, None, 1)]
    assert found["by_place"][0]["acceptance_length"]["value"] == pytest.approx(8 / 3)
    bins = [(row["low"], row["drafts"], row["accepted"]) for row in found["calibration"]]
    assert bins == [(0.1, 1, 0.0), (0.3, 1, 0.0), (0.9, 3, 1.0)], "the drafts after a wrong one are not reached"
    assert found["calibration"][2]["probability"] == pytest.approx((0.95 + 0.91 + 0.92) / 3)
    shown = [line.split() for line in rendered(render_anchors(found)).splitlines()]
    assert ["256", "on", "1", "1.000"] in [line[:4] for line in shown]
    assert ["0.9-1.0", "3", "0.927", "1.000"] in shown
    silent = anchor_results([second], 5)
    assert silent["calibration"] == []
    assert "stated" not in rendered(render_anchors(silent))
