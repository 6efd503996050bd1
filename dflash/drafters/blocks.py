"""The drafter's layers over many blocks of each sequence in one pass.

Shapes: N sequences, S sequence length, A anchors a sequence, B positions of a block, E hidden size, F feature size.
"""

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from .block_attention import block_attention
from .dflash import DFlashDraftModel
from .layers import DraftLayer


def draft_hidden(
    model: DFlashDraftModel,
    features_NSF: mx.array,
    tokens_NS: mx.array,
    anchors_NA: mx.array,
    drafts: int,
    grad_checkpoint: bool = False,
) -> mx.array:
    """Final hidden states ``[N, A, B, E]`` of the blocks at ``anchors_NA`` with ``drafts`` drafts each.

    The drafter's own forward pass, with the blocks of all sequences in one batch. With ``grad_checkpoint`` the backward
    pass recomputes each layer instead of keeping its intermediate values.
    """
    config, (n, a) = model.config, anchors_NA.shape
    context = model.context(features_NSF)
    anchor_tokens = mx.take_along_axis(tokens_NS, anchors_NA, axis=1).reshape(-1)
    x_BLE = model.block_inputs(anchor_tokens, drafts)

    def forward(number: int, layer: DraftLayer, x_BLE: mx.array, context: mx.array) -> mx.array:
        context_keys, context_values = model.context_keys_values(number, context, 0)
        attend = partial(
            block_attention,
            context_keys=context_keys,
            context_values=context_values,
            anchors_NA=anchors_NA,
            window=config.window(number),
            causal=config.causal_in_block(number),
        )
        return layer(x_BLE, anchors_NA.reshape(-1), attend)

    for number, layer in enumerate(model.layers):
        run = partial(forward, number, layer)
        x_BLE = (nn.utils.checkpoint(layer, run) if grad_checkpoint else run)(x_BLE, context)
    return model.norm(x_BLE).reshape(n, a, *x_BLE.shape[1:])
