"""The held-out split: a rule over digests of conversations, applied when a dataset is opened.

A digest depends on a conversation's opening alone. So a conversation is on the same side for every target, tokenizer
and file, conversations with the same opening stay together, and the rule can change without new responses.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from dflash.core.errors import DataError
from dflash.prompts.conversations import Conversation, message_bytes

from .sequences import Ints

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class HeldoutRule:
    """Hold out the lowest ``percent`` of all possible digests, and at least ``at_least`` conversations.

    Conversations with the next digests fill up to ``at_least``, but never all conversations: a single one is not held
    out. A ``percent`` of 0 holds out none.

    Raises ``DataError`` for values out of range.
    """

    percent: float = 1.0
    at_least: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.percent < 100:
            raise DataError(f"heldout_percent must be at least 0 and below 100, got {self.percent}.")
        if self.at_least < 0:
            raise DataError(f"heldout_at_least must be at least 0, got {self.at_least}.")


def opening_digest(conversation: Conversation) -> int:
    """64 bits of the SHA-256 of the messages before the first response."""
    return int.from_bytes(hashlib.sha256(message_bytes(conversation.opening)).digest()[:8], "big")


def is_heldout(digests: Ints, rule: HeldoutRule) -> Ints:
    """Which of the conversations with these ``digests [N]`` (uint64) are held out, a boolean ``[N]``."""
    if not rule.percent:
        return np.zeros(len(digests), bool)
    heldout = digests < np.uint64(rule.percent / 100 * 2**64)
    distinct = np.unique(digests)
    wanted = min(rule.at_least, len(distinct) - 1)
    if wanted > 0:
        heldout |= digests <= distinct[wanted - 1]
    return heldout
