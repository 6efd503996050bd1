"""The drafter's loss and its gradients against a dense float64 implementation, written from the design alone.

The dense one takes each document of a pack by itself, without padding: one explicit mask over all context and
block keys, every product and norm spelled out, targets and weights found one position at a time.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from support.models import HIDDEN, LAYERS, draft_config, randomize, target

from dflash import DFlashDraftModel
from dflash.training.batches import Batches
from dflash.training.bench import DenseAttention, Shape, build, in_turns, step
from dflash.training.data.sequences import Sequences
from dflash.training.drafters import attention
from dflash.training.drafters.forward import TargetPass, drafter_loss
from dflash.training.drafters.loss import ObjectiveSettings, forward_kl, prediction_losses
from dflash.training.loop.fit import FitSettings, fit
from dflash.training.loop.optimizer import MuonSettings
from dflash.training.recipe import DataSettings
from dflash.training.settings import SettingsError, from_dict

VOCAB, GAMMA = 29, 3.0
SLIDING, FULL = "sliding_attention", "full_attention"


class RandomTarget:
    """An embedding and a head: all that a drafter borrows."""

    hidden_size, num_layers = HIDDEN, LAYERS

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

    def wrote(self, place: int) -> bool:
        return any(start <= place < stop for start, stop in self.spans)

    def blocks(self) -> list[tuple[int, int]]:
        """Number and anchor of the blocks that count: an anchor that stands there again only fills the row."""
        return [(n, a) for n, a in enumerate(self.anchors) if n == 0 or a != self.anchors[n - 1]]


def document(seed: int, length: int, spans: Sequence[tuple[int, int]], anchors: list[int]) -> Document:
    rng = np.random.default_rng(seed)
    features, hidden = rng.normal(size=(length, 3 * HIDDEN)), rng.normal(size=(length, HIDDEN))
    return Document(rng.integers(0, VOCAB, length).tolist(), spans, anchors, features, hidden)


def pack_of_three(seed: int = 0) -> list[Document]:
    """Different lengths; several turns; anchors at the first and the last place that has one, some to fill a row."""
    return [
        document(seed, 41, [(6, 15), (22, 41)], [6, 9, 13, 22, 30, 38, 39]),
        document(seed + 1, 23, [(1, 23)], [1, 2, 8, 8, 14, 20, 21]),
        document(seed + 2, 9, [(3, 8)], [3, 3, 4, 5, 5, 6, 6]),
    ]


def padded(documents: list[Document]):
    """The arrays of a pack, and a reading of the target; what stands in the padding is random."""
    rng, longest = np.random.default_rng(5), max(len(d.tokens) for d in documents)
    tokens = rng.integers(0, VOCAB, (len(documents), longest))
    response = np.zeros(tokens.shape, bool)
    features, hidden = rng.normal(size=(*tokens.shape, 3 * HIDDEN)) * 9, rng.normal(size=(*tokens.shape, HIDDEN)) * 9
    for n, d in enumerate(documents):
        length = len(d.tokens)
        tokens[n, :length], features[n, :length], hidden[n, :length] = d.tokens, d.features, d.hidden
        response[n, :length] = [d.wrote(place) for place in range(length)]
    read = TargetPass(mx.array(features, mx.float32), mx.array(hidden, mx.float32))
    anchors = mx.array([d.anchors for d in documents])
    return (mx.array(tokens), mx.array(response), anchors), lambda _: read


def drafter(seed: int = 0, **changes) -> DFlashDraftModel:
    model = randomize(DFlashDraftModel(draft_config(VOCAB, block_size=6, **changes)), seed)
    model.bind(RandomTarget(seed))  # type: ignore[arg-type]
    return model


def loss_and_gradients(model: DFlashDraftModel, documents: list[Document], objective: ObjectiveSettings):
    arrays, read = padded(documents)
    loss = drafter_loss(read, objective, model._target.head)
    value, gradients = nn.value_and_grad(model, loss)(model, *arrays)
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


def seen_keys(config, layer: int, length: int, anchors: list[int]) -> np.ndarray:
    """``[A * B, S + A * B]``: which keys of the context and of all blocks each query sees."""
    size, sliding = config.block_size, config.layer_types[layer] == SLIDING
    causal = sliding if config.is_causal is None else config.is_causal
    seen = np.zeros((len(anchors) * size, length + len(anchors) * size), bool)
    for block, anchor in enumerate(anchors):
        for i in range(size):
            row, t = block * size + i, anchor + i
            for s in range(anchor):
                seen[row, s] = not sliding or s > t - config.sliding_window
            for j in range(size):
                seen[row, length + block * size + j] = not causal or j <= i
    return seen


def dense_logits(w, config, table, matrix, d: Document):
    """Logits ``[A, B, V]`` of all blocks of one document."""
    size, heads, kv_heads = config.block_size, config.num_attention_heads, config.num_key_value_heads
    length, eps, theta = len(d.tokens), config.rms_norm_eps, config.rope_theta
    at = np.array([a + i for a in d.anchors for i in range(size)])
    inputs = [t for a in d.anchors for t in [d.tokens[a]] + [config.mask_token_id] * (size - 1)]

    def split(x_LE, count):
        return x_LE.reshape(len(x_LE), count, -1).transpose(1, 0, 2)

    context = norm(mx.array(d.features, mx.float64) @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = table[mx.array(inputs)] * config.input_embedding_scale
    for layer in range(config.num_hidden_layers):
        p = {k.removeprefix(f"layers.{layer}."): v for k, v in w.items() if k.startswith(f"layers.{layer}.")}
        y = norm(x, p["input_layernorm.weight"], eps)
        both, places = mx.concatenate([context, y]), np.concatenate([np.arange(length), at])
        q = norm(split(y @ p["self_attn.q_proj.weight"].T, heads), p["self_attn.q_norm.weight"], eps)
        k = norm(split(both @ p["self_attn.k_proj.weight"].T, kv_heads), p["self_attn.k_norm.weight"], eps)
        v = split(both @ p["self_attn.v_proj.weight"].T, kv_heads)
        q, k = rotated(q, at, theta), rotated(k, places, theta)
        k, v = (mx.repeat(z, heads // kv_heads, axis=0) for z in (k, v))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(config.head_dim)
        scores = mx.where(mx.array(seen_keys(config, layer, length, d.anchors)), scores, -1e300)
        out = mx.softmax(scores, axis=-1) @ v
        x = x + out.transpose(1, 0, 2).reshape(len(at), -1) @ p["self_attn.o_proj.weight"].T
        y = norm(x, p["post_attention_layernorm.weight"], eps)
        gate = y @ p["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + mx.exp(-gate)) * (y @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
    logits = norm(x, w["norm.weight"], eps) @ matrix.T * config.output_multiplier
    cap = config.final_logit_softcapping
    logits = logits if cap is None else cap * mx.tanh(logits / cap)
    return logits.reshape(len(d.anchors), size, -1)


def log_softmax(x):
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def dense_loss_and_gradients(model: DFlashDraftModel, documents: list[Document], objective: ObjectiveSettings):
    kl = {"cross_entropy": 0.0, "kl": 1.0, "mix": objective.kl_share}[objective.kind]
    config, borrowed = model.config, model._target
    with mx.stream(mx.cpu):  # no other device has float64
        table, matrix = borrowed.table.astype(mx.float64), borrowed.matrix.astype(mx.float64)
        weights = {k: v.astype(mx.float64) for k, v in tree_flatten(model.trainable_parameters())}

        def loss(weights):
            total, counted = mx.array(0.0, mx.float64), 0.0
            for d in documents:
                drafted = log_softmax(dense_logits(weights, config, table, matrix, d))
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


# --- equality ---------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.kind)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_equal_a_dense_float64_implementation(variant, objective, monkeypatch):
    monkeypatch.setattr(attention, "_ANCHORS_AT_ONCE", 3)  # pieces of 3, 3 and 1 anchors
    model = drafter(1, **VARIANTS[variant])
    documents = pack_of_three()
    assert_equal(loss_and_gradients(model, documents, objective), dense_loss_and_gradients(model, documents, objective))


def test_variants_and_objectives_differ_so_that_the_comparison_can_tell_them_apart():
    objective = OBJECTIVES[0]
    documents, names = pack_of_three(), ("grouped heads", "sliding", "bidirectional sliding", "causal in the block")
    values = [loss_and_gradients(drafter(1, **VARIANTS[name]), documents, objective)[0] for name in names]
    values += [loss_and_gradients(drafter(1), documents, other)[0] for other in OBJECTIVES[1:]]
    assert np.diff(np.sort(values)).min() > 1e-3 * max(values)


def test_a_full_piece_of_anchors_and_a_rest_equal_the_dense_implementation():
    """The piece size as it is, with unsorted anchors that several sequences share pieces for."""
    rng = np.random.default_rng(3)
    documents = [
        document(n, length, [(2, length)], rng.integers(2, length - 1, attention._ANCHORS_AT_ONCE + 3).tolist())
        for n, length in enumerate((30, 21))
    ]
    model = drafter(2, layer_types=(FULL, SLIDING), sliding_window=8)
    assert_equal(
        loss_and_gradients(model, documents, OBJECTIVES[2]), dense_loss_and_gradients(model, documents, OBJECTIVES[2])
    )


def random_attention(dtype=mx.float32):
    """Queries, keys and values of 2 sequences' 3 blocks of 4, of their contexts of 13, and unsorted anchors."""
    shapes = [(6, 4, 4, 8), (6, 2, 4, 8), (6, 2, 4, 8), (2, 2, 13, 8), (2, 2, 13, 8)]
    arrays = [mx.random.normal(s, key=mx.random.key(i)).astype(dtype) for i, s in enumerate(shapes)]
    return arrays, mx.array([[2, 7, 7], [1, 12, 5]])


def attention_and_gradients(scheme, arrays, anchors, *kind):
    weight = mx.random.normal(arrays[0].shape, key=mx.random.key(9))
    out = scheme(*arrays, anchors, *kind)
    return out, *mx.grad(lambda *x: (scheme(*x, anchors, *kind) * weight).sum(), argnums=range(5))(*arrays)


@pytest.mark.parametrize(("window", "causal"), [(None, False), (None, True), (5, False), (5, True), (1, True)])
def test_the_dense_mask_of_the_benchmark_is_the_same_attention(window, causal, monkeypatch):
    monkeypatch.setattr(attention, "_ANCHORS_AT_ONCE", 2)
    both = [
        attention_and_gradients(scheme, *random_attention(), window, causal)
        for scheme in (attention.block_attention, DenseAttention())
    ]
    for mine, dense in zip(*both, strict=True):
        assert mx.abs(mine - dense).max() < 1e-5


def test_attention_in_half_precision_keeps_its_type_and_sums_in_float32():
    arrays, anchors = random_attention(mx.bfloat16)
    mine = attention_and_gradients(attention.block_attention, arrays, anchors)
    exact = attention_and_gradients(attention.block_attention, [x.astype(mx.float32) for x in arrays], anchors)
    for half, full in zip(mine, exact, strict=True):
        assert half.dtype == mx.bfloat16
        assert relative_difference(half.astype(mx.float32), full) < 0.01


def test_the_benchmark_takes_the_same_step_on_both_sides():
    tiny = Shape(hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=48, vocab_size=50)
    ((ours, dense),) = in_turns(step(build(tiny), context=60, anchors=20, chunk=64), repeats=1)
    assert ours.loss == pytest.approx(dense.loss, rel=1e-5)
    assert ours.peak < dense.peak
    assert min(ours.seconds, dense.seconds) > 0


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.kind)
def test_the_chunk_size_changes_nothing(objective):
    model, documents = drafter(4), pack_of_three()
    whole = loss_and_gradients(model, documents, replace(objective, chunk=10_000))
    for chunk in (1, 7, 64):
        assert_equal(loss_and_gradients(model, documents, replace(objective, chunk=chunk)), whole, 3e-6)


def test_gradient_checkpointing_changes_nothing_but_memory():
    documents = [document(0, 200, [(1, 200)], list(range(10, 160)))]
    model, (arrays, read), results = drafter(4, num_hidden_layers=12), padded(documents), []
    for grad_checkpoint in (False, True):
        step = nn.value_and_grad(model, drafter_loss(read, OBJECTIVES[0], grad_checkpoint=grad_checkpoint))
        mx.clear_cache()
        mx.reset_peak_memory()
        value, gradients = step(model, *arrays)
        mx.eval(value, gradients)
        results.append((value.item(), dict(tree_flatten(gradients)), mx.get_peak_memory()))
    (*plain, most), (*again, less) = results
    assert_equal(again, plain, 3e-6)
    assert less < 0.7 * most


@given(st.integers(0, 99), st.sampled_from(["grouped heads", "sliding and full"]), st.sampled_from(OBJECTIVES))
@settings(max_examples=10)
def test_no_document_of_a_pack_changes_the_loss_or_gradients_of_another(seed, variant, objective):
    """The second document counts for nothing itself, since the target wrote nothing of it."""
    model, first = drafter(1, **VARIANTS[variant]), pack_of_three()[0]
    others = [document(100 + seed + i, 33, [], [2, 5, 9, 13, 22, 30, 31]) for i in range(2)]
    (value, gradients), (other_value, other_gradients) = (
        loss_and_gradients(model, [first, other], objective) for other in others
    )
    assert value == other_value
    assert all(mx.array_equal(gradients[name], other_gradients[name]) for name in gradients)
    assert_equal((value, gradients), loss_and_gradients(model, [first], objective), 3e-6)


@given(st.integers(0, 99))
@settings(max_examples=10)
def test_a_block_sees_nothing_at_its_anchor_or_behind_it(seed):
    model, d = drafter(1), pack_of_three(seed)[0]
    d.anchors = d.anchors[:4]  # the last at 22
    other = document(seed + 50, len(d.tokens), d.spans, d.anchors)
    changed = replace(d, features=np.concatenate([d.features[:22], other.features[22:]]))
    value, gradients = loss_and_gradients(model, [d], OBJECTIVES[0])
    other_value, other_gradients = loss_and_gradients(model, [changed], OBJECTIVES[0])
    assert value == other_value
    assert all(mx.array_equal(gradients[name], other_gradients[name]) for name in gradients)


def reader(real, layer_ids):
    """Passes of a real target, inside the loss."""

    def read(tokens):
        hidden, features = real.forward_hidden(tokens, None, layer_ids)
        return TargetPass(features, hidden)

    return read


def test_kl_compares_each_position_with_what_the_target_says_after_the_token_before_it():
    """With a real target: its own logits, one document at a time, against one reading of the padded pack."""
    real = target("qwen3", 2, VOCAB)
    model = randomize(DFlashDraftModel(draft_config(VOCAB, block_size=6)), 1)
    model.bind(real)
    documents, wanted = pack_of_three(), []
    arrays, _ = padded(documents)
    read = reader(real, model.target_layer_ids)
    loss = drafter_loss(read, ObjectiveSettings("kl", gamma=GAMMA), real.head)(model, *arrays)
    total, counted = 0.0, 0.0
    for d in documents:
        wanted, features = real.forward_with_hidden_states(mx.array([d.tokens]), None, model.target_layer_ids)
        for _, anchor in d.blocks():
            cache = model.make_cache()
            model.extend_context(features[:, :anchor], cache, mx.array([d.tokens[:anchor]]))
            drafted = model.propose(mx.array([[d.tokens[anchor]]]), 5, cache).logits
            for i in range(1, 6):
                if not d.wrote(anchor + i):
                    break
                weight = math.exp(-(i - 1) / GAMMA)
                p, q = (log_softmax(x) for x in (wanted[0, anchor + i - 1], drafted[0, i - 1]))
                total, counted = total + weight * (mx.exp(p) * (p - q)).sum().item(), counted + weight
    assert loss.item() == pytest.approx(total / counted, rel=1e-4)


@pytest.mark.parametrize("kind", ["cross_entropy", "kl"])
def test_a_drafter_learns_a_text_that_repeats_itself(kind, tmp_path):
    """Through the training loop, with two batches of a step side by side on threads."""
    text = [t % 7 for t in range(50)]
    sequences = Sequences.from_lists([text[i : i + 3] for i in range(4)], [text[i + 3 : i + 40] for i in range(4)])
    real, model = target("qwen3", 2, VOCAB), randomize(DFlashDraftModel(draft_config(VOCAB, block_size=6)), 1)
    model.bind(real)
    fitting = FitSettings(steps=20, batches_per_step=2, log_every=5, optimizer=MuonSettings(decay_steps=5))
    batches = Batches(sequences, DataSettings(tmp_path, 80, 80, anchors=8), epochs=20)
    loss = drafter_loss(reader(real, model.target_layer_ids), ObjectiveSettings(kind), real.head)
    fit(model, batches, loss, fitting, tmp_path)
    logged = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert logged[-1] < 0.5 * logged[0]


# --- the loss by itself -----------------------------------------------------------------------------------


def test_forward_kl_is_zero_for_the_target_itself_and_positive_for_anything_else():
    logits, other = (mx.random.normal((5, VOCAB), key=mx.random.key(i)) * 4 for i in range(2))
    assert mx.abs(forward_kl(logits, logits)).max().item() < 1e-5
    assert forward_kl(logits, other).min().item() > 0.1
    assert not mx.allclose(forward_kl(logits, other), forward_kl(other, logits), rtol=0.1).item()


def test_half_precision_logits_are_scored_in_float32():
    logits = (mx.random.normal((6, 5000), key=mx.random.key(0)) * 3).astype(mx.bfloat16)
    tokens = mx.arange(6)
    exact = prediction_losses(logits.astype(mx.float32), tokens, logits.astype(mx.float32) / 2, 0.5)
    assert mx.array_equal(prediction_losses(logits, tokens, logits / 2, 0.5), exact)


@pytest.mark.parametrize("kind", ["cross_entropy", "kl"])
def test_memory_does_not_grow_with_anchors_times_vocabulary(kind):
    vocab, size, objective = 8192, 16, ObjectiveSettings(kind, chunk=32)
    config = draft_config(vocab, block_size=size, num_hidden_layers=1, layer_types=())
    model, real = DFlashDraftModel(config), RandomTarget(0, vocab)
    model.bind(real)  # type: ignore[arg-type]
    tokens, response = mx.zeros((1, 200), mx.int32), mx.ones((1, 200), mx.bool_)
    read = TargetPass(mx.random.normal((1, 200, 3 * HIDDEN)), mx.random.normal((1, 200, HIDDEN)))
    step = nn.value_and_grad(model, drafter_loss(lambda _: read, objective, real.head))

    def peak(count: int) -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        mx.eval(step(model, tokens, response, mx.arange(1, count + 1)[None]))
        return mx.get_peak_memory()

    peak(8)
    few, many = peak(16), peak(128)
    one_set_of_logits = 4 * (size - 1) * vocab * (128 - 16)
    assert many - few < one_set_of_logits / 3


def test_attention_memory_does_not_grow_with_anchors_times_context():
    heads, size, head_size, context = 2, 8, 4, 1200

    def peak(count: int) -> int:
        q, k, v = (mx.random.normal((count, heads, size, head_size)) for _ in range(3))
        ck, cv = (mx.random.normal((1, heads, context, head_size)) for _ in range(2))
        anchors = mx.arange(context - count, context)[None]
        mx.eval(q, k, v, ck, cv, anchors)
        mx.clear_cache()
        mx.reset_peak_memory()
        attend = attention.block_attention
        mx.eval(mx.grad(lambda *x: attend(*x, anchors).square().sum(), argnums=range(5))(q, k, v, ck, cv))
        return mx.get_peak_memory()

    few, many = peak(16), peak(1024)
    one_set_of_scores = 4 * heads * size * (context / 2) * (1024 - 16)  # anchors see about half
    assert many - few < one_set_of_scores / 2


def test_impossible_objectives_are_refused_by_name():
    with pytest.raises(SettingsError, match="kind must be cross_entropy, kl or mix, got 'KL'"):
        ObjectiveSettings("KL")
    with pytest.raises(SettingsError, match=r"kl_share must be between 0 and 1, got 1\.5"):
        ObjectiveSettings("mix", kl_share=1.5)
    with pytest.raises(SettingsError, match="gamma must be above 0, got 0"):
        ObjectiveSettings(gamma=0)
    with pytest.raises(SettingsError, match="chunk must be at least 1 prediction, got 0"):
        from_dict(ObjectiveSettings, {"chunk": 0}, "recipe")
    with pytest.raises(ValueError, match="needs the target's head"):
        drafter_loss(lambda _: TargetPass(mx.zeros(1)), ObjectiveSettings("kl"))
    (tokens, response, anchors), read = padded(pack_of_three())
    loss = drafter_loss(lambda t: TargetPass(read(t).features_NSF), ObjectiveSettings("mix"), lambda h: h)
    with pytest.raises(ValueError, match="needs the target's final hidden states"):
        loss(drafter(), tokens, response, anchors)
