"""``dflash fit``: from a target alone to its drafter; stopped after any stage, it continues to the same drafter."""

import json
import re
import shutil

import pytest
from support.cli import assert_one_error, invoke
from support.conversations import Stopping, tree, write_lines
from support.runs import write_target

import dflash
from dflash.training import pipeline
from dflash.training.data import self_prompts
from dflash.training.data.join import join

SETTINGS = [
    "run.steps=3", "run.batches_per_step=1", "run.evaluate_prompts=2", "run.evaluate_tokens=8", "run.log_every=1",
    "data.max_blocks_per_batch=32", "data.anchors=4", "drafter.num_hidden_layers=1", "drafter.block_size=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("fit") / "target")


@pytest.fixture(autouse=True)
def _random_bytes_are_requests(monkeypatch):
    monkeypatch.setattr("dflash.target.model.LoadedTargetModel.stop_token_ids", Stopping.stop_token_ids)
    monkeypatch.setattr(self_prompts, "unsuitable", lambda request: len(request) < 2)


def fit(target, output, *options):
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return invoke("fit", "--target", target, "--output", output, "--count", 8, "--max-tokens", 12, *settings, *options)


def stages(text: str) -> list[str]:
    return re.findall(r"Stage (\w+)", text)


@pytest.fixture
def undisturbed(target):
    """The folder of a finished pipeline; made by the first test that needs it."""
    out = target.parent / "out"
    if not out.exists():
        assert fit(target, out).exit_code == 0
    return out


def test_a_target_alone_becomes_a_drafter_and_every_stage_is_told_with_its_time(target, caplog):
    out = target.parent / "out"
    with caplog.at_level("INFO"):
        result = fit(target, out)
    assert result.exit_code == 0, result.output
    assert stages(caplog.text) == ["requests", "responses", "recipe", "training", "export"]
    assert re.search(r"Stage requests: 8, made up by the target\.\n.* requests: about \d+ s\n", caplog.text)
    assert re.search(r"Stage responses to 8 requests, at most about \d+ s\.", caplog.text)
    assert re.search(r"Stage training, at most about \d+ s\.", caplog.text)
    assert f"--target {target} --drafter {out}/drafter" in result.stdout
    decoder = dflash.DFlashSpeculativeDecoder.from_pretrained(str(target), str(out / "drafter"))
    assert decoder.draft_model.config.block_size == 4
    assert "steps: 3 " in (out / "recipe.yaml").read_text()
    before = tree(out)
    caplog.clear()
    with caplog.at_level("INFO"):
        assert fit(target, out).exit_code == 0
    assert "Nothing is left to do" in caplog.text
    assert tree(out) == before


@pytest.mark.parametrize(
    ("there", "left"),
    [
        ([], ["8 requests, made up by the target", "responses to 8 requests", "a recipe", "training", "export"]),
        (["prompts.jsonl", "data"], ["a recipe", "training", "export"]),
        (["data", "recipe.yaml"], ["training", "export"]),
        (["data", "recipe.yaml", "run", "drafter"], []),
    ],
)
def test_a_dry_run_says_what_is_left_and_how_long_it_takes_and_writes_nothing(
    target, undisturbed, tmp_path, there, left
):
    done, out = undisturbed, tmp_path / "out"
    out.mkdir()
    for name in there:
        (shutil.copytree if (done / name).is_dir() else shutil.copy)(done / name, out / name)
        if name == "recipe.yaml":
            (out / name).write_text((done / name).read_text().replace(str(done), str(out)))
    before = tree(out)
    result = fit(target, out, "--dry-run")
    assert result.exit_code == 0, result.output
    said = dict(line.split(": ") for line in result.stdout.splitlines() if ": " in line)
    assert [stage.partition(", without")[0] for stage in said] == [*left, *["in all"] * bool(left)]
    known = {"a recipe", "export"}
    assert all(re.fullmatch("a moment" if stage in known else r"at most about \d+ s", said[stage]) for stage in said)
    assert left or result.stdout == "Nothing is left to do.\n"
    assert tree(out) == before


def test_stopped_before_every_stage_it_continues_to_the_same_drafter(
    target, undisturbed, tmp_path, monkeypatch, caplog
):
    def stop(*_, **__):
        raise KeyboardInterrupt

    begins = {
        "prepare": ["responses"],
        "train": ["responses", "recipe", "training"],
        "export": ["training", "export"],
        None: ["export"],
    }
    for stopped, expected in begins.items():
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level("INFO"):
            if stopped:
                patch.setattr(pipeline, stopped, stop)
            result = fit(target, tmp_path / "out")
        assert result.exit_code == (130 if stopped else 0)
        assert not stopped or "the same command continues" in result.stderr
        assert [stage for stage in stages(caplog.text) if stage != "requests"] == expected
    weights = "drafter/model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (undisturbed / weights).read_bytes()


def test_a_folder_of_something_else_or_of_another_target_is_refused(target, undisturbed, tmp_path):
    out = undisturbed
    assert_one_error(fit(out / "run", out), r"belongs to the target \S+target\S*, not \S+run; choose a new folder")
    for made in ("run", "no-plan"):
        shutil.copytree(out / ("run" if made == "run" else ""), tmp_path / made)
    (tmp_path / "no-plan/recipe.yaml").unlink()
    for made in ("run", "no-plan"):
        before = tree(tmp_path / made)
        assert_one_error(fit(target, tmp_path / made), "was not made by dflash fit: it holds a run or a drafter")
        assert tree(tmp_path / made) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--max-tokens", "9"],
            "data has max_tokens 12, but these options ask for 9; give the options of then, or choose",
        ),
        (["--temp", "0.5"], "data has temp 0.0, but these options ask for 0.5"),
        (["--count", "9"], "data has requests 8, but these options ask for 9"),
        (["--prompts", "prompts.jsonl.of-mine"], "data has source 'prompts.jsonl', but .* 'prompts.jsonl.of-mine'"),
        (
            ["--set", "run.steps=7"],
            "recipe.yaml has run.steps 3, but these options ask for 7; leave --set out, edit it, or choose a",
        ),
        (["--set", "drafter.kind=dspark"], "recipe.yaml has drafter.kind 'dflash', but .* ask for 'dspark'"),
    ],
)
def test_options_that_the_folder_was_not_made_with_are_refused(target, undisturbed, options, message):
    before = tree(undisturbed)
    for more in ([], ["--dry-run"]):
        assert_one_error(fit(target, undisturbed, *options, *more), message)
    assert tree(undisturbed) == before


def test_data_that_was_put_there_by_hand_is_taken_as_it_is(target, undisturbed, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(undisturbed / "data", again / "data")
    join([again / "data"], again / "joined")
    shutil.rmtree(again / "data")
    (again / "joined").rename(again / "data")
    assert fit(target, again, "--max-tokens", "9", "--dry-run").exit_code == 0


def test_a_target_with_code_of_its_own_is_fitted_where_it_is_trusted_and_to_own_requests(target, tmp_path, caplog):
    shutil.copytree(target, tmp_path / "odd")
    config = json.loads((target / "config.json").read_text())
    (tmp_path / "odd/config.json").write_text(json.dumps(config | {"model_file": "odd.py"}))
    (tmp_path / "odd/odd.py").write_text("from mlx_lm.models.qwen3 import Model, ModelArgs\n")
    own = write_lines(tmp_path / "own.jsonl", *(f'{{"prompt": "Say {i}"}}' for i in range(9)))
    args = [tmp_path / "odd", tmp_path / "out", "--prompts", own, "--count", 7]
    assert_one_error(fit(*args), "--trust-remote-code on the command line")
    with caplog.at_level("INFO"):
        result = fit(*args, "--trust-remote-code")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("--trust-remote-code\n")
    assert stages(caplog.text) == ["responses", "recipe", "training", "export"]
    assert "Stage responses to 7 requests" in caplog.text
    assert not (tmp_path / "out/prompts.jsonl").exists()


def test_mistakes_are_one_line_of_error(target, tmp_path):
    assert_one_error(fit(target, tmp_path / "out", "--count", 0), "count must be at least 1, got 0")
    for output in (tmp_path / "out", "."):
        assert_one_error(fit(tmp_path / "none", output), "No checkpoint folder at")
    own = write_lines(tmp_path / "own.jsonl", '{"prompt": "a"}', '{"prompt": "b"}')
    assert_one_error(fit(target, tmp_path / "x", "--prompts", own, "--set", "run.stepz=2"), "did you mean .*steps")
