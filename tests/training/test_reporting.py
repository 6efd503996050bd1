"""Reporting callbacks get every line of a run's log by mlx-lm's names; a missing package is one line."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx_lm.tuner import callbacks as mlx_lm_callbacks
from support.cli import invoke
from support.runs import read_log, recipe

from dflash.core.errors import DFlashError
from dflash.core.files import read_safetensors
from dflash.training import reporting
from dflash.training.export import EXPORTED, export
from dflash.training.reporting import numbers
from dflash.training.train import train


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_mlx_lms_callback_gets_reports_and_evaluations(name, folder, monkeypatch):
    fake = Mock()
    monkeypatch.setattr(mlx_lm_callbacks, name, fake)
    train(recipe(folder, f"told-{name}", f"run.callbacks=[{name}]", "run.steps=3"))
    lines, logged = read_log(folder / f"told-{name}"), [call.args[0] for call in fake.log.call_args_list]
    assert [call.kwargs for call in fake.log.call_args_list] == [{"step": line["step"]} for line in lines]
    assert logged == [numbers(line) for line in lines]
    assert [v["train_loss"] for v in logged if "train_loss" in v] == [line["loss"] for line in lines if "loss" in line]
    (evaluation,) = [values for values in logged if "val_loss" in values]
    assert {"acceptance_length", "acceptance_by_position/1", "acceptance_by_position/3"} <= set(evaluation)
    settings = fake.init.call_args.kwargs
    assert settings["config"]["run"]["steps"] == 3
    assert f"told-{name}" in str(settings.get("name", settings.get("experiment_name")))


def test_tensorboard_gets_a_scalar_for_each_number(folder, monkeypatch):
    made = Mock()
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=made))
    train(recipe(folder, "told-tensorboard", "run.callbacks=[tensorboard]", "run.steps=2"))
    made.assert_called_once_with(str(folder / "told-tensorboard" / "tensorboard"))
    scalars = [call.args for call in made.return_value.add_scalar.call_args_list]
    assert [(step, value) for name, value, step in scalars if name == "train_loss"] == [
        (line["step"], line["loss"]) for line in read_log(folder / "told-tensorboard") if "loss" in line
    ]
    assert {name for name, *_ in scalars} >= {"val_loss", "learning_rate", "acceptance_length"}


@pytest.mark.filterwarnings("error:constrained_layout")  # names so long that they leave no room for the numbers
def test_the_drafters_of_a_run_are_scored_and_plotted_in_one_command(folder, tmp_path):
    run, plot = folder / "kept", tmp_path / "steps.svg"
    train(recipe(folder, "kept", "run.callbacks=[drafters]", "run.steps=4", "run.evaluate_every=2"))
    steps = sorted((run / "drafters").iterdir())
    assert [step.name for step in steps] == ["000002", "000004"]
    export(run, tmp_path / "last", best=False)
    *kept, last = (read_safetensors(step)["layers.0.mlp.up_proj.weight"] for step in (*steps, tmp_path / "last"))
    assert [mx.array_equal(own, last).item() for own in kept] == [False, True]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n{"prompt": "Count"}\n')
    asked = ["eval", *steps, "--target", folder / "target", "--prompts", prompts, "--raw", "--max-tokens", "12"]
    result = invoke(*asked, "--plot", plot, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["drafters"]
    assert [own["drafter"] for own in found] == list(map(str, steps))
    assert all(f">{name}<" in plot.read_text() for name in (run / "drafters", "000002", "000004"))
    alone = invoke("eval", steps[1], *asked[3:], "--decode", "--json")
    assert found[1]["by_prompt"] == json.loads(alone.stdout)["by_prompt"]


def test_a_kill_during_an_export_loses_no_drafter_and_leaves_no_half_one(folder, monkeypatch):
    class Kill(BaseException):
        pass

    def killed(run: Path, to: Path, best: bool) -> None:
        export(run, to, best)
        (to / "config.json").unlink()
        raise Kill

    drafters, asked = (
        folder / "killed" / "drafters",
        ("run.callbacks=[drafters]", "run.steps=4", "run.evaluate_every=2"),
    )
    for _ in range(2):  # in the evaluation, then as the run continues
        with monkeypatch.context() as patched:
            patched.setattr(reporting, "export", killed)
            with pytest.raises(Kill):
                train(recipe(folder, "killed", *asked))
        assert list(drafters.glob("[!.]*")) == []
    train(recipe(folder, "killed", *asked))
    assert sorted(step.name for step in drafters.iterdir()) == ["000002", "000004"]
    assert {frozenset(file.name for file in step.iterdir()) for step in drafters.iterdir()} == {frozenset(EXPORTED)}


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_a_package_that_is_missing_is_named(name, package, folder, monkeypatch):
    monkeypatch.setattr(mlx_lm_callbacks, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(DFlashError, match=f"pip install {package}"):
        train(recipe(folder, f"missing-{name}", f"run.callbacks=[{name}]"))
