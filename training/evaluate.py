"""How good a drafter is: acceptance by real decoding; loss and accuracy on heldout sequences without decoding.

Knows decoding through the public decoder, and the loss of a batch. Must not know the training loop or recipes' files.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import takewhile
from sys import maxsize
from typing import Any

import mlx.core as mx
import numpy as np

from dflash import DFlashDraftModel, DFlashSpeculativeDecoder, LoadedTargetModel
from dflash.core.errors import TrainingError
from dflash.drafters.protocol import Drafter

from .batches import Batches
from .data.sequences import Ints, Sequences
from .drafters.loss import Batch, Head, Scores, score
from .drafters.objectives import ObjectiveSettings
from .features import with_target_pass
from .recipe import DataSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Acceptance:
    """Counts over the blocks of a decoding; those of several parts add up.

    ``committed`` tokens came of ``blocks`` target passes. Of the blocks that verified a draft at position
    ``i + 1`` (``verified[i]``), ``accepted[i]`` accepted it and all before it. A position after a stop
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
    **options: Any,
) -> Acceptance:
    """Decode an answer of up to ``max_tokens`` tokens to each prompt and count what was accepted.

    ``options`` go to :meth:`~dflash.DFlashSpeculativeDecoder.stream_generate`.
    """
    return total(measure_each(target, drafter, prompts, max_tokens, temperature, **options), drafter.block_size)


def measure_each(
    target: LoadedTargetModel,
    drafter: Drafter,
    prompts: Iterable[list[int]],
    max_tokens: int,
    temperature: float = 0.0,
    **options: Any,
) -> Iterator[Acceptance]:
    """As :func:`measure`, but the counts of one prompt at a time.

    Every draft is verified unless ``options`` has another policy: acceptance is a property of the drafter, not of the
    machine.
    """
    options = {"policy": "full"} | options
    decoder = DFlashSpeculativeDecoder(target, drafter, block_size=drafter.block_size, max_seq_length=maxsize)
    for prompt in prompts:
        blocks = committed = 0
        verified, accepted = (np.zeros(drafter.block_size - 1, dtype=np.int64) for _ in range(2))
        for i, response in enumerate(decoder.stream_generate(prompt, max_tokens, temperature, **options)):
            if i == 0:  # the prompt's own pass, which is no block
                continue
            blocks, committed = blocks + 1, committed + len(response.tokens)
            in_text = len(response.tokens) if response.finish_reason == "stop" else len(response.drafted)
            verified[: min(in_text, len(response.drafted))] += 1
            pairs = zip(response.drafted[: response.accepted], response.tokens, strict=False)
            accepted[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))] += 1
        yield Acceptance(blocks, committed, verified, accepted)


def total(parts: Iterable[Acceptance], block_size: int) -> Acceptance:
    """Counts over all ``parts``, which have ``block_size - 1`` positions each."""
    none = np.zeros(block_size - 1, dtype=np.int64)
    return reduce(
        lambda a, b: Acceptance(
            a.blocks + b.blocks, a.committed + b.committed, a.verified + b.verified, a.accepted + b.accepted
        ),
        parts,
        Acceptance(0, 0, none, none),
    )


def heldout_batches(
    sequences: Sequences, data: DataSettings, target: LoadedTargetModel, layer_ids: Sequence[int], with_hidden: bool
) -> list[Callable[[], Batch]]:
    """The batches of heldout ``sequences``, in fixed order with fixed anchors; the target reads each when it is called.

    A cache of features holds the training split alone, so it is of no use here. There is no batch, with a logged
    reason, where no sequence can be scored.
    """
    try:
        batches = Batches(sequences, data, epochs=1)
    except TrainingError as error:
        logger.warning("There will be no heldout loss: %s", error)
        return []
    if data.cached_features is not None:
        logger.info("The heldout loss runs the target: %s holds the training split only.", data.cached_features)
    read = with_target_pass(batches, target, layer_ids, with_hidden)
    return [partial(read, number) for number in range(len(batches))]


def heldout_scores(
    model: DFlashDraftModel,
    batches: Iterable[Callable[[], Batch]],
    objective: ObjectiveSettings,
    head: Head,
    dtype: mx.Dtype | None = None,
) -> Scores:
    """Loss and accuracy by position over ``batches``; no text is decoded. ``dtype`` is what the loss is computed in."""
    return sum((score(model, batch(), objective, head, dtype=dtype) for batch in batches), Scores.none(model))


def heldout_prompts(sequences: Sequences, count: int, longest: int | None = None) -> list[list[int]]:
    """The token ids before the response in the first ``count`` sequences that have a request and a response.

    Requests of more than ``longest`` tokens are passed over. Raises ``TrainingError`` if none is
    left.
    """
    prompts: list[list[int]] = []
    too_long = 0
    for start, length in zip(sequences.starts, sequences.lengths, strict=True):
        # 0 if there is no response, or nothing before it
        before = int(np.argmax(sequences.loss_mask[start : start + length]))
        too_long += bool(before) and longest is not None and before > longest
        if before and (longest is None or before <= longest):
            prompts.append(sequences.tokens[start : start + before].tolist())
        if len(prompts) == count:
            break
    if not prompts and too_long:
        raise TrainingError(
            f"All {too_long} heldout prompts have more than {longest} tokens, the room that run.evaluate_tokens leaves "
            "in the target's context. Lower run.evaluate_tokens."
        )
    if not prompts:
        raise TrainingError("The heldout part of the dataset has no prompt to evaluate on. Prepare more prompts.")
    return prompts
