"""A training run, from recipe to drafter: interrupted anywhere it ends the same, and bad input is one line."""

import atexit
import dataclasses
import os
import re
import signal
import sys
import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
import yaml
from support.cli import assert_one_error, invoke
from support.conversations import write_lines
from support.models import plain_greedy
from support.runs import kill_at_random_moments, read_log, recipe, result, write_dataset, write_recipe

import dflash
import dflash.training.train as train_module
from dflash.core import backend
from dflash.core.errors import DFlashError, StopTraining, TrainingError
from dflash.core.files import exclusive_lock
from dflash.training.callbacks import CALLBACKS
from dflash.training.drafters.init import new_drafter
from dflash.training.features import with_target_pass
from dflash.training.loop.run_folder import read_progress
from dflash.training.train import cache_features, train


def test_the_finished_drafter_loads_in_the_published_format_and_decodes_the_targets_own_text(undisturbed, folder):
    decoder = dflash.DFlashSpeculativeDecoder.from_pretrained(folder / "target", undisturbed / "drafter")
    assert decoder.block_size == 4
    prompt = [65, 66, 67]
    found = [token for response in decoder.stream_generate(prompt, max_tokens=12) for token in response.tokens]
    assert found == plain_greedy(decoder.loaded_target.model, prompt, 12)[0]
    card = (undisturbed / "drafter" / "README.md").read_text()
    assert "Acceptance length" in card
    assert "learning_rate: 0.0006" in card
    assert "# A DFlash drafter for the target in `target`\n" in card
    assert "--target TARGET --drafter DRAFTER\n```\n\nTARGET is the target's folder, DRAFTER is this folder.\n" in card
    assert "greedy decoding of 2 held-out prompts, up to 8 tokens each" in card
    assert str(folder) not in card


def test_evaluation_by_decoding_is_logged_every_n_steps_and_at_the_end(undisturbed):
    evaluations = [line for line in read_log(undisturbed) if "acceptance_length" in line]
    assert [line["step"] for line in evaluations] == [3, 6, 8]
    for line in evaluations:
        assert line["blocks"] > 0
        assert line["acceptance_length"] >= 1
        assert len(line["acceptance_by_position"]) == len(line["heldout_accuracy"]) == 3
        assert all(0 <= accuracy <= 1 for accuracy in line["heldout_accuracy"])
    assert evaluations[-1]["heldout_loss"] < evaluations[0]["heldout_loss"]


def test_the_same_recipe_again_does_nothing_more_and_says_that_it_is_finished(undisturbed, folder, caplog):
    caplog.set_level("INFO")
    before = result(undisturbed), (undisturbed / "log.jsonl").read_text()
    (undisturbed / "drafter" / ".model-12345678.safetensors").write_bytes(b"half")  # by a killed process
    for changed in (["run.max_loss_spike=null", "run.log_every=7"], []):  # what may change in a run that continues
        train(recipe(folder, "undisturbed", *changed))
        assert (result(undisturbed), (undisturbed / "log.jsonl").read_text()) == before
    assert {p.name for p in (undisturbed / "drafter").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    assert "undisturbed is finished: all 8 steps are done." in caplog.text
    assert "Continuing" not in caplog.text


def test_gradient_checkpointing_of_the_recipe_reaches_the_loss(folder, monkeypatch):
    layers, real = [], nn.utils.checkpoint
    monkeypatch.setattr(nn.utils, "checkpoint", lambda layer, run: layers.append(layer) or real(layer, run))
    train(recipe(folder, "checkpointed", "run.grad_checkpoint=true", "run.steps=1"))
    assert len(layers) == 2  # batches of a step; the drafter has one layer


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_bytes(folder):
    sets = ["run.steps=40", "run.evaluate_every=25"]  # long enough to be caught in the middle
    whole, run = train(recipe(folder, "long", *sets)).parent, folder / "killed"
    command = [sys.executable, "-m", "dflash", "train", str(write_recipe(folder))]
    for setting in (f"run.folder={run}", *sets):
        command += ["--set", setting]
    kill_at_random_moments(command, run, 10)
    train(recipe(folder, "killed", *sets))
    assert result(run) == result(whole)
    one, other = ([(line["step"], "loss" in line) for line in read_log(place)] for place in (run, whole))
    assert one == other


@pytest.mark.parametrize(("how", "code"), [("Ctrl-C", 130), ("StopTraining", 0)])
def test_a_stopped_run_saves_exits_with_its_code_and_continues_to_the_same_bytes(undisturbed, folder, how, code):
    run, unsaved, seen = folder / f"stopped-{code}", "run.checkpoint_every=1000", []

    def stops_early(run):
        def on_log(line):
            seen.append((mx.array(run.model.fc.weight), int(run.optimizer.step), float(run.optimizer.learning_rate)))
            if line["step"] == 2 and how == "Ctrl-C":
                os.kill(os.getpid(), signal.SIGINT)
            elif line["step"] == 2:
                raise StopTraining("held-out loss has not fallen")

        return on_log

    sets = [f"run.folder={run}", unsaved, "run.callbacks=[stops-for-a-test]"]
    with CALLBACKS.temporary("stops-for-a-test", stops_early):
        answer = invoke("train", write_recipe(folder), *(part for o in sets for part in ("--set", o)))
    assert (answer.exit_code, answer.stdout) == (code, ""), answer.output
    assert read_progress(run / "state.safetensors").step == 3
    assert not (run / "drafter").exists()
    assert [step for _, step, _ in seen] == [line["step"] for line in read_log(run)]
    assert not mx.array_equal(seen[0][0], seen[-1][0])
    assert [rate for *_, rate in seen] == pytest.approx([line["learning_rate"] for line in read_log(run)], rel=1e-4)
    train(recipe(folder, run.name, unsaved))
    assert result(run) == result(undisturbed)


def test_a_bad_batch_of_a_run_is_named_with_its_sequences(folder, monkeypatch):
    def spoiled(*args):
        batch = with_target_pass(*args)
        return lambda n: batch(n)._replace(features=batch(n).features * float("nan")) if n >= 9 else batch(n)

    monkeypatch.setattr("dflash.training.train.with_target_pass", spoiled)
    with pytest.raises(TrainingError, match=r"loss is nan at step 5, in batch 9 \(sequences \d+(, \d+)*\)") as error:
        train(recipe(folder, "nan"))
    named = [int(n) for n in re.findall(r"sequences ([\d, ]+)\)", str(error.value))[0].split(",")]
    assert set(named) < set(range(24))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.folder=nothing", "dflash prepare"),
        ("drafter.options={a: 1}", "no option 'a'"),
        ("drafter.mask_token=none", "no token 'none'"),
        ("run.evaluate_tokens=100000", "run.evaluate_tokens 100000 leaves no room for a prompt"),
        ("run.folder=/proc/x", r"Cannot write to run\.folder .*: .* Set run\.folder to another folder"),
        ("run.folder=file", r"Cannot write to run\.folder file: .* exists"),
    ],
)
def test_a_run_that_is_refused_is_one_line_and_leaves_no_folder(folder, tmp_path, monkeypatch, setting, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert_one_error(invoke("train", write_recipe(folder), "--set", "run.folder=refused", "--set", setting), message)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_features_that_cannot_be_written_are_one_line(folder):
    answer = invoke("cache-features", write_recipe(folder), "--set", "data.cached_features=/proc/x")
    assert_one_error(answer, r"Cannot write to data\.cached_features .* Set data\.cached_features to another folder")


def test_a_finished_run_of_muon_is_made_longer_and_one_of_adamw_is_refused_with_advice(undisturbed, folder):
    wsd = "optimizer={kind: muon, warmup_steps: 1, decay_steps: 1}", "run.evaluate_every=100"
    for steps in (2, 4):
        train(recipe(folder, "wsd", *wsd, f"run.steps={steps}"))
    assert [line["step"] for line in read_log(folder / "wsd") if "loss" in line] == [1, 2, 3, 4]
    recorded = (undisturbed / "recipe.json").read_text()
    with pytest.raises(TrainingError, match=r"trained for 8 steps and cannot become a run of 9: .*drafter\.from"):
        train(recipe(folder, "undisturbed", "run.steps=9"))
    assert (undisturbed / "recipe.json").read_text() == recorded


def test_a_run_starts_from_given_weights(undisturbed, folder):
    train(recipe(folder, "tuned", f"drafter.from={undisturbed / 'drafter'}", "run.steps=1",
                 "optimizer.learning_rate=1e-30"))  # fmt: skip
    before, after = (mx.load(str(run / "drafter" / "model.safetensors")) for run in (undisturbed, folder / "tuned"))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(weight, after[name]) for name, weight in before.items())
    card = (folder / "tuned" / "drafter" / "README.md").read_text()
    assert str(folder) not in card
    shown = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])["drafter"]
    config = dflash.load_drafter(folder / "tuned" / "drafter").config
    assert (shown["from"], shown["block_size"]) == ("drafter", 4)
    assert (shown["num_hidden_layers"], shown["head_dim"]) == (config.num_hidden_layers, config.head_dim)


def test_elastic_blocks_are_trained_at_every_length(undisturbed, folder, monkeypatch):
    drafts, real = [], train_module.drafter_loss

    def kept(model, batch, *args, **options):
        drafts.append(batch.drafts)
        return real(model, batch, *args, **options)

    monkeypatch.setattr(train_module, "drafter_loss", kept)
    train(recipe(folder, "elastic", f"drafter.from={undisturbed / 'drafter'}", "drafter.elastic_blocks=true"))
    assert set(drafts) == {1, 2, 3}
    assert dflash.load_drafter(folder / "elastic" / "drafter").config.elastic_blocks
    new = recipe(folder, "x", "drafter.elastic_blocks=true").drafter
    assert new_drafter(new, dflash.load_target(folder / "target")).config.elastic_blocks


def test_callbacks_of_a_recipe_and_on_log_get_the_log(folder):
    lines: list[dict] = []
    also: list[dict] = []

    def kept(run):
        assert run.folder == folder / "listened"
        assert run.recipe["run"]["steps"] == 2
        return lines.append

    with CALLBACKS.temporary("kept-for-a-test", kept):
        train(recipe(folder, "listened", "run.steps=2", "run.callbacks=[kept-for-a-test]"), on_log=also.append)
        assert lines == also == read_log(folder / "listened")
        with pytest.raises(DFlashError, match="Unknown callback 'kept-for-a-tast'; did you mean 'kept-for-a-test'"):
            train(recipe(folder, "listened", "run.callbacks=[kept-for-a-tast]"))


def test_training_from_python_is_visible_unless_logging_shows_it(folder, capsys, caplog):
    train(recipe(folder, "visible-1", "run.steps=1"))
    assert re.search(r"^step 1 loss \d", capsys.readouterr().err, re.MULTILINE)
    caplog.set_level("INFO", "dflash")
    train(recipe(folder, "visible-2", "run.steps=1", "optimizer={kind: muon}"))
    assert "more than the 1 steps of this run, so the learning rate never reaches its peak" in caplog.text
    assert not capsys.readouterr().err


def test_training_in_a_thread_lets_the_thread_end_before_the_process(folder, monkeypatch):
    """Otherwise MLX may abort the process (tests/core/test_backend.py)."""
    waits, register = [], atexit.register
    monkeypatch.setattr(atexit, "register", lambda wait: (waits.append(wait), register(wait)))
    thread = threading.Thread(target=train, args=[recipe(folder, "threaded", "run.steps=1")])
    thread.start()
    thread.join()
    assert backend._let_threads_end in waits
    assert (folder / "threaded" / "drafter" / "model.safetensors").exists()


def test_a_run_folder_of_another_recipe_or_other_data_is_refused(undisturbed, folder, tmp_path):
    with pytest.raises(TrainingError, match=r"run with recipe.optimizer.learning_rate 0.0006, this one has 0.001"):
        train(recipe(folder, "undisturbed", "optimizer.learning_rate=1e-3", "target=/nowhere"))  # before it loads
    write_dataset(tmp_path / "data", folder / "target", seed=1)
    with pytest.raises(TrainingError, match=r"run with dataset\."):
        train(recipe(folder, "undisturbed", f"data.folder={tmp_path / 'data'}"))


def test_a_second_process_is_kept_out_of_every_folder_that_one_is_writing_to(folder, tmp_path):
    recipe_file = write_recipe(folder)
    commands = [
        ["train", recipe_file, "--set", f"run.folder={tmp_path}"],
        ["cache-features", recipe_file, "--set", f"data.cached_features={tmp_path}"],
        ["prepare", write_lines(folder / "p.jsonl", '{"prompt": "a"}'), "--output", tmp_path],
    ]
    with exclusive_lock(tmp_path):
        for command in commands:
            answer = invoke(*command)
            assert answer.exit_code == 1
            assert f"Another process is writing to {tmp_path}; wait" in answer.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_the_first_sequences_reads_the_features_of_all(folder, caplog):
    short = "run.steps=2", "run.evaluate_every=100"
    few = recipe(folder, "few", "data.sequences=3", *short)
    cached = recipe(folder, "few-cached", "data.sequences=3", *short, f"data.cached_features={folder / 'all'}")
    cache_features(dataclasses.replace(cached, data=dataclasses.replace(cached.data, sequences=None)))
    caplog.set_level("INFO")
    losses = []
    for one in (few, cached):
        train(one)
        losses.append([line["loss"] for line in read_log(one.run.folder) if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert caplog.text.count("3 sequences, 4 batches, 2 steps on") == 2
