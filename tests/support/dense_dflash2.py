"""The loss of a DFlash 2 drafter and its gradients, dense and in float64, from the formulas alone.

The layers are those of :mod:`.dense_loss`, with the convolutions between them row by row; candidates and their scores
are found one prediction at a time.
"""

import math

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from dflash.drafters.dflash2 import DFlash2DraftModel
from dflash.training.drafters.objectives import ObjectiveSettings

from .dense_loss import Document, dense_hidden, log_softmax, logits_of


def convolution(config):
    """The mixing of rows before and after each sublayer, as :func:`~support.dense_loss.dense_hidden` calls it."""
    size, group, taps = config.block_size, config.conv_group_size, config.conv_kernel_size

    def mixed(p, part, side, u_LE, x_LE):
        base = p[f"{part}_conv.base_kernel"][side]
        projected = u_LE @ p[f"{part}_conv.kernel_projection.weight"].T
        of_side = projected.reshape(len(u_LE), 2, taps, -1)[:, side]
        rows = []
        for row in range(len(x_LE)):
            inside = range(min(taps, row % size + 1))
            kernels = [base[t] + mx.repeat(of_side[row, t], group) for t in inside]
            rows.append(sum(kernels[t] * x_LE[row - t] for t in inside))
        return mx.stack(rows)

    return mixed


def predictions(model: DFlash2DraftModel, weights, documents: list[Document]):
    """For each prediction that counts: position, true token, unary logits ``[V]``, candidates and their scores."""
    config, borrowed = model.config, model.target
    table, matrix = borrowed.table.astype(mx.float64), borrowed.matrix.astype(mx.float64)
    a, b, p = (
        weights[f"candidate_selector.{name}"]
        for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    )
    for d in documents:
        hidden = dense_hidden(weights, config, table, d, convolution(config))
        logits = logits_of(hidden, config, matrix)
        for block, anchor in d.blocks():
            for i in range(1, config.block_size):
                if not d.wrote(anchor + i):
                    break
                row = block * config.block_size + i
                candidates = np.argsort(-np.array(mx.stop_gradient(logits[row])))[: config.selector_top_k].tolist()
                pairwise = a[d.tokens[anchor + i - 1]] * (p @ hidden[row])
                scores = mx.stack([logits[row, c] + (pairwise * b[c]).sum() for c in candidates])
                yield i, d.tokens[anchor + i], logits[row], candidates, scores


def dense_loss_and_gradients(model: DFlash2DraftModel, documents: list[Document], objective: ObjectiveSettings):
    """Cross-entropy on the unary logits and, where the true token is a candidate, on the scores."""
    with mx.stream(mx.cpu):  # no other device has float64
        weights = {k: v.astype(mx.float64) for k, v in tree_flatten(model.trainable_parameters())}

        def loss(weights):
            total, counted = mx.array(0.0, mx.float64), 0.0
            for i, token, logits, candidates, scores in predictions(model, weights, documents):
                miss, weight = -log_softmax(logits)[token], math.exp(-(i - 1) / objective.gamma)
                if token in candidates:
                    miss = miss - objective.auxiliary_weight * log_softmax(scores)[candidates.index(token)]
                total, counted = total + weight * miss, counted + weight
            return total / counted

        value, gradients = mx.value_and_grad(loss)(weights)
        mx.eval(value, gradients)
    return value.item(), gradients
