"""The loss of a DSpark drafter and its gradients, dense and in float64, from the formulas alone.

The layers are those of :mod:`.dense_loss`; both heads are computed one prediction at a time, from left to right in a
block, with the true token before each.
"""

import math

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash.drafters.dspark import DSparkDraftModel
from dflash.training.drafters.objectives import ObjectiveSettings

from .dense_loss import Document, dense_hidden, log_softmax, logits_of


def sigmoid(x):
    return 1 / (1 + mx.exp(-x))


def markov_step(w, kind: str, h, e, s):
    """The latent vector that the second table reads, and the next state."""
    if kind == "vanilla":
        return e, s
    if kind == "gated":
        z = w["markov_head.gate_proj.weight"] @ mx.concatenate([h, e]) + w["markov_head.gate_proj.bias"]
        return sigmoid(z) * e, s
    z = w["markov_head.joint_proj.weight"] @ mx.concatenate([s, e, h]) + w["markov_head.joint_proj.bias"]
    gate, candidate, out = mx.split(z, 3)
    return mx.tanh(out), sigmoid(gate) * s + (1 - sigmoid(gate)) * mx.tanh(candidate)


def predictions(model: DSparkDraftModel, w, documents: list[Document]):
    """For each prediction that counts: position, true token, logits ``[V]``, confidence and the target's logits."""
    config, borrowed = model.config, model.target
    table, matrix = borrowed.table.astype(mx.float64), borrowed.matrix.astype(mx.float64)
    for d in documents:
        hidden = dense_hidden(w, config, table, d)
        of_target = mx.array(d.hidden, mx.float64) @ matrix.T
        for block, anchor in d.blocks():
            state = mx.zeros(config.markov_rank, mx.float64)
            for i in range(1, config.block_size + config.sample_from_anchor):
                if not d.wrote(anchor + i):
                    break
                h = hidden[block * config.block_size + i - config.sample_from_anchor]
                e = w["markov_head.markov_w1.weight"][d.tokens[anchor + i - 1]]
                latent, state = markov_step(w, config.markov_head_type, h, e, state)
                logits = logits_of(h[None], config, matrix)[0] + w["markov_head.markov_w2.weight"] @ latent
                read = mx.concatenate([h, e]) if config.confidence_head_with_markov else h
                confidence = sigmoid(w["confidence_head.proj.weight"][0] @ read + w["confidence_head.proj.bias"][0])
                yield i, d.tokens[anchor + i], logits, confidence, of_target[anchor + i - 1]


def dense_loss_and_gradients(model: DSparkDraftModel, documents: list[Document], objective: ObjectiveSettings):
    """``l1_weight * L1 + (1 - l1_weight) * CE``, and the confidence's cross-entropy with ``1 - L1 / 2``."""
    with mx.stream(mx.cpu):  # no other device has float64
        weights = {k: v.astype(mx.float64) for k, v in tree_flatten(model.trainable_parameters())}

        def loss(weights):
            total, counted = mx.array(0.0, mx.float64), 0.0
            for i, token, logits, confidence, of_target in predictions(model, weights, documents):
                drafted = log_softmax(logits)
                distance = mx.abs(mx.exp(log_softmax(of_target)) - mx.exp(drafted)).sum()
                miss = objective.l1_weight * distance - (1 - objective.l1_weight) * drafted[token]
                accepted = mx.stop_gradient(1 - distance / 2)
                surprise = -accepted * mx.log(confidence) - (1 - accepted) * mx.log(1 - confidence)
                weight = math.exp(-(i - 1) / objective.gamma)
                total = total + weight * (miss + objective.auxiliary_weight * surprise)
                counted += weight
            return total / counted

        value, gradients = mx.value_and_grad(loss)(weights)
        mx.eval(value, gradients)
    return value.item(), gradients
