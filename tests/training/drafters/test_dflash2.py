"""Training a DFlash 2 drafter: its loss and gradients, how it starts, and a run from recipe to published files."""

import json
from dataclasses import replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.dense_dflash2 import dense_loss_and_gradients, predictions
from support.dense_loss import (
    GAMMA,
    SLIDING,
    VOCAB,
    RandomTarget,
    assert_equal,
    loss_and_gradients,
    pack_of_three,
    pad_documents,
)
from support.models import draft_config, randomize
from support.runs import read_log, recipe, result

import dflash
from dflash import load_drafter
from dflash.core.errors import CheckpointError, TrainingError
from dflash.core.files import flat, read_json
from dflash.drafters.dflash2 import DFlash2Config, DFlash2DraftModel
from dflash.training.drafters.init import drafter_config, new_drafter
from dflash.training.drafters.loss import drafter_loss, score
from dflash.training.drafters.objectives import ObjectiveSettings
from dflash.training.recipe import DrafterShape
from dflash.training.train import train

OWN = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 5}
OBJECTIVE = ObjectiveSettings(gamma=GAMMA, auxiliary_weight=0.7)
VARIANTS = {
    "as published": {"is_causal": False, "layer_types": (SLIDING, SLIDING), "sliding_window": 7},
    "three taps, capped": {"conv_kernel_size": 3, "final_logit_softcapping": 2.0, "num_hidden_layers": 1},
}


def drafter(seed: int = 6, **changes) -> DFlash2DraftModel:
    config = DFlash2Config(**{**vars(draft_config(VOCAB, block_size=6)), "layer_types": (), **OWN, **changes})
    model = randomize(DFlash2DraftModel(config), seed)
    for name, weight in flat(model.parameters()).items():
        if name.endswith(("base_kernel", "codebook")):
            model.load_weights([(name, mx.random.normal(weight.shape, key=mx.random.key(len(name))))], strict=False)
    model.bind(RandomTarget(seed))
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_equal_a_dense_float64_implementation(variant):
    model, documents = drafter(**VARIANTS[variant]), pack_of_three()
    found, expected = (
        loss_and_gradients(model, documents, OBJECTIVE),
        dense_loss_and_gradients(model, documents, OBJECTIVE),
    )
    assert_equal(found, expected)
    own = {name for name in expected[1] if "conv" in name or "selector" in name}
    assert len(own) == 4 * model.config.num_hidden_layers + 3
    assert min(mx.abs(found[1][name]).max().item() for name in own) > 1e-4, "a part does not learn"


def test_the_chunk_size_changes_nothing_and_the_selectors_loss_has_its_weight():
    model, documents = drafter(), pack_of_three()
    whole = loss_and_gradients(model, documents, replace(OBJECTIVE, chunk=10_000))
    for chunk in (1, 17):
        assert_equal(loss_and_gradients(model, documents, replace(OBJECTIVE, chunk=chunk)), whole, 3e-6)
    none, once, twice = (
        loss_and_gradients(model, documents, replace(OBJECTIVE, auxiliary_weight=w))[0] for w in (0.0, 1.0, 2.0)
    )
    assert once - none == pytest.approx(twice - once, rel=1e-4)
    assert once - none > 0.1


def test_a_loss_in_half_precision_leaves_the_weights_and_gives_every_part_its_gradient():
    """Beside a target that computes in half precision; every token is a candidate, so that rounding adds none."""
    model, batch, borrowed = drafter(selector_top_k=VOCAB), pad_documents(pack_of_three()), RandomTarget(6)
    borrowed.table, borrowed.matrix = (array.astype(mx.bfloat16) for array in (borrowed.table, borrowed.matrix))
    exact, expected = loss_and_gradients(model, pack_of_three(), OBJECTIVE)
    model.bind(borrowed)
    before = dict(tree_flatten(model.parameters()))
    step = nn.value_and_grad(model, partial(drafter_loss, objective=OBJECTIVE, dtype=mx.bfloat16, grad_checkpoint=True))
    value, gradients = step(model, batch)
    assert value.item() == pytest.approx(exact, rel=0.02)
    for name, gradient in tree_flatten(gradients):
        assert gradient.dtype == before[name].dtype
        assert mx.linalg.norm(gradient - expected[name]).item() < 0.6 * mx.linalg.norm(expected[name]).item(), name


def test_evaluations_count_what_the_selector_chooses_and_whether_it_could():
    model, documents = drafter(), pack_of_three()
    found = score(model, pad_documents(documents), OBJECTIVE)
    weights = {k: v.astype(mx.float64) for k, v in tree_flatten(model.trainable_parameters())}
    expected = np.zeros((3, model.block_size - 1), int)
    with mx.stream(mx.cpu):
        for i, token, _, candidates, scores in predictions(model, weights, documents):
            chosen = candidates[int(np.array(scores).argmax())]
            expected[:, i - 1] += 1, chosen == token, token in candidates
    counts = found.predictions, found.hits["accuracy"], found.hits["candidate_recall"]
    assert [c.tolist() for c in counts] == expected.tolist()
    assert 0 < expected[1].sum() < expected[2].sum() < expected[0].sum()
    assert found.results()["heldout_candidate_recall"] == pytest.approx((expected[2] / expected[0]).tolist())
    assert found.loss / found.weight == pytest.approx(
        dense_loss_and_gradients(model, documents, OBJECTIVE)[0], rel=1e-5
    )


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


def test_started_from_a_dflash_drafter_it_drafts_the_same(start):
    path, target = start
    first = load_drafter(path)
    first.bind(target)
    model = new_drafter(DrafterShape("dflash2", {"selector_top_k": 4}, path), target)
    assert type(model) is DFlash2DraftModel
    assert model.config.selector_top_k == 4
    assert model.config.conv_group_size == 16
    theirs, mine = proposal(first, target), proposal(model, target)
    assert mine.tokens.tolist() == theirs.tokens.tolist()
    best = mx.take_along_axis(theirs.logits, mine.candidates, axis=-1)
    assert mx.array_equal(mine.logits, best).item(), "it does not begin as an identity"
    for name, weight in flat(first.parameters()).items():
        assert mx.array_equal(flat(model.parameters())[name], weight.astype(mx.float32)).item(), name
    assert drafter_config(DrafterShape("dflash2", {"selector_top_k": 4}, path), target) == model.config


def test_what_the_kind_adds_starts_as_published(start):
    _, target = start
    shape = DrafterShape("dflash2", num_hidden_layers=1, target_layer_ids=(0,), mask_token=263, seed=3)
    model = new_drafter(shape, target)
    weights = flat(model.parameters())
    for part in ("attention_conv", "mlp_conv"):
        base = weights[f"layers.0.{part}.base_kernel"]
        assert mx.array_equal(base, mx.stack([mx.ones_like(base[:, 0]), mx.zeros_like(base[:, 1])], axis=1)).item()
        assert not weights[f"layers.0.{part}.kernel_projection.weight"].any().item()
    assert not weights["candidate_selector.successor_codebook"].any().item()
    before = weights["candidate_selector.predecessor_codebook"]
    assert 0.015 < before.std().item() < 0.02
    assert mx.abs(before).max().item() <= 0.04
    again, other = new_drafter(shape, target), new_drafter(replace(shape, seed=4), target)
    same = [mx.array_equal(flat(m.parameters())["layers.0.mlp.up_proj.weight"], weights["layers.0.mlp.up_proj.weight"])
            for m in (again, other)]  # fmt: skip
    assert [bool(s.item()) for s in same] == [True, False]


def test_a_start_that_does_not_fit_is_refused(start, tmp_path):
    path, target = start
    for shape, message in (
        (
            DrafterShape("dflash2", {"selector_topk": 4}, path),
            "no option 'selector_topk'; did you mean 'selector_top_k'",
        ),
        (
            DrafterShape("dflash2", {"conv_group_size": 5}, path),
            "hidden_size 32 is not a multiple of conv_group_size 5",
        ),
        (DrafterShape("dflash2", from_=path, block_size=8), "block_size is 8, but .* has 4"),
    ):
        with pytest.raises((TrainingError, CheckpointError, dflash.DFlashError), match=message):
            new_drafter(shape, target)
    dflash.save_drafter(new_drafter(DrafterShape("dflash2", from_=path), target), tmp_path)
    with pytest.raises(TrainingError, match=r"drafter\.kind is 'dspark', but .* has 'dflash2'"):
        new_drafter(DrafterShape("dspark", from_=str(tmp_path)), target)


# --- a run ------------------------------------------------------------------------------------------------


def test_a_recipe_trains_it_in_two_threads_and_what_it_exports_loads_bit_equal(folder, start):
    sets = ["drafter.kind=dflash2", "drafter.options={selector_top_k: 8, selector_rank: 4}", "run.threads=2"]
    values = recipe(folder, "dflash2", *sets, "run.steps=30", "run.evaluate_every=10", "run.log_every=10",
                    "data.anchors=8", "optimizer.learning_rate=1e-2", "objective.kind=d-pace")  # fmt: skip
    run = folder / "dflash2"
    train(values)
    lines = read_log(run)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    for line in lines:
        if "heldout_candidate_recall" in line:
            pairs = zip(line["heldout_accuracy"], line["heldout_candidate_recall"], strict=True)
            assert all(accuracy <= recall <= 1 for accuracy, recall in pairs)
    config = read_json(run / "drafter" / "config.json")
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert config["dflash_config"]["selector_top_k"] == 8
    loaded, best = load_drafter(run / "drafter"), mx.load(str(run / "best.safetensors"))
    assert type(loaded) is DFlash2DraftModel
    for name, weight in flat(loaded.parameters()).items():
        assert mx.array_equal(weight, best[name].astype(mx.bfloat16)).item(), name
    assert loaded.candidate_selector.successor_codebook.any().item(), "the selector did not learn"
    finished = result(run)
    train(values)
    assert result(run) == finished
    assert json.loads((run / "recipe.json").read_text())["recipe"]["drafter"]["kind"] == "dflash2"
