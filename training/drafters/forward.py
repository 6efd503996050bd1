"""Training a DFlash drafter: many blocks a sequence in one pass over the frozen target's features.

Knows the drafter model and how blocks, attention and loss fit together. Must not know any one target
architecture, or how a block is decoded.

Shapes: N sequences, S sequence length, A anchors a sequence, B block size, E hidden size, F feature size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash import DFlashDraftModel
from dflash.drafters.dflash import DraftLayer

from .attention import block_attention
from .loss import ObjectiveSettings, mean_in_chunks, prediction_losses
from .targets import block_targets, flat_positions, position_weights


@dataclass(frozen=True)
class TargetPass:
    """What the frozen target made of ``tokens [N, S]``: features ``[N, S, F]``, final hidden states ``[N, S, E]``.

    Only KL reads the final hidden states. Arrays are lazy, so an objective that does not, does not pay for them.
    """

    features_NSF: mx.array
    hidden_NSE: mx.array | None = None


ReadTarget = Callable[[mx.array], TargetPass]
"""One pass of the frozen target over ``tokens [N, S]``."""

BlockAttention = Callable[..., mx.array]
"""Takes and returns what :func:`~dflash.training.drafters.attention.block_attention` does."""


def draft_hidden(
    model: DFlashDraftModel,
    features_NSF: mx.array,
    tokens_NS: mx.array,
    anchors_NA: mx.array,
    attention: BlockAttention = block_attention,
    grad_checkpoint: bool = False,
) -> mx.array:
    """Final hidden states ``[N, A, B, E]`` of the blocks at ``anchors_NA``.

    The drafter's own forward, with the blocks of all sequences in one batch. With
    ``grad_checkpoint`` the backward pass computes each layer again instead of keeping what is inside it.
    """
    config, (n, a) = model.config, anchors_NA.shape
    context_NSE = model.context(features_NSF)
    anchor_tokens = mx.take_along_axis(tokens_NS, anchors_NA, axis=1).reshape(-1)
    x_BLE = model.block_inputs(anchor_tokens)

    def forward(number: int, layer: DraftLayer, x_BLE: mx.array, context_NSE: mx.array) -> mx.array:
        context_keys, context_values = layer.self_attn.keys_values(context_NSE, 0)
        attend = partial(
            attention,
            context_keys=context_keys,
            context_values=context_values,
            anchors_NA=anchors_NA,
            window=config.window(number),
            causal=config.causal_in_block(number),
        )
        return layer(x_BLE, anchors_NA.reshape(-1), attend)

    for number, layer in enumerate(model.layers):
        run = partial(forward, number, layer)
        x_BLE = (nn.utils.checkpoint(layer, run) if grad_checkpoint else run)(x_BLE, context_NSE)
    return model.norm(x_BLE).reshape(n, a, config.block_size, -1)


def drafter_loss(
    read: ReadTarget,
    objective: ObjectiveSettings,
    target_logits: Callable[[mx.array], mx.array] | None = None,
    attention: BlockAttention = block_attention,
    grad_checkpoint: bool = False,
) -> Callable[..., mx.array]:
    """``loss(model, tokens, response, anchors)`` for :func:`~dflash.training.loop.fit.fit`.

    KL needs ``target_logits``, the target's own head: logits ``[.., V]`` of its final hidden states
    ``[.., E]``. Position ``i`` of the block at ``a`` is compared with the target's distribution after token
    ``a + i - 1``. Predictions that do not count cost nothing. ``attention`` and ``grad_checkpoint`` are as in
    :func:`draft_hidden`. Raises ``ValueError`` for KL without the head.
    """
    share = objective.share_of_kl
    if share and target_logits is None:
        raise ValueError(f"The objective {objective.kind!r} needs the target's head; pass target_logits.")

    def loss(model: DFlashDraftModel, tokens_NS: mx.array, loss_mask_NS: mx.array, anchors_NA: mx.array) -> mx.array:
        size, target = model.config.block_size, read(tokens_NS)
        features_NSF = mx.stop_gradient(target.features_NSF)
        hidden = draft_hidden(model, features_NSF, tokens_NS, anchors_NA, attention, grad_checkpoint)[:, :, 1:]
        targets, inside = block_targets(tokens_NS, loss_mask_NS, anchors_NA, size)
        weights = inside * position_weights(size, objective.gamma)

        counted = mx.array(np.flatnonzero(np.array(inside)))
        hidden_TE = hidden.reshape(-1, hidden.shape[-1])[counted]
        others = [targets.reshape(-1)[counted]]
        if share:
            if target.hidden_NSE is None:
                raise ValueError(f"The objective {objective.kind!r} needs the target's final hidden states.")
            before_T = flat_positions(anchors_NA, tokens_NS.shape[1], size).reshape(-1)[counted] - 1
            others.append(mx.stop_gradient(target.hidden_NSE.flatten(0, 1)[before_T]))

        def losses(hidden_CE: mx.array, tokens_C: mx.array, before_CE: mx.array | None = None) -> mx.array:
            wanted = target_logits(before_CE) if target_logits and before_CE is not None else None
            return prediction_losses(model.head(hidden_CE), tokens_C, wanted, share)

        return mean_in_chunks(losses, hidden_TE, others, weights.reshape(-1)[counted], objective.chunk)

    return loss
