"""Training a DSpark drafter: its loss and gradients, how it starts, and a run from recipe to published files."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.dense_dspark import dense_loss_and_gradients
from support.dense_loss import GAMMA, SLIDING, VOCAB, RandomTarget, assert_equal, loss_and_gradients, pack_of_three
from support.models import draft_config, randomize
from support.runs import read_log, recipe, result

import dflash
from dflash import load_drafter, save_drafter
from dflash.core.errors import TrainingError
from dflash.core.files import flat, read_json
from dflash.drafters.dspark import DSparkConfig, DSparkDraftModel
from dflash.training.drafters.init import new_drafter
from dflash.training.drafters.objectives import ObjectiveSettings
from dflash.training.loop.optimizer import is_inner_matrix
from dflash.training.recipe import DrafterShape
from dflash.training.train import train

OBJECTIVE = ObjectiveSettings("l1", gamma=GAMMA, auxiliary_weight=0.7)
VARIANTS = {
    "vanilla": {},
    "gated, causal": {"markov_head_type": "gated", "layer_types": (SLIDING, SLIDING), "sliding_window": 7},
    "rnn, anchor drafts nothing": {"markov_head_type": "rnn", "sample_from_anchor": False, "num_hidden_layers": 1},
    "confidence of hidden states alone": {"confidence_head_with_markov": False, "final_logit_softcapping": 2.0},
}


def drafter(seed: int = 1, **changes) -> DSparkDraftModel:
    own = {"layer_types": (), "markov_rank": 5, "sample_from_anchor": True}
    config = DSparkConfig(**{**vars(draft_config(VOCAB, block_size=6)), **own, **changes})
    model = randomize(DSparkDraftModel(config), seed)
    model.bind(RandomTarget(seed))
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_equal_a_dense_float64_implementation(variant):
    model, documents = drafter(**VARIANTS[variant]), pack_of_three()
    found, expected = (
        loss_and_gradients(model, documents, OBJECTIVE),
        dense_loss_and_gradients(model, documents, OBJECTIVE),
    )
    assert_equal(found, expected, 2e-5)
    own = {name for name in expected[1] if name.startswith(("markov_head", "confidence_head"))}
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"} <= own
    assert min(mx.abs(found[1][name]).max().item() for name in own) > 1e-4, "a part does not learn"


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_the_chunk_size_changes_nothing(head):
    model, documents = drafter(markov_head_type=head), pack_of_three()
    whole = loss_and_gradients(model, documents, replace(OBJECTIVE, chunk=10_000))
    for chunk in (1, 17):
        assert_equal(loss_and_gradients(model, documents, replace(OBJECTIVE, chunk=chunk)), whole, 5e-6)


def test_drafters_without_one_of_the_heads_learn_the_rest():
    documents = pack_of_three()
    for changes in ({"enable_confidence_head": False}, {"markov_rank": 0}):
        model = drafter(**changes)
        assert model.needs_target_logits == ("markov_rank" in changes)
        value, gradients = loss_and_gradients(model, documents, ObjectiveSettings())
        assert np.isfinite(value)
        heads = {name.split(".")[0] for name in gradients if "head" in name}
        assert heads == {"markov_head" if "markov_rank" not in changes else "confidence_head"}


def test_tables_of_tokens_are_no_matrices_of_muons():
    names = {name for name, w in flat(drafter().parameters()).items() if is_inner_matrix(name, w)}
    assert "fc.weight" in names
    assert not any(name.startswith(("markov_head.markov_w", "confidence_head")) for name in names)


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


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_started_from_a_dflash_drafter_it_drafts_the_same(start, head):
    path, target = start
    first = load_drafter(path)
    first.bind(target)
    model = new_drafter(DrafterShape("dspark", {"markov_head_type": head, "markov_rank": 8}, path), target)
    assert model.config.sample_from_anchor == first.config.sample_from_anchor
    theirs, mine = proposal(first, target), proposal(model, target)
    assert mx.array_equal(mine.logits, theirs.logits).item()
    assert mine.confidence.shape == (1, 3)


def test_a_new_one_drafts_at_the_anchor_and_begins_without_a_bias(start):
    shape = DrafterShape("dspark", num_hidden_layers=1, target_layer_ids=(0,), mask_token=263)
    model = new_drafter(shape, start[1])
    assert (model.config.markov_rank, model.config.sample_from_anchor, model.block_size) == (256, True, 17)
    assert not model.markov_head.markov_w2.weight.any().item()
    assert model.markov_head.markov_w1.weight.std().item() > 0.01


def test_tables_that_are_not_the_targets_cannot_be_trained(start, tmp_path):
    path, target = start
    model = new_drafter(DrafterShape("dspark", {"markov_rank": 8}, path), target)
    model.keep_tables({"embed_tokens"})
    save_drafter(model, tmp_path)
    with pytest.raises(TrainingError, match="has an embed_tokens of its own"):
        new_drafter(DrafterShape("dspark", from_=str(tmp_path)), target)


# --- a run ------------------------------------------------------------------------------------------------


def test_a_recipe_trains_it_and_what_it_exports_is_the_published_packaging_and_loads_bit_equal(folder, start):
    sets = ["drafter.kind=dspark", "drafter.options={markov_rank: 8, markov_head_type: gated}", "objective.kind=l1"]
    values = recipe(folder, "dspark", *sets, "run.steps=20", "run.evaluate_every=10", "run.log_every=10",
                    "data.anchors=8", "optimizer.learning_rate=1e-2", "objective.gamma=4")  # fmt: skip
    run = folder / "dspark"
    train(values)
    losses = [line["loss"] for line in read_log(run) if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    config = read_json(run / "drafter" / "config.json")
    assert config["architectures"] == ["DSparkDraftModel"]
    assert config["dflash_config"]["projector_type"] == "dspark"
    assert config["dflash_config"]["sample_from_anchor"] is True
    loaded, best = load_drafter(run / "drafter"), mx.load(str(run / "best.safetensors"))
    assert type(loaded) is DSparkDraftModel
    assert loaded.block_size == 5
    for name, weight in flat(loaded.parameters()).items():
        assert mx.array_equal(weight, best[name].astype(mx.bfloat16)).item(), name
    assert loaded.markov_head.markov_w2.weight.any().item(), "the Markov head did not learn"
    finished = result(run)
    train(values)
    assert result(run) == finished
