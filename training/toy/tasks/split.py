"""The held-out split: by combination of operations, never by numbers or wording."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import combinations
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_PERCENT = 9  # enough pairs to measure on, and 5 in 9 four-operation pipelines stay in training


def is_heldout_pair(first: str, second: str) -> bool:
    """Whether no training sample may hold both operations; the same on every machine and run."""
    text = "|".join(sorted((first, second)))
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELDOUT_PERCENT


def split_of(operations: Sequence[str]) -> Split:
    """`heldout` when any pair of the operations is held out, else `train`."""
    return "heldout" if any(is_heldout_pair(a, b) for a, b in combinations(operations, 2)) else "train"
