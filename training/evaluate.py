"""How good a drafter is: acceptance by real decoding, over all and by position.

Knows decoding through the public decoder. Must not know training or where prompts come from.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from sys import maxsize
from typing import Any

import numpy as np

from dflash import DFlashSpeculativeDecoder, LoadedTargetModel
from dflash.drafters.protocol import Drafter
from dflash.errors import TrainingError

from .data.sequences import Ints, Sequences


@dataclass(frozen=True)
class Acceptance:
    """Counts over the blocks of a decoding; those of several parts add up.

    ``committed`` tokens came of ``blocks`` target passes. Of the blocks that verified a draft at position
    ``i + 1`` (``verified[i]``), ``accepted[i]`` accepted it and all before it. A position behind a stop
    token counts as not verified.
    """

    blocks: int
    committed: int
    verified: Ints
    accepted: Ints

    @property
    def length(self) -> float | None:
        """Acceptance length tau: tokens committed per target pass; ``None`` if no answer was long enough for one."""
        return self.committed / self.blocks if self.blocks else None

    @property
    def by_position(self) -> list[float]:
        """Share of blocks whose drafts up to position ``1, 2, ..`` were all accepted; 0 where none was verified."""
        return (self.accepted / np.maximum(self.verified, 1)).tolist()

    def results(self) -> dict[str, Any]:
        """Plain data for logs and JSON."""
        return {
            "acceptance_length": self.length,
            "acceptance_by_position": self.by_position,
            "blocks": self.blocks,
            "generated_tokens": self.committed,
        }


def measure(
    target: LoadedTargetModel,
    drafter: Drafter,
    prompts: Iterable[list[int]],
    max_tokens: int,
    temperature: float = 0.0,
) -> Acceptance:
    """Decode an answer of up to ``max_tokens`` tokens to each prompt and count what was accepted."""
    decoder = DFlashSpeculativeDecoder(target, drafter, block_size=drafter.block_size, max_seq_length=maxsize)
    blocks = committed = 0
    verified, accepted = (np.zeros(drafter.block_size - 1, dtype=np.int64) for _ in range(2))
    for prompt in prompts:
        for response in decoder.stream_generate(prompt, max_tokens, temperature):
            if response.accepted:
                blocks, committed = blocks + 1, committed + response.accepted
                in_text = len(response.tokens) if response.finish_reason == "stop" else len(response.drafted)
                drafted = np.array(response.drafted[:in_text], dtype=np.int64)
                right = np.cumprod(drafted == response.target_tokens[: len(drafted)])
                verified[: len(right)] += 1
                accepted[: len(right)] += right
    return Acceptance(blocks, committed, verified, accepted)


def heldout_prompts(sequences: Sequences, count: int, longest: int | None = None) -> list[list[int]]:
    """The token ids before the response in the first ``count`` sequences that have a request and a response.

    Requests of more than ``longest`` tokens are passed over. Raises
    :class:`~dflash.errors.TrainingError` if there is none.
    """
    prompts: list[list[int]] = []
    for start, length in zip(sequences.starts, sequences.lengths, strict=True):
        response = sequences.loss_mask[start : start + length]
        before = int(np.argmax(response))  # 0 if there is no response, or nothing before it
        if before and (longest is None or before <= longest):
            prompts.append(sequences.tokens[start : start + before].tolist())
        if len(prompts) == count:
            break
    if not prompts:
        raise TrainingError("The held-out part of the dataset has no prompt to evaluate on.")
    return prompts
