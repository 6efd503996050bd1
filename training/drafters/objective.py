"""From a recipe's objective to the loss of a batch that the target has read already.

Knows how :func:`~dflash.training.drafters.forward.drafter_loss` is called. Must
not know recipes or how a target is read.
"""

from collections.abc import Callable

import mlx.core as mx
from mlx.utils import tree_map

from dflash import DFlashDraftModel

from .forward import TargetPass, drafter_loss
from .loss import ObjectiveSettings


def batch_loss(
    objective: ObjectiveSettings,
    target_logits: Callable[[mx.array], mx.array],
    dtype: mx.Dtype,
    grad_checkpoint: bool = False,
) -> Callable[..., mx.array]:
    """``loss(model, tokens, response, anchors, features[, hidden])``, computed in ``dtype``; weights keep their own.

    ``hidden``, the target's final hidden states, is needed for objectives with KL in them. ``grad_checkpoint``
    is as in :func:`~dflash.training.drafters.forward.draft_hidden`.
    """

    def loss(
        model: DFlashDraftModel,
        tokens: mx.array,
        response: mx.array,
        anchors: mx.array,
        features: mx.array,
        hidden: mx.array | None = None,
    ) -> mx.array:
        model.update(tree_map(lambda weight: weight.astype(dtype), model.trainable_parameters()))
        read = TargetPass(features.astype(dtype), hidden)
        one = drafter_loss(lambda _: read, objective, target_logits, grad_checkpoint=grad_checkpoint)
        return one(model, tokens, response, anchors)

    return loss
