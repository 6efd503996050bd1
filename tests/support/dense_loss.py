"""The loss of a drafter of any kind and its gradients in float64, on the formulas of :mod:`.reference` alone.

It takes each block of each document by itself, without padding; targets and weights are found one position at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.models import HIDDEN, LAYERS, draft_config, randomize

from dflash import DFlashDraftModel
from dflash.core.files import flat
from dflash.drafters.kinds import kind_of
from dflash.training.drafters.loss import Batch, drafter_loss
from dflash.training.drafters.objectives import ObjectiveSettings

from .reference import Block
from .reference_kinds import DENSE

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
    loss = partial(drafter_loss, objective=objective, head=model.target_head)
    value, gradients = nn.value_and_grad(model, loss)(model, pad_documents(documents))
    return value.item(), dict(tree_flatten(gradients))


# --- the dense implementation -----------------------------------------------------------------------------


class Borrowed:
    """The embedding and head of a :class:`RandomTarget` in float64."""

    def __init__(self, target: RandomTarget):
        self.table, self.matrix = (x.astype(mx.float64) for x in (target.table, target.matrix))

    def embed(self, tokens):
        return self.table[mx.array(tokens)]

    def head(self, hidden):
        return hidden @ self.matrix.T


def log_softmax(x):
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def predictions(model: DFlashDraftModel, documents: list[Document], weights=None):
    """For each prediction that counts: its number in the block, its token, the target's logits, the taught block."""
    if weights is None:
        weights = {name: w.astype(mx.float64) for name, w in flat(model.trainable_parameters()).items()}
    drafts, target = model.block_size - 1, Borrowed(model.target)
    dense = DENSE[kind_of(model)](weights, asdict(model.config), target)
    for d in documents:
        of_target = target.head(mx.array(d.hidden, mx.float64))
        hidden_ALE = dense.hidden(d.features, d.anchors, [d.tokens[anchor] for anchor in d.anchors])
        for number, anchor in d.blocks():
            following = [*d.tokens[anchor + 1 :], *[0] * drafts][:drafts]
            block = dense.walk(hidden_ALE[number], d.tokens[anchor], following)
            for i in range(drafts):
                if not d.wrote(anchor + 1 + i):
                    break
                yield i, following[i], of_target[anchor + i], block


def miss(objective: ObjectiveSettings, i: int, token: int, of_target, block: Block, base_weight: float):
    """The loss of one prediction with what its kind adds."""
    q, base, p = (log_softmax(x) for x in (block.logits[i], block.base[i], of_target))
    if block.candidates:
        found = block.candidates[i].index(token) if token in block.candidates[i] else None
        chosen = 0.0 if found is None else log_softmax(block.scores[i])[found]
        return -base[token] - objective.auxiliary_weight * chosen
    if objective.kind == "l1":
        distance = mx.abs(mx.exp(p) - mx.exp(q)).sum()
        c, accepted = block.confidence[i], mx.stop_gradient(1 - distance / 2)
        surprise = -accepted * mx.log(c) - (1 - accepted) * mx.log(1 - c)
        own = objective.l1_weight * distance - (1 - objective.l1_weight) * q[token]
        return own + objective.auxiliary_weight * surprise
    kl = {"cross_entropy": 0.0, "kl": 1.0, "mix": objective.kl_weight}[objective.kind]
    divergence = (mx.exp(p) * (p - q)).sum()
    return kl * divergence - (1 - kl) * ((1 - base_weight) * q[token] + base_weight * base[token])


def dense_loss_and_gradients(
    model: DFlashDraftModel, documents: list[Document], objective: ObjectiveSettings, base_weight: float = 0.0
):
    """The weighted mean over predictions; ``base_weight`` of a cross-entropy is that of the uncorrected logits."""
    with mx.stream(mx.cpu):  # no other device has float64

        def loss(weights):
            total, counted = mx.array(0.0, mx.float64), 0.0
            for i, *prediction in predictions(model, documents, weights):
                weight = math.exp(-i / objective.gamma)
                total = total + weight * miss(objective, i, *prediction, base_weight)
                counted += weight
            return total / counted

        weights = {name: w.astype(mx.float64) for name, w in flat(model.trainable_parameters()).items()}
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
    "window of the first row alone": {"layer_types": (FULL, SLIDING), "sliding_window": 2},
    "bidirectional sliding": {"is_causal": False, "layer_types": (SLIDING, SLIDING), "sliding_window": 7},
    "causal in the block": {"is_causal": True},
    "logit options": {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0},
}
OBJECTIVES = [ObjectiveSettings("cross_entropy", gamma=GAMMA), ObjectiveSettings("kl", gamma=GAMMA),
              ObjectiveSettings("mix", 0.3, GAMMA)]  # fmt: skip
