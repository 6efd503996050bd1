"""Loss and accuracy of held-out sequences without decoding; the prompts that are decoded."""

from dataclasses import replace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.acceptance import measure
from support.runs import read_log, recipe

import dflash
from dflash.core.errors import CheckpointError, TrainingError
from dflash.evaluation.texts import Texts
from dflash.training import evaluate
from dflash.training.data.dataset import open_dataset
from dflash.training.data.sequences import Sequences
from dflash.training.drafters.init import new_drafter
from dflash.training.drafters.loss import drafter_loss
from dflash.training.export import export
from dflash.training.train import train


def test_answers_without_a_block_have_no_acceptance_and_do_not_stop_a_run(folder, tmp_path, monkeypatch):
    whole = Texts.all
    monkeypatch.setattr(Texts, "all", lambda self, prompts, most, **options: whole(self, prompts, 1, **options))
    train(recipe(folder, "short", "run.steps=2", "run.evaluate_every=1"))
    assert [line["acceptance_length"] for line in read_log(folder / "short") if "blocks" in line] == [None, None]
    assert dflash.load_drafter(folder / "short" / "drafter").block_size == 4
    with pytest.raises(CheckpointError, match=r"best\.safetensors is missing: .* Export the last weights with --last"):
        export(folder / "short", tmp_path / "best")


def test_an_evaluation_finds_what_decoding_finds_and_writes_no_text_twice(folder, monkeypatch):
    train(recipe(folder, "texts", "run.steps=1", "run.evaluate_tokens=24"))
    (line,) = [line for line in read_log(folder / "texts") if "blocks" in line]
    target, drafter = dflash.load_target(folder / "target"), dflash.load_drafter(folder / "texts" / "drafter")
    heldout = open_dataset(folder / "data", "heldout", target)
    decoded = measure(target, drafter, evaluate.heldout_prompts(heldout, 2), 24)
    assert decoded.committed == 2 * 23, "whole answers"
    assert {name: line[name] for name in decoded.results()} == decoded.results()
    monkeypatch.setattr("dflash.evaluation.texts.write", lambda *_: pytest.fail("the texts are kept"))
    train(recipe(folder, "texts again", "run.steps=1", "run.evaluate_tokens=24"))


def test_heldout_loss_and_accuracy_need_no_decoding_and_leave_the_weights(folder):
    target, values = dflash.load_target(folder / "target"), recipe(folder, "x")
    model, heldout = new_drafter(values.drafter, target), open_dataset(folder / "data", "heldout", target)
    batches = evaluate.heldout_batches(heldout, values.data, target, model.target_layer_ids, False)
    before = {name: mx.array(weight) for name, weight in tree_flatten(model.parameters())}
    found = evaluate.heldout_scores(model, batches, values.objective, target.head, mx.bfloat16)
    for name, weight in tree_flatten(model.parameters()):
        assert weight.dtype == mx.float32
        assert mx.array_equal(weight, before[name]), name
    exact = evaluate.heldout_scores(model, batches, values.objective, target.head)
    losses = [drafter_loss(model, batch(), values.objective) for batch in batches]
    assert len(batches) == 1
    assert exact.results()["heldout_loss"] == pytest.approx(losses[0].item(), rel=1e-5)
    assert found.results()["heldout_loss"] == pytest.approx(losses[0].item(), rel=0.05)
    assert found.predictions.tolist() == exact.predictions.tolist()
    assert exact.predictions[0] == batches[0]().anchors.size
    assert (found + exact).results()["heldout_accuracy"] == pytest.approx(
        ((found.hits["accuracy"] + exact.hits["accuracy"]) / (2 * exact.predictions)).tolist()
    )


def test_heldout_sequences_that_cannot_be_scored_are_a_logged_reason(folder, caplog):
    target, values = dflash.load_target(folder / "target"), recipe(folder, "x")
    sequences = Sequences.from_lists([[65]], [[66]])
    assert evaluate.heldout_batches(sequences, values.data, target, (0, 2), False) == []
    cached = replace(values.data, cached_features=folder / "features")
    with caplog.at_level("INFO", logger="dflash"):
        heldout = open_dataset(folder / "data", "heldout", target)
        assert len(evaluate.heldout_batches(heldout, cached, target, (0, 2), False)) == 1
    assert "The held-out loss runs the target" in caplog.text
    assert "There will be no held-out loss: None of the 1 sequences can be trained on" in caplog.text
    nothing = evaluate.heldout_scores(new_drafter(values.drafter, target), [], values.objective, target.head)
    assert nothing.results() == {"heldout_loss": None, "heldout_accuracy": [0.0] * 3}


def test_heldout_prompts_are_what_stands_before_the_response_or_say_what_to_do():
    sequences = Sequences.from_lists([[1, 2], [], [3, 4, 5], [6], [7]], [[9], [9], [9, 9], [], [9]])
    assert evaluate.heldout_prompts(sequences, 9) == [[1, 2], [3, 4, 5], [7]]
    assert evaluate.heldout_prompts(sequences, 2, longest=2) == [[1, 2], [7]]
    long = Sequences.from_lists([[1, 2], [3, 4, 5]], [[9], [9, 9]])
    with pytest.raises(TrainingError, match=r"All 2 held-out prompts have more than 1 tokens.* Lower run\.eval"):
        evaluate.heldout_prompts(long, 2, longest=1)
    with pytest.raises(TrainingError, match="no prompt to evaluate on"):
        evaluate.heldout_prompts(Sequences.from_lists([[], [6]], [[9], []]), 2)
