"""What the blocks after every token of finished texts say of a drafter, beyond the blocks that decoding would take.

By position: how often a draft is right if those before it are, and how often all up to it are. By the drafter's own
probability: how often drafts of about that probability are right. By place in the answer: tokens that a block commits.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from .acceptance import Drafted
from .statistics import Interval, Ratio

_BINS = 10
_PLACES = ((0, 16), (16, 32), (32, 64), (64, 128), (128, 256), (256, None))

Blocks = Sequence[Sequence[Drafted]]
"""The blocks after every token of each text."""


def anchor_results(texts: Blocks, block_size: int) -> dict[str, Any]:
    """Plain data: ``anchors`` (their number), ``by_position``, ``calibration`` and ``by_place``."""
    return {
        "anchors": sum(map(len, texts)),
        "by_position": [row for i in range(block_size - 1) if (row := _position(texts, i))],
        "calibration": _calibration(texts),
        "by_place": [row for place in _PLACES if (row := _place(texts, *place))],
    }


def _position(texts: Blocks, i: int) -> dict[str, Any] | None:
    """Draft ``i`` (from 0) of the blocks that have one; it is reached if all before it are right."""
    known = np.array([sum(b.verified > i for b in text) for text in texts])
    reached = np.array([sum(b.verified > i and b.right >= i for b in text) for text in texts])
    right = np.array([sum(b.verified > i and b.right > i for b in text) for text in texts])
    if not reached.sum():
        return None
    rates = {"acceptance": Ratio.of(right, reached), "survival": Ratio.of(right, known)}
    limits = {name: vars(rate.interval().bounded(0.0, 1.0)) for name, rate in rates.items()}
    return {"position": i + 1, "reached": int(reached.sum())} | limits


def _calibration(texts: Blocks) -> list[dict[str, Any]]:
    """Reached drafts in equal ranges of the drafter's probability; empty if it states none."""
    stated = [
        (chance, i < block.right)
        for text in texts
        for block in text
        for i, chance in enumerate((block.chances or ())[: block.right + 1])
    ]
    chances, right = np.array(stated, dtype=np.float64).reshape(-1, 2).T
    bins = np.minimum((chances * _BINS).astype(int), _BINS - 1)
    return [
        {
            "low": low / _BINS,
            "high": (low + 1) / _BINS,
            "drafts": int((own := bins == low).sum()),
            "probability": float(chances[own].mean()),
            "accepted": float(right[own].mean()),
        }
        for low in range(_BINS)
        if (bins == low).any()
    ]


def _place(texts: Blocks, first: int, end: int | None) -> dict[str, Any] | None:
    """Blocks whose anchor's number in the answer is ``first`` to less than ``end``."""
    here = [[b.committed for b in text if first <= b.at and (end is None or b.at < end)] for text in texts]
    blocks = sum(map(len, here))
    if not blocks:
        return None
    length = Ratio.of(map(sum, here), map(len, here)).interval()
    return {"from": first, "to": end, "blocks": blocks, "acceptance_length": vars(length)}


def render_anchors(results: dict[str, Any]) -> RenderableType:
    """The three tables as text."""
    positions = _table("position", "reached", "right if reached", "all right up to it")
    for row in results["by_position"]:
        rates = (f"{Interval(**row[name]):.3f}" for name in ("acceptance", "survival"))
        positions.add_row(str(row["position"]), str(row["reached"]), *rates)
    calibration = _table("probability", "drafts", "stated", "right")
    for row in results["calibration"]:
        rates = (f"{row[name]:.3f}" for name in ("probability", "accepted"))
        calibration.add_row(f"{row['low']:.1f}-{row['high']:.1f}", str(row["drafts"]), *rates)
    places = _table("token of the answer", "blocks", "tokens a block")
    for row in results["by_place"]:
        end = "on" if row["to"] is None else f"to {row['to']}"
        length = f"{Interval(**row['acceptance_length']):.3f}"
        places.add_row(f"{row['from']} {end}", str(row["blocks"]), length)
    parts: list[RenderableType] = [f"blocks after every token: {results['anchors']}", positions, "", places]
    if results["calibration"]:
        parts += ["", calibration]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table
