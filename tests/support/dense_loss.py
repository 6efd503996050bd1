"""The drafter's loss and its gradients as a dense float64 implementation, written from the design alone.

It takes each document of a pack by itself, without padding: one explicit mask over all context and block keys,
every product and norm spelled out, targets and weights found one position at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.models import HIDDEN, LAYERS, draft_config, randomize

from dflash import DFlashDraftModel
from dflash.training.drafters.loss import Batch, drafter_loss
from dflash.training.drafters.objectives import ObjectiveSettings

VOCAB, GAMMA = 29, 3.0
SLIDING, FULL = "sliding_attention", "full_attention"


class RandomTarget:
    """An embedding and a head: all that a drafter borrows."""

    hidden_size, num_layers, embedding_scale = HIDDEN, LAYERS, 1.0
    adapter = SimpleNamespace(config=None, projection=lambda ids: None)

    def __init__(self, seed: int, vocab: int = VOCAB):
        keys, self.vocab_size = mx.random.split(mx.random.key(seed)), vocab
        self.table = mx.random.normal((vocab, HIDDEN), key=keys[0])
        self.matrix = mx.random.normal((vocab, HIDDEN), key=keys[1]) * 2 * HIDDEN**-0.5

    def embed(self, tokens):
        return self.table[tokens]

    def head(self, hidden):
        return hidden @ self.matrix.T


@dataclass
class Document:
    """``spans`` are the half-open responses; features and final hidden states are random."""

    tokens: list[int]
    spans: Sequence[tuple[int, int]]
    anchors: list[int]
    features: np.ndarray
    hidden: np.ndarray

    def wrote(self, position: int) -> bool:
        return any(start <= position < stop for start, stop in self.spans)

    def blocks(self) -> list[tuple[int, int]]:
        """Number and anchor of the blocks that count: an anchor that stands there again only fills the row."""
        return [(n, a) for n, a in enumerate(self.anchors) if n == 0 or a != self.anchors[n - 1]]


def document(seed: int, length: int, spans: Sequence[tuple[int, int]], anchors: list[int]) -> Document:
    rng = np.random.default_rng(seed)
    features, hidden = rng.normal(size=(length, 3 * HIDDEN)), rng.normal(size=(length, HIDDEN))
    return Document(rng.integers(0, VOCAB, length).tolist(), spans, anchors, features, hidden)


def pack_of_three(seed: int = 0) -> list[Document]:
    """Different lengths; several turns; anchors at the first and the last position that has one, some to fill a row."""
    return [
        document(seed, 41, [(6, 15), (22, 41)], [6, 9, 13, 22, 30, 38, 39]),
        document(seed + 1, 23, [(1, 23)], [1, 2, 8, 8, 14, 20, 21]),
        document(seed + 2, 9, [(3, 8)], [3, 3, 4, 5, 5, 6, 6]),
    ]


def pad_documents(documents: list[Document]) -> Batch:
    """The documents as one batch; what stands in the padding is random."""
    rng, longest = np.random.default_rng(5), max(len(d.tokens) for d in documents)
    tokens = rng.integers(0, VOCAB, (len(documents), longest))
    loss_mask = np.zeros(tokens.shape, bool)
    features, hidden = rng.normal(size=(*tokens.shape, 3 * HIDDEN)) * 9, rng.normal(size=(*tokens.shape, HIDDEN)) * 9
    for n, d in enumerate(documents):
        length = len(d.tokens)
        tokens[n, :length], features[n, :length], hidden[n, :length] = d.tokens, d.features, d.hidden
        loss_mask[n, :length] = [d.wrote(position) for position in range(length)]
    anchors = mx.array([d.anchors for d in documents])
    read = mx.array(features, mx.float32), mx.array(hidden, mx.float32)
    return Batch(mx.array(tokens), mx.array(loss_mask), anchors, *read)


def drafter(seed: int = 0, **changes) -> DFlashDraftModel:
    model = randomize(DFlashDraftModel(draft_config(VOCAB, block_size=6, **changes)), seed)
    model.bind(RandomTarget(seed))  # type: ignore[arg-type]
    return model


def loss_and_gradients(model: DFlashDraftModel, documents: list[Document], objective: ObjectiveSettings):
    loss = partial(drafter_loss, objective=objective, head=model.target.head)
    value, gradients = nn.value_and_grad(model, loss)(model, pad_documents(documents))
    return value.item(), dict(tree_flatten(gradients))


# --- the dense implementation -----------------------------------------------------------------------------


def norm(x, weight, eps):
    return x / mx.sqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotated(x_HLD, positions, theta):
    half = x_HLD.shape[-1] // 2
    angles = np.outer(positions, theta ** (-np.arange(half) / half))
    cos, sin = mx.array(np.cos(angles), mx.float64), mx.array(np.sin(angles), mx.float64)
    first, second = x_HLD[..., :half], x_HLD[..., half:]
    return mx.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def visible_keys(config, layer: int, length: int, anchors: list[int]) -> np.ndarray:
    """``[A * B, S + A * B]``: which keys of the context and of all blocks are visible to each query."""
    size, sliding = config.block_size, config.layer_types[layer] == SLIDING
    causal = sliding if config.is_causal is None else config.is_causal
    visible = np.zeros((len(anchors) * size, length + len(anchors) * size), bool)
    for block, anchor in enumerate(anchors):
        for i in range(size):
            row, t = block * size + i, anchor + i
            for s in range(anchor):
                visible[row, s] = not sliding or s > t - config.sliding_window
            for j in range(size):
                visible[row, length + block * size + j] = not causal or j <= i
    return visible


def unmixed(p, part: str, side: int, u_LE, x_LE):
    """What a DFlash layer does before (side 0) and after (1) its attention or MLP, which read ``u_LE``: nothing."""
    return x_LE


def one_context(w, p, layer: int, config, d: Document):
    """What a layer sees of the features ``[S, E]``, and its projections to keys and values: those of a block."""
    context = norm(mx.array(d.features, mx.float64) @ w["fc.weight"].T, w["hidden_norm.weight"], config.rms_norm_eps)
    return context, p["self_attn.k_proj.weight"], p["self_attn.v_proj.weight"]


def dense_hidden(w, config, table, d: Document, mixed=unmixed, context_of=one_context):
    """Final hidden states ``[A * B, E]`` of all blocks of one document."""
    size, heads, kv_heads = config.block_size, config.num_attention_heads, config.num_key_value_heads
    length, eps, theta = len(d.tokens), config.rms_norm_eps, config.rope_theta
    at = np.array([a + i for a in d.anchors for i in range(size)])
    inputs = [t for a in d.anchors for t in [d.tokens[a]] + [config.mask_token_id] * (size - 1)]

    def split(x_LE, count):
        return x_LE.reshape(len(x_LE), count, -1).transpose(1, 0, 2)

    x = table[mx.array(inputs)] * config.input_embedding_scale
    for layer in range(config.num_hidden_layers):
        p = {k.removeprefix(f"layers.{layer}."): v for k, v in w.items() if k.startswith(f"layers.{layer}.")}
        u = norm(x, p["input_layernorm.weight"], eps)
        y = mixed(p, "attention", 0, u, u)
        context, k_proj, v_proj = context_of(w, p, layer, config, d)
        positions = np.concatenate([np.arange(length), at])
        q = norm(split(y @ p["self_attn.q_proj.weight"].T, heads), p["self_attn.q_norm.weight"], eps)
        k = mx.concatenate([context @ k_proj.T, y @ p["self_attn.k_proj.weight"].T])
        k = norm(split(k, kv_heads), p["self_attn.k_norm.weight"], eps)
        v = split(mx.concatenate([context @ v_proj.T, y @ p["self_attn.v_proj.weight"].T]), kv_heads)
        q, k = rotated(q, at, theta), rotated(k, positions, theta)
        k, v = (mx.repeat(z, heads // kv_heads, axis=0) for z in (k, v))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(config.head_dim)
        scores = mx.where(mx.array(visible_keys(config, layer, length, d.anchors)), scores, -1e300)
        out = mx.softmax(scores, axis=-1) @ v
        out = out.transpose(1, 0, 2).reshape(len(at), -1) @ p["self_attn.o_proj.weight"].T
        x = x + mixed(p, "attention", 1, u, out)
        u = norm(x, p["post_attention_layernorm.weight"], eps)
        y = mixed(p, "mlp", 0, u, u)
        gate = y @ p["mlp.gate_proj.weight"].T
        out = (gate / (1 + mx.exp(-gate)) * (y @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
        x = x + mixed(p, "mlp", 1, u, out)
    return norm(x, w["norm.weight"], eps)


def dense_logits(w, config, table, matrix, d: Document, context_of=one_context):
    """Logits ``[A, B, V]`` of all blocks of one document."""
    hidden = dense_hidden(w, config, table, d, context_of=context_of)
    return logits_of(hidden, config, matrix).reshape(len(d.anchors), config.block_size, -1)


def logits_of(hidden, config, matrix):
    logits, cap = hidden @ matrix.T * config.output_multiplier, config.final_logit_softcapping
    return logits if cap is None else cap * mx.tanh(logits / cap)


def log_softmax(x):
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def dense_loss_and_gradients(
    model: DFlashDraftModel, documents: list[Document], objective: ObjectiveSettings, context_of=one_context
):
    kl = {"cross_entropy": 0.0, "kl": 1.0, "mix": objective.kl_weight}[objective.kind]
    config, borrowed = model.config, model.target
    with mx.stream(mx.cpu):  # no other device has float64
        table, matrix = borrowed.table.astype(mx.float64), borrowed.matrix.astype(mx.float64)
        weights = {k: v.astype(mx.float64) for k, v in tree_flatten(model.trainable_parameters())}

        def loss(weights):
            total, counted = mx.array(0.0, mx.float64), 0.0
            for d in documents:
                drafted = log_softmax(dense_logits(weights, config, table, matrix, d, context_of))
                of_target = log_softmax(mx.array(d.hidden, mx.float64) @ matrix.T)
                for block, anchor in d.blocks():
                    for i in range(1, config.block_size):
                        if not d.wrote(anchor + i):
                            break
                        weight, wanted = math.exp(-(i - 1) / objective.gamma), of_target[anchor + i - 1]
                        divergence = (mx.exp(wanted) * (wanted - drafted[block, i])).sum()
                        miss = -drafted[block, i, d.tokens[anchor + i]]
                        total = total + weight * (kl * divergence + (1 - kl) * miss)
                        counted += weight
            return total / counted

        value, gradients = mx.value_and_grad(loss)(weights)
        mx.eval(value, gradients)
    return value.item(), gradients


def relative_difference(mine: mx.array, reference: mx.array) -> float:
    mine, reference = np.array(mine).astype(np.float64), np.array(reference).astype(np.float64)
    return float(np.linalg.norm(mine - reference) / np.linalg.norm(reference))


def assert_equal(mine, reference, tolerance=1e-5):
    assert mine[0] == pytest.approx(reference[0], rel=tolerance)
    assert mine[1].keys() == reference[1].keys()
    worst = max((relative_difference(mine[1][name], g), name) for name, g in reference[1].items())
    assert worst[0] < tolerance, worst


VARIANTS = {
    "grouped heads": {},
    "ungrouped heads": {"num_key_value_heads": 4, "head_dim": 8},
    "one head of keys": {"num_key_value_heads": 1, "head_dim": 16},
    "sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 7},
    "sliding and full": {"layer_types": (SLIDING, FULL), "sliding_window": 9},
    "window shorter than the block": {"layer_types": (FULL, SLIDING), "sliding_window": 3},
    "bidirectional sliding": {"is_causal": False, "layer_types": (SLIDING, SLIDING), "sliding_window": 7},
    "causal in the block": {"is_causal": True},
    "logit options": {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0},
}
OBJECTIVES = [ObjectiveSettings("cross_entropy", gamma=GAMMA), ObjectiveSettings("kl", gamma=GAMMA),
              ObjectiveSettings("mix", 0.3, GAMMA)]  # fmt: skip
