"""The loss of a Domino drafter and its gradients, dense and in float64, from the formulas alone.

The layers are those of :mod:`.dense_loss`; the recurrence is computed one prediction at a time, from left to right in a
block, over the true tokens.
"""

import math

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash.drafters.domino import DominoDraftModel
from dflash.training.drafters.objectives import ObjectiveSettings

from .dense_dspark import sigmoid
from .dense_loss import Document, dense_hidden, log_softmax, logits_of


def predictions(model: DominoDraftModel, w, documents: list[Document]):
    """For each prediction that counts: position, true token, corrected and uncorrected logits ``[V]``."""
    config = model.config
    table, matrix = model.target.table.astype(mx.float64), model.target.matrix.astype(mx.float64)
    for d in documents:
        hidden = dense_hidden(w, config, table, d)
        for block, anchor in d.blocks():
            state = mx.zeros(config.gru_hidden_dim, mx.float64)
            for i in range(1, config.block_size + config.sample_from_anchor):
                if not d.wrote(anchor + i):
                    break
                x = w["prefix_gru.weight_ih_l0"] @ (table[d.tokens[anchor + i - 1]] * config.input_embedding_scale)
                s = w["prefix_gru.weight_hh_l0"] @ state
                x, s = x.reshape(3, -1), s.reshape(3, -1)
                update = sigmoid(x[1] + s[1])
                state = (1 - update) * mx.tanh(x[2] + sigmoid(x[0] + s[0]) * s[2]) + update * state
                h = hidden[block * config.block_size + i - config.sample_from_anchor]
                base = logits_of(h[None], config, matrix)[0]
                z = w["embed_proj.0.weight"] @ mx.concatenate([h, state])
                added = w["embed_proj.2.weight"] @ (z * sigmoid(z))
                yield i, d.tokens[anchor + i], base if i <= config.pure_draft_prefix_len else base + added, base


def dense_loss_and_gradients(
    model: DominoDraftModel, documents: list[Document], objective: ObjectiveSettings, base_weight: float = 0.0
):
    """``(1 - base_weight) * CE(corrected) + base_weight * CE(uncorrected)``."""
    with mx.stream(mx.cpu):  # no other device has float64
        weights = {k: v.astype(mx.float64) for k, v in tree_flatten(model.trainable_parameters())}

        def loss(weights):
            total, counted = mx.array(0.0, mx.float64), 0.0
            for i, token, corrected, base in predictions(model, weights, documents):
                weight = math.exp(-(i - 1) / objective.gamma)
                misses = -log_softmax(corrected)[token], -log_softmax(base)[token]
                total = total + weight * ((1 - base_weight) * misses[0] + base_weight * misses[1])
                counted += weight
            return total / counted

        value, gradients = mx.value_and_grad(loss)(weights)
        mx.eval(value, gradients)
    return value.item(), gradients
