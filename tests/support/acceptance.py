"""The acceptance of several prompts together."""

from typing import Any

from dflash.drafters.protocol import Drafter
from dflash.evaluation.acceptance import Acceptance, measure_each, total
from dflash.target import LoadedTargetModel


def measure(
    target: LoadedTargetModel, drafter: Drafter, prompts: list[list[int]], count: int, **options: Any
) -> Acceptance:
    """Counts over answers of up to ``count`` tokens, by decoding."""
    return total(measure_each(target, drafter, prompts, count, **options), drafter.block_size)
