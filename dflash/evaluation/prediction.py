"""Predicted speed-ups: measured acceptance against what passes of several tokens cost, here or on other machines.

Costs are in plain steps: a plain step, which is a pass over one token, costs 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ..core.errors import DFlashError

DRAFTING = 0.1
"""The assumed cost of drafting on other machines: the share of the target's weights that SmolLM2's drafter reads."""


@dataclass(frozen=True)
class CostCurve:
    """What a pass costs by the number of its tokens, on a line between those in ``passes``, and who measured it."""

    name: str
    passes: Mapping[float, float]
    source: str

    def block(self, drafts: int) -> float | None:
        """The cost of drafting and verifying ``drafts`` tokens; ``None`` beyond the longest known pass."""
        widths = sorted(self.passes)
        if drafts + 1 > widths[-1]:
            return None
        return float(np.interp(drafts + 1, widths, [self.passes[width] for width in widths])) + DRAFTING


PUBLISHED = (
    CostCurve("flat", {1: 1.0, inf: 1.0}, "every pass costs a plain step: the limit of fast arithmetic"),
    CostCurve("M5 Max, 27B dense, 4 bits", {1: 1.0, 3: 1.14, 4: 1.28, 8: 2.46}, "lablup/mlxcel#1182, #1197"),
    CostCurve("M1 Max, 35B mixture of experts", {1: 1.0, 2: 1.27, 4: 1.91, 9: 3.41}, "penta2himajin/qwisp#90"),
    CostCurve("V100, Llama 7B, 16 bits", {1: 1.0, 2: 1.20, 3: 1.21}, "ggml-org/llama.cpp#3649"),
)


def acceptance_of(text: str) -> list[float]:
    """Acceptance by position from ``text`` such as ``0.57,0.27,0.11``.

    Raises ``DFlashError`` unless it is one or more numbers from 1 to 0, none above the one before.
    """
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(a >= b for a, b in zip([1.0, *shares], [*shares, 0.0], strict=True)):
        raise DFlashError(
            f"--acceptance takes the share of blocks that are right up to each position, such as 0.57,0.27,0.11 "
            f"(dflash eval prints them); got {text!r}."
        )
    return shares


def predicted(acceptance: Sequence[float], costs: Mapping[int, float]) -> dict[int, float]:
    """Speed-ups over plain decoding by the number of drafts ``k`` that every block verifies.

    A block commits a token of the target's own and its right drafts: ``(1 + sum(acceptance[:k])) / costs[k]``, where
    ``acceptance[i]`` is the share of blocks whose first ``i + 1`` drafts are right. ``k`` 0 is plain decoding.
    """
    known = (k for k in costs if k <= len(acceptance))
    return {k: (1 + sum(acceptance[:k])) / costs[k] for k in known}


def prediction_report(acceptance: Sequence[float], here: Mapping[int, float]) -> list[tuple[str, ...]]:
    """Rows of text: for this machine's block costs ``here`` and each published curve its name, the speed-ups by length
    (the keys of ``here`` up to the positions of ``acceptance``; the best with an asterisk), and its source."""
    lengths = [k for k in here if 0 < k <= len(acceptance)]
    rows = [("this machine", here, "measured above")]
    for curve in PUBLISHED:
        rows.append((curve.name, {k: cost for k in lengths if (cost := curve.block(k)) is not None}, curve.source))
    found = []
    for name, costs, source in rows:
        gains = predicted(acceptance, {0: 1.0, **costs})
        best = max(gains, key=lambda k: gains[k])
        cells = (f"{gains[k]:.2f}{'*' if k == best else ''}" if k in gains else "" for k in lengths)
        found.append((name, *cells, source))
    return found
