"""The plan of a dataset: its conversations, chosen before the target writes anything."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dflash import LoadedTargetModel
from dflash.core.errors import DataError
from dflash.core.progress import progress
from dflash.decoding.sampling import GREEDY
from dflash.options import DecodeOptions
from dflash.prompts.conversations import Conversation

from ...core.settings import Checked, setting
from .chat import Row, encode, encode_draft

SHORTEST_RESPONSE = 2
"""Tokens: an anchor and the one token after it."""


@dataclass(frozen=True)
class PrepareSettings(Checked):
    """Settings of a dataset. Lengths are in tokens.

    A response is cut at ``max_tokens`` or where its sequence reaches ``max_length``; longer given sequences are
    dropped. ``temp`` 0 is greedy; 0 turns ``top_p``, ``min_p`` and ``top_k`` off. A file holds ``shard_size``
    conversations. With ``regenerate`` the target rewrites given last responses; at ``temp`` 0 a response that is
    already its own costs one pass. Raises ``DFlashError`` for values out of range.
    """

    max_tokens: int = setting(2048, at_least=1)
    max_length: int = setting(3072, above=SHORTEST_RESPONSE)
    temp: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    batch_size: int = setting(32, at_least=1)
    shard_size: int = setting(512, at_least=1)
    regenerate: bool = False
    chat: bool = True
    chat_template_config: dict[str, Any] = field(default_factory=dict)
    min_p: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.decoding  # noqa: B018 - it checks its values

    @property
    def decoding(self) -> DecodeOptions:
        """How the target generates. Raises ``GenerationError`` for values out of range."""
        return DecodeOptions(
            self.max_tokens, temp=self.temp, top_p=self.top_p, min_p=self.min_p, top_k=self.top_k, seed=self.seed
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a dataset's description; ``min_p`` only where it is on, as in older datasets."""
        return {name: value for name, value in asdict(self).items() if name != "min_p" or value}


@dataclass(frozen=True)
class Plan:
    """The conversations to use, as messages and as tokens, and counts of the dropped ones by reason."""

    conversations: list[Conversation]
    rows: list[Row]
    dropped: dict[str, int]

    def shards(self, size: int) -> Iterator[tuple[int, list[Conversation], list[Row]]]:
        """Number and contents of each shard of ``size`` conversations."""
        for number, start in enumerate(range(0, len(self.rows), size)):
            part = slice(start, start + size)
            yield number, self.conversations[part], self.rows[part]

    def digest(self) -> str:
        """SHA-256 over the tokens and masks of all sequences."""
        total = hashlib.sha256()
        for row in self.rows:
            total.update(f"{len(row.tokens)} {row.loss_mask is None}".encode())
            total.update(row.tokens.tobytes())
            total.update(b"" if row.loss_mask is None else row.loss_mask.tobytes())
        return total.hexdigest()


def make_plan(conversations: Sequence[Conversation], target: LoadedTargetModel, settings: PrepareSettings) -> Plan:
    """Tokenize all conversations, without those that repeat a prompt or cannot be used.

    Raises ``DataError`` if none is left.
    """
    longest, how = longest_sequence(target, settings), (target, settings.chat, settings.chat_template_config)
    with_drafts = settings.regenerate and settings.decoding.build_sampler() is GREEDY
    plan = Plan([], [], {"duplicate": 0, "too_long": 0, "no_response": 0})
    prompts: set[bytes] = set()
    for conversation in progress(conversations, "tokenize"):
        row = encode(conversation.unanswered() if settings.regenerate else conversation, *how)
        if with_drafts and conversation.answered:
            row = replace(row, draft=encode_draft(conversation, *how, row.tokens))
        prompt = hashlib.sha256(row.prompt.tobytes()).digest()
        room = SHORTEST_RESPONSE if row.loss_mask is None else 0
        if prompt in prompts:
            plan.dropped["duplicate"] += 1
        elif len(row.tokens) + room > longest:
            plan.dropped["too_long"] += 1
        elif row.loss_mask is not None and row.loss_mask.sum() < SHORTEST_RESPONSE:
            plan.dropped["no_response"] += 1
        else:
            prompts.add(prompt)
            plan.conversations.append(conversation)
            plan.rows.append(row)
    if not plan.rows:
        reasons = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in plan.dropped.items() if number)
        raise DataError(
            f"None of the {len(conversations)} conversations can be used ({reasons}); max_length is {longest}."
        )
    return plan


def longest_sequence(target: LoadedTargetModel, settings: PrepareSettings) -> int:
    """The longest sequence allowed: the setting, or the target's context if that is shorter."""
    return min(settings.max_length, target.max_length or settings.max_length)
