"""Held-out sequences in training: loss and accuracy without decoding, and the prompts whose answers are scored."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from dflash import DFlashDraftModel, LoadedTargetModel
from dflash.core.errors import TrainingError

from .batches import Batches
from .data.sequences import Sequences
from .drafters.loss import Batch, Head, Scores, score
from .drafters.objectives import ObjectiveSettings
from .features import with_target_pass
from .recipe import DataSettings

logger = logging.getLogger(__name__)


def heldout_batches(
    sequences: Sequences, data: DataSettings, target: LoadedTargetModel, layer_ids: Sequence[int], with_hidden: bool
) -> list[Callable[[], Batch]]:
    """The batches of held-out ``sequences``, in fixed order with fixed anchors; calling one runs the target on it.

    Cached features hold the training split alone, so they are not used. If no sequence can be scored, the reason is
    logged and there is no batch.
    """
    try:
        batches = Batches(sequences, data, epochs=1)
    except TrainingError as error:
        logger.warning("There will be no held-out loss: %s", error)
        return []
    if data.cached_features is not None:
        logger.info("The held-out loss runs the target: %s holds the training split only.", data.cached_features)
    read = with_target_pass(batches, target, layer_ids, with_hidden)
    return [partial(read, number) for number in range(len(batches))]


def heldout_scores(
    model: DFlashDraftModel,
    batches: Iterable[Callable[[], Batch]],
    objective: ObjectiveSettings,
    head: Head,
    dtype: mx.Dtype | None = None,
) -> Scores:
    """Loss and accuracy by position over ``batches``; no text is decoded. ``dtype`` is the precision of the loss."""
    return sum((score(model, batch(), objective, head, dtype=dtype) for batch in batches), Scores.none(model))


def heldout_prompts(sequences: Sequences, count: int, longest: int | None = None) -> list[list[int]]:
    """The token ids before the response in the first ``count`` sequences that have a request and a response.

    Requests of more than ``longest`` tokens are skipped. Raises ``TrainingError`` if none is left.
    """
    prompts: list[list[int]] = []
    for start, length in zip(sequences.starts, sequences.lengths, strict=True):
        # 0 if there is no response, or nothing before it
        if before := int(np.argmax(sequences.loss_mask[start : start + length])):
            prompts.append(sequences.tokens[start : start + before].tolist())
    if not prompts:
        raise TrainingError("The held-out part of the dataset has no prompt to evaluate on. Prepare more prompts.")
    short = [prompt for prompt in prompts if longest is None or len(prompt) <= longest]
    if not short:
        raise TrainingError(
            f"All {len(prompts)} held-out prompts have more than {longest} tokens, the room that run.evaluate_tokens "
            "leaves in the target's context. Lower run.evaluate_tokens."
        )
    return short[:count]
