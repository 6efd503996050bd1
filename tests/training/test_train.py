"""A training run, from recipe to drafter: interrupted anywhere it ends the same, and bad input is one line."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from support.conversations import write_lines
from support.runs import read_log, write_dataset, write_recipe, write_target
from typer.testing import CliRunner

import dflash
from dflash import cli
from dflash.errors import DFlashError, TrainingError
from dflash.files import exclusive_lock
from dflash.training import evaluate, export
from dflash.training.batches import Batches, anchor_counts, trainable
from dflash.training.data.sequences import Sequences
from dflash.training.drafters.init import mask_token_id, new_drafter
from dflash.training.features import with_target_pass
from dflash.training.loop.fit import FitSettings, fit
from dflash.training.loop.gradients import MeanGradient
from dflash.training.loop.optimizer import AdamWSettings, MuonSettings, Optimizer
from dflash.training.recipe import DataSettings, Recipe
from dflash.training.settings import SettingsError, from_dict, load_settings, to_dict
from dflash.training.train import open_dataset, train

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target and a dataset; runs get folders of their own."""
    folder = tmp_path_factory.mktemp("training")
    write_target(folder / "target")
    write_dataset(folder / "data", folder / "target")
    return folder


def recipe(folder: Path, name: str, *overrides: str) -> Recipe:
    return load_settings(Recipe, write_recipe(folder), [f"run.folder={folder / name}", *overrides])


def result(run: Path) -> tuple[bytes, ...]:
    return tuple(
        (run / name).read_bytes() for name in ("drafter/model.safetensors", "best.safetensors", "state.safetensors")
    )


@pytest.fixture(scope="module")
def undisturbed(folder) -> Path:
    train(recipe(folder, "undisturbed"))
    return folder / "undisturbed"


def invoke(*args: object):
    return CliRunner().invoke(cli.app, [str(a) for a in args])


# --- a run ----------------------------------------------------------------------------------------------


def test_the_finished_drafter_loads_in_the_published_format_and_decodes_the_targets_own_text(undisturbed, folder):
    decoder = dflash.DFlashSpeculativeDecoder.from_pretrained(folder / "target", undisturbed / "drafter")
    assert decoder.block_size == 4
    assert len(decoder.generate("ab", max_tokens=6)) > 0
    card = (undisturbed / "drafter" / "README.md").read_text()
    assert "Acceptance length" in card
    assert "learning_rate: 0.0006" in card
    assert "--target target --drafter drafter" in card
    assert str(folder) not in card


def test_evaluation_by_decoding_is_logged_every_n_steps_and_at_the_end(undisturbed):
    evaluations = [line for line in read_log(undisturbed) if "acceptance_length" in line]
    assert [line["step"] for line in evaluations] == [3, 6, 8]
    for line in evaluations:
        assert line["blocks"] > 0
        assert line["acceptance_length"] >= 1
        assert len(line["acceptance_by_position"]) == 3


def test_the_loss_falls(folder):
    train(recipe(folder, "longer", "run.steps=60", "run.log_every=15", "run.evaluate_every=1000",
                 "optimizer.learning_rate=1e-2", "data.anchors=8"))  # fmt: skip
    losses = [line["loss"] for line in read_log(folder / "longer") if "loss" in line]
    assert losses[-1] < 0.6 * losses[0]


def test_the_same_recipe_again_does_nothing_more(undisturbed, folder):
    before = result(undisturbed), (undisturbed / "log.jsonl").read_text()
    (undisturbed / "drafter" / ".model-12345678.safetensors").write_bytes(b"half")  # by a killed process
    train(recipe(folder, "undisturbed"))
    assert (result(undisturbed), (undisturbed / "log.jsonl").read_text()) == before
    assert {p.name for p in (undisturbed / "drafter").iterdir()} == {"model.safetensors", "config.json", "README.md"}


def test_gradient_checkpointing_of_the_recipe_reaches_the_loss_and_changes_no_weights(undisturbed, folder, monkeypatch):
    layers, real = [], nn.utils.checkpoint
    monkeypatch.setattr(nn.utils, "checkpoint", lambda layer, run: layers.append(layer) or real(layer, run))
    train(recipe(folder, "checkpointed", "run.grad_checkpoint=true"))
    assert len(layers) == 8 * 2  # steps, batches of a step; the drafter has one layer
    for key, weight in mx.load(str(folder / "checkpointed" / "state.safetensors")).items():
        expected = mx.load(str(undisturbed / "state.safetensors"))[key]
        np.testing.assert_allclose(weight, expected, rtol=1e-3, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("kind", ["sliding"])
def test_a_second_architecture_trains_by_its_adapter(tmp_path, kind):
    write_target(tmp_path / "target", kind)
    write_dataset(tmp_path / "data", tmp_path / "target")
    train(recipe(tmp_path, "run", "run.steps=2"))
    assert dflash.load_drafter(tmp_path / "run" / "drafter").config.num_target_layers == 4


# --- interruption ---------------------------------------------------------------------------------------

PROGRAM = """
import sys
sys.argv[0] = "dflash"
from dflash import cli
cli.main()
"""


def start(folder: Path, name: str, *overrides: str) -> subprocess.Popen:
    sets = [a for o in (f"run.folder={folder / name}", *overrides) for a in ("--set", o)]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "train", str(folder / "recipe.yaml"), *sets],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(dflash.__file__).parents[1])},
    )


def wait_for(condition, process: subprocess.Popen, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)


def lines_logged(run: Path) -> int:
    return len((run / "log.jsonl").read_text().splitlines()) if (run / "log.jsonl").exists() else 0


LONG = "run.steps=120", "run.evaluate_every=25"  # long enough to be caught in the middle


@pytest.fixture(scope="module")
def long_run(folder) -> Path:
    train(recipe(folder, "long", *LONG))
    return folder / "long"


def test_a_run_killed_at_ten_random_moments_ends_with_the_same_bytes(long_run, folder):
    write_recipe(folder)
    run, rng, codes = folder / "killed", random.Random(5), []
    for _ in range(10):
        wanted = lines_logged(run) + rng.randint(0, 4)  # 0: while it starts
        process = start(folder, "killed", *LONG)
        wait_for(lambda wanted=wanted: lines_logged(run) >= wanted, process)
        time.sleep(rng.random() * 0.03)
        process.kill()
        process.communicate(timeout=30)
        codes.append(process.returncode)
    assert codes == [-signal.SIGKILL] * 10
    train(recipe(folder, "killed", *LONG))
    assert result(run) == result(long_run)
    steps = [(line["step"], "loss" in line) for line in read_log(run)]
    assert steps == [(line["step"], "loss" in line) for line in read_log(long_run)]


def test_ctrl_c_saves_exits_with_130_and_the_run_continues_to_the_same_bytes(long_run, folder):
    write_recipe(folder)
    run, unsaved = folder / "stopped", "run.checkpoint_every=1000"
    process = start(folder, "stopped", *LONG, unsaved)
    wait_for(lambda: lines_logged(run) >= 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert (run / "state.safetensors").exists()
    assert "Traceback" not in errors
    train(recipe(folder, "stopped", *LONG, unsaved))
    assert result(run) == result(long_run)


class Stop(Exception):
    """Stands for the machine being switched off."""


def toy_fit(
    folder: Path,
    settings: FitSettings,
    stop_at: int | None = None,
    wrong: dict[int, float] | None = None,
    evaluate: Callable[[], dict] | None = None,
):
    """A matrix that is to become another one; batch ``n`` comes from ``n``, or is as ``wrong`` says."""
    model = mx_linear()

    def batch(number: int):
        if number == stop_at:
            raise Stop
        rng = np.random.default_rng(number)
        return mx.array(rng.normal(size=(4, 3)).astype(np.float32) * (wrong or {}).get(number, 1.0)), mx.array(1.0)

    def loss(model, batch):
        x, y = batch
        return ((model(x) - y) ** 2).mean()

    score = None if evaluate is None else "score"
    fit(model, batch, loss, settings, folder, evaluate, score=score, name_batch="batch {} (sequences 7)".format)
    return np.array(model.weight)


def mx_linear():
    mx.random.seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("optimizer", [AdamWSettings(learning_rate=0.01), MuonSettings(warmup_steps=2)])
def test_any_stop_continues_bit_for_bit_with_either_optimizer(tmp_path, optimizer):
    settings = FitSettings(steps=9, batches_per_step=3, checkpoint_every=2, optimizer=optimizer)
    straight = toy_fit(tmp_path / "straight", settings)
    for stop_at in (5, 14, 22):
        with pytest.raises(Stop):
            toy_fit(tmp_path / "broken", settings, stop_at)
    assert np.array_equal(straight, toy_fit(tmp_path / "broken", settings))


def test_a_stop_in_an_evaluation_loses_the_evaluation_alone(tmp_path):
    settings, asked = FitSettings(steps=6, log_every=1, checkpoint_every=100, evaluate_every=3), []

    def evaluate(step: int | None = None):
        asked.append(step)
        if step is not None:
            raise Stop
        return {"score": float(len(asked))}

    with pytest.raises(Stop):
        toy_fit(tmp_path / "stopped", settings, evaluate=lambda: evaluate(3))
    assert mx.load(str(tmp_path / "stopped" / "state.safetensors"), return_metadata=True)[1]["step"] == "3"
    weights = toy_fit(tmp_path / "stopped", settings, evaluate=evaluate)
    assert asked == [3, None, None]
    assert np.array_equal(weights, toy_fit(tmp_path / "straight", settings, evaluate=evaluate))
    one, other = (read_log(tmp_path / name) for name in ("stopped", "straight"))
    assert [line.keys() for line in one] == [line.keys() for line in other]
    toy_fit(tmp_path / "stopped", settings, evaluate=lambda: evaluate(6))  # done already


def test_accumulated_batches_give_the_weights_of_batches_side_by_side(tmp_path):
    results = [
        toy_fit(tmp_path / str(threads), FitSettings(steps=5, batches_per_step=4, threads=threads))
        for threads in (1, 2, 4)
    ]
    for weights in results[1:]:
        np.testing.assert_allclose(results[0], weights, rtol=1e-6)


def test_mean_gradient_is_that_of_one_large_batch():
    model, rng = mx_linear(), np.random.default_rng(0)
    x = rng.normal(size=(8, 3)).astype(np.float32)

    def loss(model, batch):
        return (model(batch[0]) ** 2).mean()

    parts = iter([(mx.array(part),) for part in np.split(x, 4)])
    losses, gradients = MeanGradient(model, loss, 1)(model.trainable_parameters(), parts)
    whole, expected = MeanGradient(model, loss, 1)(model.trainable_parameters(), iter([(mx.array(x),)]))
    assert np.mean(losses) == pytest.approx(whole[0], rel=1e-5)
    np.testing.assert_allclose(np.array(gradients["weight"]), np.array(expected["weight"]), rtol=1e-4)


def test_a_step_leaves_the_model_its_own_weights_whatever_the_loss_computes_in():
    model = mx_linear()

    def loss(model, batch):
        model.update(tree_map(lambda w: w.astype(mx.bfloat16), model.trainable_parameters()))
        return (model(batch[0]) ** 2).mean()

    parameters = model.trainable_parameters()
    MeanGradient(model, loss, 1)(parameters, iter([(mx.ones((4, 3)),)]))
    assert model.weight is parameters["weight"]
    assert model.weight.dtype == mx.float32


# --- a loss that blows up -------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "message"), [(float("nan"), "loss is nan"), (1e4, "more than 5 times the")])
def test_a_bad_loss_names_its_batch_and_keeps_the_checkpoint_before_it(tmp_path, factor, message):
    settings = FitSettings(steps=30, batches_per_step=2, checkpoint_every=1, max_loss_spike=5.0)
    with pytest.raises(TrainingError, match=message) as error:
        toy_fit(tmp_path, settings, wrong={41: factor})
    assert "step 21, in batch 41 (sequences 7)" in str(error.value)
    arrays, metadata = mx.load(str(tmp_path / "state.safetensors"), return_metadata=True)
    assert metadata["step"] == "20"
    assert all(np.isfinite(np.array(a)).all() for a in arrays.values())


def test_a_bad_batch_of_a_run_is_named_with_its_sequences(folder, monkeypatch):
    monkeypatch.setattr("dflash.training.train.with_target_pass", spoiled_from(9))
    with pytest.raises(TrainingError, match=r"loss is nan at step 5, in batch 9 \(sequences \d+(, \d+)*\)") as error:
        train(recipe(folder, "nan"))
    named = [int(n) for n in re.findall(r"sequences ([\d, ]+)\)", str(error.value))[0].split(",")]
    assert set(named) < set(range(24))


def spoiled_from(number: int):
    def spoiled(*args):
        batch = with_target_pass(*args)

        def one(n):
            made = batch(n)
            return made._replace(features=made.features * (float("nan") if n >= number else 1.0))

        return one

    return spoiled


# --- data -----------------------------------------------------------------------------------------------


def test_sequences_that_cannot_be_trained_on_are_left_out_and_counted(caplog):
    sequences = Sequences.from_lists([[1], [1, 2], [1], [3]], [[5, 6], [7], [5] * 30, [8, 9, 9]])
    assert anchor_counts(sequences).tolist() == [1, 0, 29, 2]
    kept, numbers = trainable(sequences, max_length=20)
    assert numbers.tolist() == [0, 3]
    assert kept.tokens.tolist() == [1, 5, 6, 3, 8, 9, 9]
    assert "1 of more than max_length 20 tokens, 1 without two response tokens" in caplog.text


@pytest.mark.parametrize(("answers", "message"), [([[], [4]], "2 without two response"), ([[4] * 40] * 2, "2 of more")])
def test_data_of_which_nothing_can_be_used_is_an_error(answers, message):
    with pytest.raises(TrainingError, match=message):
        trainable(Sequences.from_lists([[1], [2]], answers), max_length=20)


def test_every_epoch_has_every_sequence_once_and_other_anchors(folder):
    sequences = open_dataset(folder / "data", "train", None)
    batches = Batches(sequences, DataSettings(folder, 40, 80, 2), epochs=2)
    seen = [int(n) for i in range(len(batches)) for n in re.findall(r"\d+", batches.name(i).split("sequences")[1])]
    assert sorted(seen) == sorted([*range(24), *range(24)])
    assert mx.array_equal(batches(3)[2], batches(3)[2])


def test_a_batch_has_no_more_blocks_than_asked_for_but_one_a_sequence(folder):
    sequences = open_dataset(folder / "data", "train", None)
    for limit in (1, 7, 30):
        batches = Batches(sequences, DataSettings(folder, 40, 80, anchors=9, max_blocks_per_batch=limit), epochs=1)
        for i in range(len(batches)):
            sequences_in, per_sequence = batches(i)[2].shape
            assert sequences_in * per_sequence <= max(limit, sequences_in)
            assert per_sequence <= 9


def test_a_missing_dataset_is_one_line(folder):
    answer = invoke("train", write_recipe(folder), "--set", f"data.folder={folder / 'nothing'}")
    assert (answer.exit_code, answer.stderr.count("\n")) == (1, 1)
    assert "dflash prepare" in answer.stderr


def test_a_run_folder_that_cannot_be_written_to_is_one_line(folder, tmp_path):
    (tmp_path / "file").write_text("")
    answer = invoke("train", write_recipe(folder), "--set", f"run.folder={tmp_path / 'file' / 'run'}")
    assert (answer.exit_code, answer.stderr.count("\n")) == (1, 1)
    assert "Not a directory" in answer.stderr


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(folder, monkeypatch):
    values, real, written = ["--set", f"run.folder={folder / 'full'}"], mx.save_safetensors, []

    def full(name, *args, **kwargs):
        written.append(name)
        if len(written) > 2:
            Path(name).write_bytes(b"half")
            raise RuntimeError("[write] Unable to write 9 bytes")
        real(name, *args, **kwargs)

    monkeypatch.setattr(mx, "save_safetensors", full)
    answer = invoke("train", write_recipe(folder), *values)
    assert answer.exit_code == 1
    assert "Cannot write" in answer.stderr.splitlines()[-1]
    monkeypatch.undo()
    assert mx.load(str(folder / "full" / "state.safetensors"), return_metadata=True)[1]["step"] == "3"
    assert [p.name for p in (folder / "full").glob(".*")] == [".lock"]


def test_features_are_those_of_the_adapter(folder):
    target = dflash.load_target(folder / "target")
    tokens = mx.array([[1, 2, 3, 4]])
    features = with_target_pass(lambda _: (tokens, tokens, tokens), target, (0, 2), False)(0).features
    expected = target.forward_hidden(tokens, target.make_cache(), (0, 2))[1]
    assert mx.abs(features - expected).max() < 1e-5


# --- recipes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted(p for p in CONFIGS.glob("*.yaml") if "pair" not in p.stem), ids=lambda p: p.stem
)
def test_the_ready_recipes_hold_the_published_settings(path):
    ready = load_settings(Recipe, path)
    assert ready.optimizer == AdamWSettings(learning_rate=6e-4, warmup=0.04, clip=1.0)
    assert (ready.drafter.block_size, ready.objective.gamma, ready.run.epochs) == (16, 7.0, 6)
    assert (ready.data.anchors, ready.data.max_length) == (512, 3072)
    assert "# Memory" in path.read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rat=1", "unknown key 'learning_rat'; did you mean 'learning_rate'"),
        ("optimiser.kind=adamw", "unknown key 'optimiser'; did you mean 'optimizer'"),
        ("optimizer.kind=adamv", "kind is 'adamv'; did you mean 'adamw'"),
        ("optimizer.warmup=4", "warmup is a share"),
        ("run.epochs=0", "epochs must be above 0"),
        ("run.epochs=many", "epochs must be of type int, got 'many'"),
        ("data.batch_tokens=10", "cannot hold a sequence of max_length 40"),
        ("drafter.block_size=1", "at least 2"),
        ("drafter.head_dim=7", "head_dim must be even, got 7"),
        ("drafter.seed=-1", "seed must be at least 0"),
        ("data.seed=-1", "seed must be at least 0"),
        ("optimizer.weight_decay=-1", "weight_decay must be at least 0"),
        ("optimizer={kind: muon, clip: 0}", "clip must be above 0"),
        ("drafter.target_layer_ids=[1, 1]", "different layer numbers"),
        ("run.folder", "expected key.sub=value"),
        ("target.name=x", "holds no keys"),
    ],
)
def test_a_wrong_setting_is_one_line_before_any_model_loads(folder, monkeypatch, override, message):
    monkeypatch.setattr("dflash.training.train.load_target", None)
    answer = invoke("train", write_recipe(folder), "--set", override)
    assert answer.exit_code == 1
    assert answer.stderr.startswith("error: ")
    assert answer.stderr.count("\n") == 1
    assert message in answer.stderr


def test_overrides_are_yaml_values_and_numbers_may_be_written_with_exponents(folder):
    values = recipe(
        folder, "x", "optimizer.learning_rate=3e-4", "drafter.target_layer_ids=[1, 3]", "run.max_loss_spike=null"
    )
    assert values.optimizer.learning_rate == 3e-4
    assert values.drafter.target_layer_ids == (1, 3)
    assert values.run.max_loss_spike is None
    assert recipe(folder, "x", "optimizer={kind: muon}").optimizer == MuonSettings()


def test_a_recipe_survives_plain_data(folder):
    values = recipe(folder, "x")
    assert from_dict(Recipe, json.loads(json.dumps(to_dict(values))), "there") == values
    with pytest.raises(SettingsError, match="expected keys and values"):
        from_dict(Recipe, [1], "there")


def test_a_run_folder_of_another_recipe_or_other_data_is_refused(undisturbed, folder, tmp_path):
    with pytest.raises(TrainingError, match=r"run with recipe.optimizer.learning_rate 0.0006, this one has 0.001"):
        train(recipe(folder, "undisturbed", "optimizer.learning_rate=1e-3"))
    write_dataset(tmp_path / "data", folder / "target", seed=1)
    with pytest.raises(TrainingError, match=r"run with dataset\."):
        train(recipe(folder, "undisturbed", f"data.folder={tmp_path / 'data'}"))


def test_a_run_that_an_explosion_stopped_goes_on_with_a_greater_limit(folder):
    short = "run.steps=20", "run.evaluate_every=100"
    with pytest.raises(TrainingError, match=r"more than 1 times .* or go on with a greater max_loss_spike"):
        train(recipe(folder, "exploding", *short, "run.max_loss_spike=1.0000001"))
    train(recipe(folder, "exploding", *short, "run.max_loss_spike=null"))
    assert read_log(folder / "exploding")[-1]["step"] == 20


def test_the_mask_token_is_a_text_an_id_or_the_tokenizers_own(folder):
    target = dflash.load_target(folder / "target")
    assert mask_token_id("<|mask|>", target) == target.tokenizer.get_vocab()["<|mask|>"]
    assert mask_token_id(263, target) == 263
    for wrong, message in (("<nix>", "no token '<nix>'"), (264, "not among the target's 264"), (None, "no mask token")):
        with pytest.raises(TrainingError, match=message):
            mask_token_id(wrong, target)


def test_sizes_that_the_recipe_leaves_open_are_the_targets(folder):
    values = recipe(folder, "x", "drafter.intermediate_size=null")
    config = new_drafter(values.drafter, dflash.load_target(folder / "target")).config
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (48, 4, 2)
    assert (config.head_dim, config.rope_theta) == (12, 10_000.0)


# --- optimiser ------------------------------------------------------------------------------------------


def test_adamw_warms_up_linearly_and_decays_as_a_cosine():
    settings = AdamWSettings()
    shares = [settings.lr_scale(step, 1000) for step in range(1000)]
    assert shares[:40] == pytest.approx([(i + 1) / 41 for i in range(40)])
    assert shares[40] == 1
    assert shares[520] == pytest.approx(0.5)
    assert shares[-1] < 1e-5


def test_adamw_clips_the_gradient_and_corrects_its_bias():
    parameters, gradients = {"w": mx.zeros((4,))}, {"w": mx.full((4,), 50.0)}
    updated, norm = Optimizer(parameters, AdamWSettings(learning_rate=0.1)).update(parameters, gradients, 0.5)
    assert norm.item() == pytest.approx(100)
    assert updated["w"].tolist() == pytest.approx([-0.05] * 4, rel=1e-4)  # the first step is one learning rate


# --- evaluation and export ------------------------------------------------------------------------------


def test_acceptance_by_position_adds_up_to_the_acceptance_length(folder):
    from support.models import ScriptedDrafter, plain_greedy

    target, prompt = dflash.load_target(folder / "target"), [65, 66, 67]
    text, _ = plain_greedy(target.model, prompt, 60)
    found = evaluate.measure(target, ScriptedDrafter([*prompt, *text], 264, p=0.7, block_size=5), [prompt], 41)
    full = found.verified[-1] == found.blocks
    assert found.committed == 40
    assert found.by_position == sorted(found.by_position, reverse=True)
    if full:
        assert found.length == pytest.approx(1 + sum(found.by_position))


def test_answers_without_a_block_have_no_acceptance_and_do_not_stop_a_run(folder):
    train(recipe(folder, "short", "run.steps=2", "run.evaluate_every=1", "run.evaluate_tokens=1"))
    assert [line["acceptance_length"] for line in read_log(folder / "short") if "blocks" in line] == [None, None]
    assert dflash.load_drafter(folder / "short" / "drafter").block_size == 4


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
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_a_killed_process_holds_nothing(tmp_path):
    code = "import os, sys, pathlib, dflash.files as f\nwith f.exclusive_lock(pathlib.Path(sys.argv[1])): os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, tmp_path]).returncode == 9
    with exclusive_lock(tmp_path):
        pass


def test_eval_scores_a_drafter_on_a_prompt_file(undisturbed, folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n{"prompt": "Count"}\n')
    common = ["eval", undisturbed / "drafter", "--target", folder / "target", "--prompts", prompts, "--max-tokens", "9"]
    scores = json.loads(invoke(*common, "--json").stdout)
    assert set(scores) == {"prompts", "acceptance_length", "acceptance_by_position", "blocks", "generated_tokens"}
    assert (scores["prompts"], len(scores["acceptance_by_position"])) == (2, 3)
    assert "acceptance length" in invoke(*common).stdout


def test_eval_reads_conversations_and_names_a_line_that_is_too_long(undisturbed, folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    common = ["eval", undisturbed / "drafter", "--target", folder / "target", "--max-tokens", "9", "--json"]
    scores = []
    for row in ({"prompt": "Hi"}, {"messages": talk}):
        prompts.write_text(json.dumps(row) + "\n")
        scores.append(json.loads(invoke(*common, "--prompts", prompts).stdout))
    assert scores[0] == scores[1]
    longest = dflash.load_target(folder / "target").max_length
    prompts.write_text('{"prompt": "Hi"}\n' + json.dumps({"prompt": "a" * longest}) + "\n")
    answer = invoke(*common, "--prompts", prompts)
    assert answer.exit_code == 1
    assert re.search(rf"prompts.jsonl, line 2: \d+ tokens and 9 new .* the target's {longest};", answer.stderr)
    answer = invoke(*common, "--prompts", tmp_path / "nope")
    assert (answer.exit_code, answer.stderr.count("\n")) == (1, 1)


def test_export_writes_best_or_last_and_refuses_what_is_no_run(undisturbed, tmp_path):
    assert invoke("export", undisturbed, tmp_path / "best").exit_code == 0
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == result(undisturbed)[0]
    assert invoke("export", undisturbed, tmp_path / "last", "--last").exit_code == 0
    assert "not evaluated" in (tmp_path / "last" / "README.md").read_text()
    (tmp_path / "last" / "recipe.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for wrong, out in [*((tmp_path / name, "x") for name in (".", "best", "last")), (undisturbed, "file")]:
        answer = invoke("export", wrong, tmp_path / out)
        assert (answer.exit_code, answer.stderr.count("\n")) == (1, 1)


def test_export_overwrites_a_drafter_and_nothing_else(undisturbed, tmp_path):
    for _ in range(2):
        assert invoke("export", undisturbed, tmp_path).exit_code == 0
    (tmp_path / "mine.txt").write_text("")
    answer = invoke("export", undisturbed, tmp_path)
    assert answer.exit_code == 1
    assert "holds other files, such as 'mine.txt'; choose a new folder, or remove them." in answer.stderr


def test_nothing_is_pushed_without_being_asked_and_a_refusal_is_one_line(undisturbed, tmp_path, monkeypatch):
    calls, refused = [], RuntimeError("401 Unauthorized\nlong text")

    class Hub:
        def create_repo(self, name, exist_ok):
            calls.append(name)
            if refused:
                raise refused
            return f"https://hub/{name}"

        def upload_folder(self, repo_id, folder_path, allow_patterns):
            calls.append((repo_id, folder_path, sorted(allow_patterns)))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert invoke("export", undisturbed, tmp_path / "a").exit_code == 0
    assert not calls
    answer = invoke("export", undisturbed, tmp_path / "a", "--push", "me/it")
    assert calls == ["me/it"]
    assert answer.stderr == "error: The hub did not take 'me/it': 401 Unauthorized\n"
    refused = None
    assert invoke("export", undisturbed, tmp_path / "a", "--push", "me/it").stdout.strip() == "https://hub/me/it"
    assert calls[-1] == ("me/it", str(tmp_path / "a"), sorted(export.EXPORTED))
    with pytest.raises(DFlashError, match="holds no drafter"):
        export.push(tmp_path / "nothing", "me/it")
