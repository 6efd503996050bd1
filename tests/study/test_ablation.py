"""A study carried out: nothing twice, whatever happens; cells alternate; the target's own text in every cell."""

import csv
import dataclasses
import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli import assert_one_error, invoke

from dflash import DecodeOptions, LoadedTargetModel, load_target
from dflash.core.errors import DFlashError
from dflash.core.files import exclusive_lock, write_json
from dflash.core.settings import from_dict
from dflash.drafters.checkpoints.checkpoint import save_drafter
from dflash.study import Study, ablate, ablation, collect, effects, load_study, write_results
from dflash.study.ablation import open_plan
from dflash.study.cache import FINISHED
from dflash.study.results import sessions_of
from dflash.target.identity import target_fingerprint
from dflash.training.data.dataset import dataset_fingerprint, open_dataset
from dflash.training.drafters.init import new_drafter
from dflash.training.recipe import DrafterShape


def done(study: Path) -> dict[tuple[str, ...], object]:
    """What is complete on the disk, with the time that each took: what is computed again has another."""
    found: dict = {("training", path.parent.name): path.read_text() for path in study.glob("trained/*/finished.json")}
    for path in study.glob("answers/[!.]*.json"):
        found |= {(path.stem, prompt): answer for prompt, answer in json.loads(path.read_text())["answers"].items()}
    return found


def test_every_cell_is_computed_once_and_what_is_there_is_used_again(make):
    plan = ablate(make())
    cells, first = collect(plan), done(plan.folder)
    assert len(first) == 2 + 3 * 5  # drafters; three prompts by four cells and plain decoding
    assert [cell.row()["identical"] for cell in cells] == [True] * 4
    assert all(cell.row()["complete"] and cell.row()["acceptance_length"] >= 1 for cell in cells)
    assert len({cell.row()["parameters"] for cell in cells}) == 1

    assert [c.row() for c in collect(ablate(make()))] == [c.row() for c in cells]
    assert done(plan.folder) == first

    ablate(make(prompts=plan.study.prompts | {"more": {"file": plan.study.prompts["short"]["file"]}}))
    second = done(plan.folder)  # the fourth prompt is the only new one
    assert first.items() <= second.items()
    assert len(second) - len(first) == 5

    ablate(make(vary={"train.objective.gamma": [7, 2, 3], "decode.block_size": [2]}))
    third = done(plan.folder)
    assert second.items() <= third.items()
    assert len(third) - len(second) == 1 + 3


def test_whatever_changes_a_result_is_a_new_cell_and_nothing_else(make):
    def names(**changes):
        return [(cell.training, cell.answers) for cell in open_plan(make(**changes)).cells]

    same = names()
    assert (len({training for training, _ in same}), len({answers for _, answers in same})) == (2, 4)
    assert names(train={"run.log_every": 3, "run.checkpoint_every": 1}) == same
    for key, value in (
        ("drafter.seed", 4),
        ("run.steps", 4),
        ("run.evaluate_tokens", 5),
        ("data.sequences", 5),
        ("objective.kind", "kl"),
    ):
        (training, answers), *_ = names(train={key: value})
        assert training != same[0][0], key
        assert answers != same[0][1], key
    (training, answers), *_ = names(decode={"max_tokens": 9})
    assert training == same[0][0]
    assert answers != same[0][1]


def test_keys_are_those_of_earlier_versions(make, place):
    """With other keys a finished study would be trained and decoded again."""

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]

    plan = open_plan(make(vary={"train.objective.gamma": [2], "decode.block_size": [4]}))
    recipe, target = make().recipe, {"target": target_fingerprint(plan.target)}
    data = {key: value for key, value in recipe["data"].items() if key != "folder"}
    run = {key: value for key, value in recipe["run"].items() if key not in ("log_every", "checkpoint_every")}
    kinds = {"objective": {"kind": "cross_entropy", "gamma": 2.0}, "optimizer": {"kind": "adamw"}}
    drafter = recipe["drafter"] | {"kind": "dflash"}
    splits = {split: dataset_fingerprint(open_dataset(place / "data", split, None)) for split in ("train", "heldout")}
    training = digest(
        {"version": 1, "recipe": {**target, "data": data, "drafter": drafter, "run": run, **kinds}, "dataset": splits}
    )
    answers = {"version": 1, **target, "options": {"max_tokens": 8}}
    assert list(plan.trainings) == [training]
    assert list(plan.sides) == [
        digest(answers | {"drafter": "plain mlx_lm"}),
        digest(answers | {"drafter": [f"trained {training}", {"block_size": 4}]}),
    ]
    assert [prompt.key for prompt in plan.prompts] == [digest(prompt.tokens) for prompt in plan.prompts]


def test_cells_alternate_and_another_is_first_on_each_prompt(make):
    plan = open_plan(make(recipe=None, plain=False, vary={"decode.drafter": ["ngram"], "decode.block_size": [4, 3, 2]}))
    a, b, c = plan.sides
    assert [keys for _, keys in plan.turns()] == [[a, b, c], [b, c, a], [c, a, b]]


def test_ctrl_c_says_that_the_same_command_continues(write, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    file = write(cache_features=True)
    for interrupted in ("train", "time_side"):
        with monkeypatch.context() as patched:
            patched.setattr(ablation, interrupted, stop)
            result = invoke("ablate", file)
        assert result.exit_code == 130
        assert re.search(r"Stopped. What is finished stays in .*study; the same command continues.", result.stderr)
    assert all(cell.row()["complete"] for cell in collect(ablate(load_study(file))))


def test_cells_without_a_speed_are_scored_on_texts_with_the_blocks_of_decoding(tmp_path, monkeypatch):
    """Of the bundled pair, whose first answer ends with a stop token."""

    def study(name: str, limit: int = 1) -> Study:
        values = {"folder": str(tmp_path / name), "plain": False, "vary": {"decode.policy": ["full", "adaptive"]}}
        values |= {"prompts": {"some": {"limit": limit}}, "decode": {"max_tokens": 68, "block_size": 8}}
        return from_dict(Study, values, name)

    scored = ablate(study("scored"))
    with monkeypatch.context() as patched:
        patched.setattr(DecodeOptions, "on_texts", False)
        decoded = ablate(study("decoded"))
    before = done(decoded.folder)
    for cell, other in zip(collect(scored), collect(decoded), strict=True):
        full = cell.planned.cell.options["policy"] == "full"
        assert (cell.row()["tokens_per_s"] is None) == full
        assert cell.row()["acceptance_length"] == other.row()["acceptance_length"] > 2
        for one, two in zip(cell.answers, other.answers, strict=True):
            accepted = [min(pair) for pair in zip(two.accepted, two.committed, strict=True)]  # none after a stop token
            assert one == dataclasses.replace(two, seconds=one.seconds, at=one.at, accepted=accepted)
            assert (one.seconds is None) == full
    assert len(scored.target.stop_token_ids().intersection(cell.answers[0].tokens)) == 1
    assert {effect.metric for effect in effects(scored, collect(scored))} == {"acceptance_length"}
    ablate(study("decoded", 2))
    assert before.items() <= done(decoded.folder).items(), "what was decoded stays"


def test_only_what_the_targets_texts_decide_is_scored(make, monkeypatch):
    """Not where speed matters, the drafter learns from text to text, the end is another, or the context cuts."""
    who = {"scored": {"decode.drafter": "bundled"}, "learns": {"decode.drafter": "ngram"}}
    who |= {"other end": {"decode.stop_token_ids": [7]}}
    options = {"decode": {"max_tokens": 16, "policy": "full"}, "vary": {"who": who}}
    study = make(target="bundled", recipe=None, plain=False, **options)
    lengths = [len(prompt.tokens) for prompt in open_plan(study).prompts]
    fit = [length < max(lengths) for length in lengths]
    assert any(fit)
    monkeypatch.setattr(LoadedTargetModel, "max_length", max(lengths) + 15)
    untimed = [[answer.seconds is None for answer in cell.answers] for cell in collect(ablate(study))]
    assert untimed == [fit, [False] * 3, [False] * 3]
    timed = ablate(
        dataclasses.replace(study, folder=study.folder / "timed", plain=True), [open_plan(study).cells[0].name]
    )
    assert all(answer.seconds for cell in collect(timed) for answer in cell.answers)


def test_a_score_that_ends_early_keeps_what_it_has_and_an_error_names_the_cell(make, monkeypatch):
    options = {"decode": {"max_tokens": 8}, "vary": {"decode.policy": ["full"]}}
    study, score = make(target="bundled", recipe=None, plain=False, **options), ablation.replay

    def end_with(error: BaseException):
        def replay(*given, **options):
            yield next(score(*given, **options))
            raise error

        monkeypatch.setattr(ablation, "replay", replay)

    end_with(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ablate(study)
    (answers,) = (open_plan(study).answers(key) for key in open_plan(study).sides)
    assert len(answers) == 1
    end_with(DFlashError("no"))
    with pytest.raises(DFlashError, match=r"^Cell [0-9a-f]{8} \(policy full, seed 0\): no$"):
        ablate(study)
    monkeypatch.setattr(ablation, "replay", score)
    (cell,) = collect(ablate(study))
    assert cell.complete
    assert sessions_of([cell]) == set(), "no process timed them"


def test_a_drafter_that_cannot_be_trained_is_named_at_the_end_and_the_others_are_compared(write, tmp_path):
    file = write(vary={"train.optimizer.learning_rate": [1e30, 6e-4, 1e-3]}, plain=False)
    named = r"error: Cell [0-9a-f]{8} \(optimizer.learning_rate 1e\+30, seed 0\): The loss is nan .* from the data\."
    result = invoke("ablate", file)
    assert result.exit_code == 1
    assert re.search(rf"{named} The tables in \S+ have all other cells\.\n$", result.stderr)
    rows = list(csv.DictReader((tmp_path / "study" / "results.csv").open()))
    assert [(row["train.optimizer.learning_rate"], row["complete"]) for row in rows] == [
        ("0.0006", "True"), ("0.001", "True"),
    ]  # fmt: skip
    alone = invoke("ablate", file, "--only", open_plan(load_study(file)).cells[0].name)
    assert re.search(rf"{named}\n$", alone.stderr)


def test_two_processes_cannot_share_a_folder(make):
    study = make()
    with exclusive_lock(study.folder), pytest.raises(DFlashError, match="Another process is writing"):
        ablate(study)


@pytest.mark.slow
def test_kill_9_loses_at_most_the_running_computation(write, tmp_path):
    file, study = write(decode={"max_tokens": 60}), tmp_path / "study"
    command = [sys.executable, "-c", f"from dflash.study import ablate, load_study; ablate(load_study({str(file)!r}))"]
    complete: dict = {}
    for _ in range(4):  # among the trainings, then among the answers
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(done(study)) <= len(complete):
            assert process.poll() is None, "the study ended before it was killed"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert complete.items() <= done(study).items()  # nothing that was complete is lost or made again
        complete = done(study)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert complete.items() <= done(study).items()
    assert len(done(study)) == 2 + 3 * 5
    assert not list(study.glob("*/.*.json"))  # what kills left half-written is removed
    write_results(open_plan(load_study(file)))
    assert all(row["complete"] == "True" for row in csv.DictReader((study / "results.csv").open()))


def test_a_damaged_file_of_answers_is_said(make):
    plan = ablate(make(recipe=None, plain=False, vary={"decode.drafter": ["ngram"]}))
    assert effects(plan, collect(plan)) == []  # one cell
    (file,) = (plan.folder / "answers").iterdir()
    file.write_text('{"answers": 1}')
    with pytest.raises(DFlashError, match="holds no answers; remove it, and they are made again"):
        ablate(plan.study)


# --- features -------------------------------------------------------------------------------------------------


def test_features_are_cached_once_for_all_that_read_the_same_layers_and_change_no_drafter(make, place):
    dspark = {"train.drafter.kind": "dspark", "train.drafter.options": {"markov_rank": 8}}
    changes = {
        "vary": {
            "drafter": {  # that which needs most is neither the first nor the last
                "dflash": {"train.drafter.kind": "dflash"},
                "dspark": dspark,
                "reversed": {"train.drafter.target_layer_ids": [2, 0]},
                "other": {"train.drafter.target_layer_ids": [1]},
            }
        },
        "prompts": {"one": {"file": str(place / "prompts.jsonl"), "limit": 1}},
        "train": {"run.steps": 1},
        "plain": False,
    }
    plan = ablate(make(cache_features=True, **changes))
    assert len(list((plan.folder / "features").iterdir())) == 2
    some = [cell.name for cell in plan.cells[1:3]]
    direct = ablate(dataclasses.replace(make(**changes), folder=plan.folder / "direct"), some)
    for cell in direct.cells:
        one, other = (where.run_folder(cell.training) / "drafter" / "model.safetensors" for where in (plan, direct))
        assert one.read_bytes() == other.read_bytes()

    more = open_plan(make(cache_features=True, seeds=[0, 1], **changes))
    shared, other = sorted(more.feature_recipes(), key=lambda recipe: len(recipe.drafter.target_layer_ids))[::-1]
    assert shared.drafter.kind == "dspark"  # its features serve all the others
    assert other.drafter.target_layer_ids == (1,)
    assert open_plan(make(cache_features=True, **changes)).feature_recipes() == []


def test_cells_share_features_by_the_layers_that_their_drafters_read_and_by_nothing_else(make, place, tmp_path):
    heads = {"drafter.kind": "dspark", "drafter.options": {"markov_rank": 8}}
    target = load_target(place / "target")
    for name, changes in (("start", {}), ("start-with-heads", {"kind": "dspark", "options": {"markov_rank": 8}})):
        shape = from_dict(DrafterShape, make().recipe["drafter"] | changes, "drafter")
        save_drafter(new_drafter(shape, target), tmp_path / name)

    def folders(**cells: dict) -> list[str]:
        varied = {label: {f"train.{name}": v for name, v in values.items()} for label, values in cells.items()}
        plan = open_plan(make(cache_features=True, plain=False, vary={"cell": varied}))
        return [plan.trainings[cell.training].data.cached_features.name for cell in plan.cells]

    blind = {**heads, "drafter.options": {"markov_rank": 8, "enable_confidence_head": False}}
    ids = {"drafter.target_layer_ids": [2, 0]}
    start = {"drafter.from": str(tmp_path / "start"), "drafter.target_layer_ids": []}
    spread = {"drafter.target_layer_ids": []}  # one layer of the drafter reads the middle one of four
    alike = folders(a={"drafter.block_size": 4}, b=ids, c=start, d=blind, e={"drafter.seed": 5}, f={"run.steps": 2})
    assert len(set(alike)) == 1
    first, middle, second = folders(a={"run.steps": 3}, b=spread, c={"drafter.target_layer_ids": [2]})
    assert first == alike[0] != middle == second
    for needing in (heads, {"drafter.from": str(tmp_path / "start-with-heads")}, {"objective.kind": "kl"}):
        with_hidden, same, apart = folders(a=needing, b={"run.steps": 2}, c=spread)
        assert with_hidden == same != first
        assert apart == middle
    (shorter,) = folders(a={"data.max_length": 30})
    assert shorter not in (first, middle, with_hidden)


def test_only_drafters_that_are_still_to_be_trained_read_features_of_the_users_own(make, place, tmp_path):
    own = {"train.data.cached_features": str(tmp_path / "features")}
    kinds = {
        "dflash": own,
        "dspark": own | {"train.drafter.kind": "dspark", "train.drafter.options": {"markov_rank": 8}},
    }
    plan = open_plan(make(plain=False, vary={"drafter": kinds}))
    assert [recipe.drafter.kind for recipe in plan.feature_recipes()] == ["dspark"]  # needs more than DFlash
    write_json(plan.run_folder(plan.cells[1].training) / FINISHED, {"steps": 3})
    assert [recipe.drafter.kind for recipe in plan.feature_recipes()] == ["dflash"]


# --- the command ----------------------------------------------------------------------------------------------


def test_the_command_says_what_is_left_and_leaves_tables_plots_and_commands_that_make_a_cell_again(write, tmp_path):
    file = write()
    before = json.loads(invoke("ablate", file, "--dry-run", "--json").stdout)
    assert [(cell["steps"], cell["of_steps"], cell["answers"]) for cell in before["cells"]] == [(0, 3, 0)] * 4
    assert before["left"] == {"cells": 4, "drafters": 2, "answers": 15, "first_training_seconds": None}
    assert not (tmp_path / "study").exists()

    result = invoke("ablate", file, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    rows = list(csv.DictReader((tmp_path / "study" / "results.csv").open()))
    assert [row["cell"] for row in rows] == [row["cell"] for row in found["cells"]]
    assert len(list(csv.DictReader((tmp_path / "study" / "answers.csv").open()))) == 4 * 3
    assert {row["factor"] for row in found["effects"]} == {"train.objective.gamma", "decode.block_size"}
    assert {Path(name).name for name in found["files"]} >= {"acceptance.svg", "speed.svg", "commands.sh"}
    assert "block_size" in (tmp_path / "study" / "acceptance.svg").read_text()

    command = (tmp_path / "study" / "commands.sh").read_text().splitlines()[2].partition("  #")[0].split()
    again = invoke(*command[1:], "--json")
    assert again.exit_code == 0, again.output
    (cell,) = json.loads(again.stdout)["cells"]
    same = next(row for row in found["cells"] if row["cell"] == cell["cell"])
    for name in ("acceptance_length", "tokens", "parameters", "heldout_loss"):
        assert cell[name] == same[name], name
    assert_one_error(invoke("ablate", file, "--only", "nobody"), "The study has no cell 'nobody'")
    assert "pairs agree: of the pairs of drafters that differ in the factor alone" in invoke("ablate", file).stdout

    after = json.loads(invoke("ablate", file, "--dry-run", "--json").stdout)
    assert [(cell["steps"], cell["answers"]) for cell in after["cells"]] == [(3, 3)] * 4
    assert (after["left"]["cells"], after["left"]["drafters"], after["left"]["answers"]) == (0, 0, 0)
    longer = invoke("ablate", file, "--dry-run", "--set", "seeds=[0, 1]").stdout
    assert invoke("ablate", file, "--only", rows[0]["cell"]).exit_code == 0
    assert list((tmp_path / "study").glob("*.svg")) == [], "plots of other cells than the tables'"
    assert re.search(r"4 of 8 cells left. To train: 2 drafters \(the first took \d+ s\); to decode: 12 answers", longer)
