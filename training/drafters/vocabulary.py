"""The tokens of a drafter with a reduced vocabulary."""

import logging
from collections.abc import Collection

import numpy as np

from dflash.core.errors import TrainingError

from ..data.sequences import Ints, Sequences

logger = logging.getLogger(__name__)


def frequent_tokens(sequences: Sequences, count: int, vocab_size: int, always: Collection[int]) -> Ints:
    """The ``count`` ids that are most frequent in the responses of ``sequences``, in ascending order (int32).

    Ties go to the lowest id; the ids in ``always`` are included whatever their frequency. Raises ``TrainingError`` if
    ``always`` has more than ``count`` ids.
    """
    if len(always) > count:
        raise TrainingError(
            f"drafter.vocabulary {count} has no room for the target's {len(always)} stop tokens; raise it."
        )
    numbers = np.bincount(sequences.tokens[sequences.loss_mask], minlength=vocab_size)
    ranks = numbers.copy()
    ranks[list(always)] = len(sequences.tokens) + 1
    ids = np.sort(np.argsort(-ranks, kind="stable")[:count])
    share = numbers[ids].sum() / max(numbers.sum(), 1)
    logger.info("The drafter knows %d tokens: %.2f %% of those in the dataset's responses.", count, 100 * share)
    return ids.astype(np.int32)
