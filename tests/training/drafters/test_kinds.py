"""Training the kinds beside DFlash: losses and gradients, how they start, and runs from recipe to export."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.dense_loss import (
    GAMMA,
    SLIDING,
    VOCAB,
    RandomTarget,
    assert_equal,
    dense_loss_and_gradients,
    loss_and_gradients,
    pack_of_three,
    pad_documents,
    predictions,
)
from support.models import draft_config, randomize
from support.runs import read_log, recipe

import dflash
import dflash.training.train as train_module
from dflash import DFlashDraftModel, load_drafter, save_drafter
from dflash.core.errors import DFlashError
from dflash.core.files import flat, read_json
from dflash.drafters.dflash2 import DFlash2DraftModel
from dflash.drafters.domino import DominoDraftModel
from dflash.drafters.dspark import DSparkDraftModel
from dflash.training.drafters.init import drafter_config, new_drafter
from dflash.training.drafters.loss import drafter_loss, score
from dflash.training.drafters.objectives import ObjectiveSettings
from dflash.training.recipe import DrafterShape
from dflash.training.train import train

WINDOW = {"layer_types": (SLIDING, SLIDING), "sliding_window": 7}


@dataclass(frozen=True)
class Kind:
    """A kind of drafter with what its tests need: ``own`` names the parts of its weights that DFlash lacks."""

    cls: type[DFlashDraftModel]
    values: dict[str, Any]
    objective: ObjectiveSettings
    own: tuple[str, ...]
    options: dict[str, Any]
    run: tuple[str, ...]
    tolerance: float = 1e-5


KINDS = {
    "dspark": Kind(
        DSparkDraftModel,
        {"markov_rank": 5, "sample_from_anchor": True},
        ObjectiveSettings("l1", gamma=GAMMA, auxiliary_weight=0.7),
        ("markov_head", "confidence_head"),
        {"markov_rank": 8, "markov_head_type": "gated"},
        ("objective.kind=l1", "objective.gamma=4"),
        2e-5,
    ),
    "domino": Kind(
        DominoDraftModel,
        {"gru_hidden_dim": 7, "emb_dim": 5, "pure_draft_prefix_len": 1, "sample_from_anchor": True},
        ObjectiveSettings(gamma=GAMMA),
        ("prefix_gru", "embed_proj"),
        {"gru_hidden_dim": 12, "emb_dim": 8},
        ("objective.base_steps=10",),
    ),
    "dflash2": Kind(
        DFlash2DraftModel,
        {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 5},
        ObjectiveSettings(gamma=GAMMA, auxiliary_weight=0.7),
        ("conv", "selector"),
        {"selector_top_k": 8, "selector_rank": 4},
        ("run.threads=2", "objective.kind=d-pace"),
    ),
}


def drafter(kind: str, seed: int = 6, **changes) -> DFlashDraftModel:
    cls = KINDS[kind].cls
    values = {**vars(draft_config(VOCAB, block_size=6)), "layer_types": (), **KINDS[kind].values, **changes}
    model = randomize(cls(cls.config_class(**values)), seed)
    for name, weight in flat(model.parameters()).items():
        if name.endswith(("base_kernel", "codebook")):
            model.load_weights([(name, mx.random.normal(weight.shape, key=mx.random.key(len(name))))], strict=False)
    model.bind(RandomTarget(seed))
    return model


# --- loss -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dspark", {}),
        ("dspark", {"markov_head_type": "gated", **WINDOW}),
        ("dspark", {"markov_head_type": "rnn", "sample_from_anchor": False, "num_hidden_layers": 1}),
        ("dspark", {"confidence_head_with_markov": False, "final_logit_softcapping": 2.0}),
        ("domino", {}),
        ("domino", {"sample_from_anchor": False, "pure_draft_prefix_len": 0, **WINDOW}),
        ("domino", {"pure_draft_prefix_len": 3, "input_embedding_scale": 2.0, "final_logit_softcapping": 2.0}),
        ("dflash2", {"is_causal": False, **WINDOW}),
        ("dflash2", {"conv_kernel_size": 3, "final_logit_softcapping": 2.0, "num_hidden_layers": 1}),
    ],
)
def test_loss_and_gradients_equal_a_dense_float64_implementation(kind, changes):
    model, documents, it = drafter(kind, **changes), pack_of_three(), KINDS[kind]
    found, expected = (
        scheme(model, documents, it.objective) for scheme in (loss_and_gradients, dense_loss_and_gradients)
    )
    assert_equal(found, expected, it.tolerance)
    own = {name for name in expected[1] if any(part in name for part in it.own)}
    assert all(any(part in name for name in own) for part in it.own)
    assert min(mx.abs(found[1][name]).max().item() for name in own) > 1e-4, "a part does not learn"


@pytest.mark.parametrize(
    ("kind", "changes"), [("dspark", {"markov_head_type": "rnn"}), ("dflash2", {}), ("domino", {})]
)
def test_the_chunk_size_changes_nothing_and_what_the_kind_adds_has_its_weight(kind, changes):
    model, documents, objective = drafter(kind, **changes), pack_of_three(), KINDS[kind].objective
    whole = loss_and_gradients(model, documents, replace(objective, chunk=10_000))
    for chunk in (1, 17):
        assert_equal(loss_and_gradients(model, documents, replace(objective, chunk=chunk)), whole, 5e-6)
    if kind == "domino":  # it adds no loss
        return
    none, once, twice = (
        loss_and_gradients(model, documents, replace(objective, auxiliary_weight=w))[0] for w in (0.0, 1.0, 2.0)
    )
    assert once - none == pytest.approx(twice - once, rel=1e-4)
    assert once - none > 0.1


def test_a_loss_that_begins_with_uncorrected_logits_is_that_of_both():
    model, documents, objective = drafter("domino"), pack_of_three(), KINDS["domino"].objective
    step = nn.value_and_grad(model, partial(drafter_loss, objective=replace(objective, chunk=17)))
    found = {w: step(model, pad_documents(documents)._replace(base_weight=w)) for w in (0.3, 1.0)}
    gradients = {w: dict(tree_flatten(gradients)) for w, (_, gradients) in found.items()}
    expected = dense_loss_and_gradients(model, documents, objective, 0.3)
    assert_equal((found[0.3][0].item(), gradients[0.3]), expected)
    value, _ = dense_loss_and_gradients(model, documents, objective, 1.0)
    assert found[1.0][0].item() == pytest.approx(value, rel=1e-5)
    assert not any(gradients[1.0][name].any().item() for name in gradients[1.0] if name.startswith("prefix_gru"))


def test_the_first_steps_move_from_uncorrected_logits_to_corrected_ones(folder, monkeypatch):
    weights, real = [], train_module.drafter_loss
    monkeypatch.setattr(
        train_module, "drafter_loss", lambda *args, **kw: weights.append(args[1].base_weight) or real(*args, **kw)
    )
    settings = ("drafter.kind=domino", "drafter.options={gru_hidden_dim: 8, emb_dim: 4}", "objective.base_steps=2")
    train(recipe(folder, "curriculum", *settings, "run.batches_per_step=2", "run.steps=3", "run.evaluate_every=9"))
    assert weights[-6:] == [1, 0.75, 0.5, 0.25, 0, 0]


def test_drafters_without_one_of_the_heads_learn_the_rest():
    documents = pack_of_three()
    for changes in ({"enable_confidence_head": False}, {"markov_rank": 0}):
        model = drafter("dspark", **changes)
        assert model.needs_target_logits == ("markov_rank" in changes)
        value, gradients = loss_and_gradients(model, documents, ObjectiveSettings())
        assert np.isfinite(value)
        heads = {name.split(".")[0] for name in gradients if "head" in name}
        assert heads == {"markov_head" if "markov_rank" not in changes else "confidence_head"}


def test_a_loss_in_half_precision_leaves_the_weights_and_gives_every_part_its_gradient():
    """Beside a target that computes in half precision; every token is a candidate, so that rounding adds none."""
    objective, borrowed = KINDS["dflash2"].objective, RandomTarget(6)
    model, batch = drafter("dflash2", selector_top_k=VOCAB), pad_documents(pack_of_three())
    borrowed.table, borrowed.matrix = (array.astype(mx.bfloat16) for array in (borrowed.table, borrowed.matrix))
    exact, expected = loss_and_gradients(model, pack_of_three(), objective)
    model.bind(borrowed)
    before = dict(tree_flatten(model.parameters()))
    step = nn.value_and_grad(model, partial(drafter_loss, objective=objective, dtype=mx.bfloat16, grad_checkpoint=True))
    value, gradients = step(model, batch)
    assert value.item() == pytest.approx(exact, rel=0.02)
    for name, gradient in tree_flatten(gradients):
        assert gradient.dtype == before[name].dtype
        assert mx.linalg.norm(gradient - expected[name]).item() < 0.6 * mx.linalg.norm(expected[name]).item(), name


def test_evaluations_count_what_the_selector_chooses_and_whether_it_could():
    model, documents, objective = drafter("dflash2"), pack_of_three(), KINDS["dflash2"].objective
    found = score(model, pad_documents(documents), objective)
    expected = np.zeros((3, model.block_size - 1), int)
    with mx.stream(mx.cpu):
        for i, token, _, block in predictions(model, documents):
            expected[:, i] += 1, block.logits[i].argmax().item() == token, token in block.candidates[i]
    counts = found.predictions, found.hits["accuracy"], found.hits["candidate_recall"]
    assert [c.tolist() for c in counts] == expected.tolist()
    assert 0 < expected[1].sum() < expected[2].sum() < expected[0].sum()
    assert found.results()["heldout_candidate_recall"] == pytest.approx((expected[2] / expected[0]).tolist())
    dense, _ = dense_loss_and_gradients(model, documents, objective)
    assert found.loss / found.weight == pytest.approx(dense, rel=1e-5)


# --- how it starts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(folder, undisturbed):
    """A DFlash drafter to start from, and its target."""
    return str(undisturbed / "drafter"), dflash.load_target(folder / "target")


def proposal(drafter, target):
    cache, tokens = drafter.make_cache(), mx.array([[65, 70, 80, 71]])
    _, features = target.forward_with_hidden_states(tokens, None, drafter.target_layer_ids)
    drafter.extend_context(features, cache, tokens)
    return drafter.propose(mx.array([[66]]), 3, cache)


@pytest.mark.parametrize(
    ("kind", "options"),
    [*(("dspark", {"markov_head_type": head, "markov_rank": 8}) for head in ("vanilla", "gated", "rnn")),
     ("dflash2", {"selector_top_k": 4}), ("domino", {"gru_hidden_dim": 8})],
)  # fmt: skip
def test_started_from_a_dflash_drafter_it_drafts_the_same(start, kind, options):
    path, target = start
    first, shape = load_drafter(path), DrafterShape(kind, options, path)
    first.bind(target)
    model = new_drafter(shape, target)
    assert type(model) is KINDS[kind].cls
    assert model.config.sample_from_anchor == first.config.sample_from_anchor
    assert drafter_config(shape, target) == model.config
    theirs, mine = proposal(first, target), proposal(model, target)
    assert mine.tokens.tolist() == theirs.tokens.tolist()
    logits = theirs.logits
    if mine.candidates is not None:
        logits = mx.take_along_axis(logits, mine.candidates, axis=-1)
    assert mx.array_equal(mine.logits, logits).item(), "it does not begin as an identity"
    assert (mine.confidence is None) == (kind != "dspark")
    weights = flat(model.parameters())
    for name, weight in flat(first.parameters()).items():
        assert mx.array_equal(weights[name], weight.astype(mx.float32)).item(), name


HEADS = {"dspark": {"markov_rank": 8}, "domino": {"emb_dim": 6, "gru_hidden_dim": 8}, "dflash2": {"selector_top_k": 4}}


@pytest.mark.parametrize(("first", "second"), [("dspark", "dflash2"), ("dspark", "domino"), ("domino", "dspark")])
def test_a_head_that_another_kind_lacks_stays_behind_and_the_layers_draft_the_same(
    start, first, second, tmp_path, caplog
):
    """The first head has learned: what it would add must not come along."""
    path, target = start
    plain, between = load_drafter(path), new_drafter(DrafterShape(first, HEADS[first], path), target)
    plain.bind(target)
    between.load_weights([(name, weight + 1) for name, weight in flat(between.parameters()).items()
                          if name.startswith(("markov_head", "embed_proj"))], strict=False)  # fmt: skip
    save_drafter(between, tmp_path / first, mx.float32)
    caplog.clear()
    with caplog.at_level("INFO", logger="dflash"):
        model = new_drafter(DrafterShape(second, HEADS[second], str(tmp_path / first)), target)
    theirs, mine = proposal(plain, target), proposal(model, target)
    assert mine.tokens.tolist() == theirs.tokens.tolist()
    assert proposal(between, target).logits.tolist() != theirs.logits.tolist()
    new, behind = (" and ".join(parts) for parts in (model.added_modules, sorted(between.added_modules)))
    lines = [record.getMessage() for record in caplog.records if "stay behind" in record.getMessage()]
    assert lines == [f"drafter.from {tmp_path / first}: a {first} drafter, with new {new}; {behind} stay behind."]


NEW = {"num_hidden_layers": 1, "target_layer_ids": (0,), "mask_token": 263}


def test_a_new_dspark_drafts_at_the_anchor_and_begins_without_a_bias(start):
    model = new_drafter(DrafterShape("dspark", **NEW), start[1])
    assert (model.config.markov_rank, model.config.sample_from_anchor, model.block_size) == (256, True, 17)
    assert not model.markov_head.markov_w2.weight.any().item()
    assert model.markov_head.markov_w1.weight.std().item() > 0.01


def test_a_new_domino_is_of_the_published_sizes_and_begins_without_a_correction(start):
    model = new_drafter(DrafterShape("domino", **NEW), start[1])
    config = model.config
    assert (config.gru_hidden_dim, config.emb_dim, config.pure_draft_prefix_len) == (1024, 256, 1)
    assert (config.sample_from_anchor, model.block_size) == (True, 17)
    assert not model.embed_proj[2].weight.any().item()
    assert 0.017 < model.prefix_gru.weight_ih_l0.std().item() < 0.019, "uniform to 1 / sqrt(1024), as PyTorch's"


def test_what_dflash2_adds_starts_as_published(start):
    shape = DrafterShape("dflash2", seed=3, **NEW)
    weights, again, other = (flat(new_drafter(replace(shape, seed=seed), start[1]).parameters()) for seed in (3, 3, 4))
    for part in ("attention_conv", "mlp_conv"):
        base = weights[f"layers.0.{part}.base_kernel"]
        assert mx.array_equal(base, mx.stack([mx.ones_like(base[:, 0]), mx.zeros_like(base[:, 1])], axis=1)).item()
        assert not weights[f"layers.0.{part}.kernel_projection.weight"].any().item()
    assert not weights["candidate_selector.successor_codebook"].any().item()
    before = weights["candidate_selector.predecessor_codebook"]
    assert 0.015 < before.std().item() < 0.02
    assert mx.abs(before).max().item() <= 0.04
    name = "layers.0.mlp.up_proj.weight"
    assert mx.array_equal(again[name], weights[name]).item()
    assert not mx.array_equal(other[name], weights[name]).item()


def test_a_start_that_does_not_fit_is_refused(start, tmp_path):
    path, target = start
    save_drafter(new_drafter(DrafterShape("dflash2", from_=path), target), tmp_path / "dflash2")
    with_tables = new_drafter(DrafterShape("dspark", {"markov_rank": 8}, path), target)
    with_tables.keep_tables({"embed_tokens"})
    save_drafter(with_tables, tmp_path / "tables")
    for kind, options, place, changes, message in (
        ("dflash2", {"selector_topk": 4}, path, {}, "no option 'selector_topk'; did you mean 'selector_top_k'"),
        ("dflash2", {}, path, {"window": 8}, "window is 8, but .* has None"),
        ("dflash2", {"conv_group_size": 5}, path, {}, "hidden_size 32 is not a multiple of conv_group_size 5"),
        (
            "dspark",
            {},
            tmp_path / "dflash2",
            {},
            r"kind 'dspark' cannot start: layers\.0\.attention_conv\.base_kernel is",
        ),
        ("dflash2", {}, tmp_path / "tables", {}, "has an embed_tokens of its own"),
        ("dspark", {}, tmp_path / "tables", {}, "has an embed_tokens of its own"),
    ):
        with pytest.raises(DFlashError, match=message):
            new_drafter(DrafterShape(kind, options, str(place), **changes), target)


# --- a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_trains_it_and_what_it_exports_is_as_published_and_loads_bit_equal(folder, kind):
    it = KINDS[kind]
    values = recipe(folder, kind, f"drafter.kind={kind}", f"drafter.options={it.options}", *it.run, "run.steps=12",
                    "run.evaluate_every=6", "run.log_every=4", "data.anchors=8",
                    "optimizer.learning_rate=1e-2")  # fmt: skip
    run = folder / kind
    train(values)
    lines = read_log(run)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    for line in lines:
        recalls = zip(line.get("heldout_accuracy", []), line.get("heldout_candidate_recall", []), strict=False)
        assert all(accuracy <= recall <= 1 for accuracy, recall in recalls)
    config = read_json(run / "drafter" / "config.json")
    assert config["architectures"] == [it.cls.__name__]
    published = {
        "dspark": {"projector_type": "dspark", "sample_from_anchor": True}, "dflash2": {"selector_top_k": 8},
        "domino": {"projector_type": "domino", "shift_label": True, "gru_hidden_dim": 12},
    }  # fmt: skip
    assert published[kind].items() <= config["dflash_config"].items()
    loaded, best = load_drafter(run / "drafter"), mx.load(str(run / "best.safetensors"))
    assert type(loaded) is it.cls
    weights = flat(loaded.parameters())
    for name, weight in weights.items():
        assert mx.array_equal(weight, best[name].astype(mx.bfloat16)).item(), name
    learned = {
        "dspark": "markov_head.markov_w2.weight", "dflash2": "candidate_selector.successor_codebook",
        "domino": "embed_proj.2.weight",
    }[kind]  # fmt: skip
    assert weights[learned].any().item(), "what the kind adds did not learn"
