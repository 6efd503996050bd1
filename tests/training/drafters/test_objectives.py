"""Objectives: what they score, in which precision, which are refused, and one of a plug-in's."""

import json
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from support.cli import assert_one_error, invoke
from support.dense_loss import VOCAB, drafter, pack_of_three, pad_documents, predictions
from support.runs import write_recipe

from dflash import load_drafter
from dflash.core.errors import TrainingError
from dflash.core.settings import SettingsError, from_dict
from dflash.training.drafters.loss import drafter_loss, score
from dflash.training.drafters.objectives import (
    ObjectiveSettings,
    Predictions,
    accept_until_fail,
    d_pace,
    forward_kl,
    l1,
    mix,
    register_objective,
    token_cross_entropy,
)


def kl(target_logits, logits):
    unused = mx.zeros(len(logits), mx.int32)
    return forward_kl(Predictions(logits, unused, unused, target_logits))


def test_forward_kl_is_zero_for_the_target_itself_and_positive_for_anything_else():
    logits, other = (mx.random.normal((5, VOCAB), key=mx.random.key(i)) * 4 for i in range(2))
    assert mx.abs(kl(logits, logits)).max().item() < 1e-5
    assert kl(logits, other).min().item() > 0.1
    assert not mx.allclose(kl(logits, other), kl(other, logits), rtol=0.1).item()


def test_the_mix_is_between_its_parts():
    logits, other = (mx.random.normal((5, VOCAB), key=mx.random.key(i)) * 4 for i in range(2))
    predictions = Predictions(logits, mx.arange(5), mx.ones(5), other)
    expected = 0.3 * forward_kl(predictions) + 0.7 * token_cross_entropy(predictions)
    assert mx.allclose(mix(predictions, 0.3), expected, rtol=1e-6)


LENGTHS = [5, 1, 3, 5]  # of blocks; all but the longest end before their last position


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_d_pace_weighs_each_position_by_the_accepted_length_that_depends_on_it(alpha):
    """Loss and gradient against the formula, one block and position at a time."""
    count = sum(LENGTHS)
    logits, tokens = mx.random.normal((count, VOCAB), key=mx.random.key(3)) * 3, mx.arange(count)
    positions = mx.array([i for length in LENGTHS for i in range(1, length + 1)])
    x = np.array(logits, np.float64)
    q_TV = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    weights, start = np.zeros(count), 0
    for length in LENGTHS:
        q = [(1 - alpha) * q_TV[start + i, start + i] + alpha for i in range(length)]
        prefixes = [np.prod(q[: m + 1]) for m in range(length)]
        weights[start : start + length] = [sum(prefixes[j:]) for j in range(length)]
        start += length

    def total(logits):
        return d_pace(Predictions(logits, tokens, positions), alpha).sum()

    value, gradient = mx.value_and_grad(total)(logits)
    assert value.item() == pytest.approx(-(weights * np.log(np.diag(q_TV[:, :count]))).sum(), rel=1e-5)
    np.testing.assert_allclose(np.array(gradient), weights[:, None] * (q_TV - np.eye(count, VOCAB)), atol=2e-5)
    if alpha == 1:
        assert weights.tolist() == [5, 4, 3, 2, 1, 1, 3, 2, 1, 5, 4, 3, 2, 1]


def distribution(logits_TV):
    exponentials = np.exp(logits_TV - logits_TV.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def dense_l1(weight, logits_TV, target_TV, tokens, known):
    """One prediction and one token of the vocabulary at a time."""
    q, p = distribution(logits_TV), distribution(target_TV)
    distances = [sum(abs(p[t, v] - q[t, v]) for v in range(VOCAB)) for t in range(len(q))]
    return [weight * distances[t] - (1 - weight) * np.log(q[t, tokens[t]]) for t in range(len(q))]


def dense_until_fail(logits_TV, target_TV, tokens, known):
    """One block and one position at a time."""
    q, losses, start = distribution(logits_TV), [], 0
    for length in LENGTHS:
        failed = False
        for t in range(start, start + length):
            losses.append(0.0 if failed else -np.log(q[t, tokens[t]]))
            failed = failed or logits_TV[t].argmax() != tokens[t] or not known[t]
        start += length
    return losses


@pytest.mark.parametrize(
    ("found", "dense", "reduced"),
    [
        (partial(l1, l1_weight=1.0), partial(dense_l1, 1.0), True),
        (partial(l1, l1_weight=0.9), partial(dense_l1, 0.9), False),
        (accept_until_fail, dense_until_fail, False),
        (accept_until_fail, dense_until_fail, True),
    ],
)
def test_losses_equal_a_dense_computation_and_gradients_its_finite_differences(found, dense, reduced):
    rng, count = np.random.default_rng(5), sum(LENGTHS)
    logits, target = 2 * rng.normal(size=(2, count, VOCAB))
    tokens, known = rng.integers(VOCAB, size=count), np.ones(count, bool)
    # all of the first block, none of the second, the third but for an unknown one
    right = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12]
    tokens[right] = logits[right].argmax(-1)
    if reduced:
        known[7] = False
    positions = mx.array([i for length in LENGTHS for i in range(1, length + 1)])
    known_T = mx.array(known) if reduced else None

    def losses(logits_TV):
        return found(Predictions(logits_TV, mx.array(tokens), positions, mx.array(target, mx.float32), known_T))

    expected = np.array(dense(logits, target, tokens, known))
    np.testing.assert_allclose(np.array(losses(mx.array(logits, mx.float32))), expected, rtol=2e-5, atol=1e-6)
    weights, step, slopes = rng.uniform(0.5, 2, count), 1e-6, np.zeros_like(logits)
    for t, v in np.ndindex(logits.shape):
        up, down = logits.copy(), logits.copy()
        up[t, v], down[t, v] = up[t, v] + step, down[t, v] - step
        difference = np.array(dense(up, target, tokens, known)) - dense(down, target, tokens, known)
        slopes[t, v] = (weights * difference).sum() / (2 * step)
    gradient = mx.grad(lambda logits: (losses(logits) * mx.array(weights, mx.float32)).sum())
    np.testing.assert_allclose(np.array(gradient(mx.array(logits, mx.float32))), slopes, atol=2e-5)


@pytest.mark.parametrize("kind", ["d-pace", "accept-until-fail"])
def test_whole_blocks_are_seen_whatever_the_chunk(kind):
    model, batch = drafter(), pad_documents(pack_of_three())
    plain = ObjectiveSettings(kind)
    whole = drafter_loss(model, batch, plain).item()
    for chunk in (1, 17):
        assert drafter_loss(model, batch, replace(plain, chunk=chunk)).item() == pytest.approx(whole, rel=1e-6)


def test_d_pace_has_alpha_and_no_gamma():
    model, batch = drafter(), pad_documents(pack_of_three())
    plain = ObjectiveSettings("d-pace", alpha=0.3)
    whole = drafter_loss(model, batch, plain).item()
    assert drafter_loss(model, batch, replace(plain, gamma=1.0)).item() == pytest.approx(whole, rel=1e-6)
    assert drafter_loss(model, batch, replace(plain, alpha=0.9)).item() != pytest.approx(whole, rel=0.05)


def test_logits_in_half_precision_are_scored_in_float32():
    model, batch = drafter(), pad_documents(pack_of_three())
    head, kept = model._target.head, []
    model._target.head = lambda hidden: head(hidden).astype(mx.bfloat16)

    @register_objective("test-records", needs_target_logits=True)
    def records(predictions):
        kept.append((predictions.logits_TV.dtype, predictions.target_logits_TV.dtype))
        return token_cross_entropy(predictions)

    drafter_loss(model, batch, ObjectiveSettings("test-records"), model._target.head)
    assert set(kept) == {(mx.float32, mx.float32)}


def test_options_of_a_plug_ins_objective_reach_it_or_are_named():
    @register_objective("test-first_only")
    def first_only(predictions, upto):
        return token_cross_entropy(predictions) * (predictions.positions_T <= upto)

    model, batch = drafter(), pad_documents(pack_of_three())
    one, five = (drafter_loss(model, batch, ObjectiveSettings("test-first_only", options={"upto": n})) for n in (1, 5))
    assert 0 < one.item() < five.item() == drafter_loss(model, batch, ObjectiveSettings()).item()
    with pytest.raises(SettingsError, match=r"The objective 'test-first_only' has no option 'up'; did you mean 'upto'"):
        ObjectiveSettings("test-first_only", options={"upto": 1, "up": 1})


def test_an_objective_that_gives_one_loss_for_all_predictions_is_refused():
    register_objective("scalar")(lambda predictions: token_cross_entropy(predictions).mean())
    message = (
        r"^The objective 'scalar' returns an array of shape \[\]; expected one loss for each prediction, \[\d+\]\.$"
    )
    with pytest.raises(TrainingError, match=message):
        drafter_loss(drafter(), pad_documents(pack_of_three()), ObjectiveSettings("scalar"))


PLUGIN = """
from dflash.training import register_objective

@register_objective("test-doubled", needs_target_logits=True)
def doubled(predictions, factor=2.0):
    best = predictions.target_logits_TV.max(-1) - predictions.logits_TV.max(-1)
    return factor * best ** 2
"""


def test_a_recipe_trains_with_the_objective_of_a_plug_in_file(folder, tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    sets = [f"run.folder={tmp_path / 'run'}", "run.steps=2", "objective={kind: test-doubled, options: {factor: 3.0}}"]
    command = ["train", write_recipe(folder), *(option for value in sets for option in ("--set", value))]
    assert_one_error(invoke(*command), "objective: kind is 'test-doubled'; known are")
    answer = invoke("--plugin", tmp_path / "mine.py", *command)
    assert answer.exit_code == 0, answer.stderr
    recorded = json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]["objective"]
    assert (recorded["kind"], recorded["options"]) == ("test-doubled", {"factor": 3})
    assert load_drafter(tmp_path / "run" / "drafter").block_size == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "KL"}, "kind is 'KL'; known are accept-until-fail, cross_entropy, d-pace, kl, l1"),
        ({"kind": "l1", "l1_weight": 1.5}, r"l1_weight must be .*1.*got 1\.5"),
        ({"kind": "cross_entrpy"}, "kind is 'cross_entrpy'; did you mean 'cross_entropy'"),
        ({"kind": "mix", "kl_weight": 1.5}, r"kl_weight must be .*1.*got 1\.5"),
        ({"kind": "d-pace", "alpha": 2}, r"alpha must be .*1.*got 2"),
        ({"gamma": 0}, "gamma must be above 0, got 0"),
    ],
)
def test_impossible_objectives_are_refused_by_name(values, message):
    with pytest.raises(SettingsError, match=message):
        from_dict(ObjectiveSettings, values, "recipe")


def test_an_objective_without_what_it_compares_with_is_refused():
    batch = pad_documents(pack_of_three())
    with pytest.raises(ValueError, match="needs the target's head"):
        drafter_loss(drafter(), batch, ObjectiveSettings("kl"))
    with pytest.raises(ValueError, match="needs the target's final hidden states"):
        drafter_loss(drafter(), batch._replace(target_hidden=None), ObjectiveSettings("mix"), lambda h: h)


@pytest.mark.parametrize("kind", ["cross_entropy", "kl", "mix"])
def test_scores_without_gradients_have_the_loss_of_training_and_count_every_position(kind):
    model, batch = drafter(), pad_documents(pack_of_three())
    head, settings = model._target.head, ObjectiveSettings(kind, chunk=7)
    found = score(model, batch, settings, head)
    assert found.loss / found.weight == pytest.approx(drafter_loss(model, batch, settings, head).item(), rel=1e-5)
    expected = np.zeros((2, 5), int)
    with mx.stream(mx.cpu):
        for i, token, _, block in predictions(model, pack_of_three()):
            expected[:, i] += 1, block.logits[i].argmax().item() == token
    assert (found.predictions.tolist(), found.hits["accuracy"].tolist()) == tuple(expected.tolist())
    assert found.results()["heldout_accuracy"] == pytest.approx((expected[1] / expected[0]).tolist())
