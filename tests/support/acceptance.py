"""The acceptance of several prompts together."""

from sys import maxsize
from typing import Any

from dflash import DFlashSpeculativeDecoder
from dflash.drafters.protocol import Drafter
from dflash.evaluation.acceptance import Acceptance, measure_one, total
from dflash.target import LoadedTargetModel


def plain(found: Acceptance) -> list:
    """All counts, to be compared."""
    return [found.blocks, found.committed, found.verified.tolist(), found.accepted.tolist()]


def measure(
    target: LoadedTargetModel, drafter: Drafter, prompts: list[list[int]], count: int, **options: Any
) -> Acceptance:
    """Counts over answers of up to ``count`` tokens, by decoding."""
    decoder = DFlashSpeculativeDecoder(target, drafter, max_seq_length=maxsize)
    return total((measure_one(decoder, prompt, count, **options)[0] for prompt in prompts), decoder.block_size)
