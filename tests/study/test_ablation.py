"""A study carried out: nothing twice, whatever happens; cells in turns; the target's own text in every cell."""

import csv
import dataclasses
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.cli import assert_one_error, invoke

from dflash import load_target
from dflash.core.errors import DFlashError
from dflash.core.files import exclusive_lock
from dflash.core.settings import from_dict
from dflash.drafters.checkpoints.checkpoint import save_drafter
from dflash.study import ablate, ablation, collect, effects, write_results
from dflash.study.ablation import open_plan
from dflash.study.answers import Answers
from dflash.study.expected import expected_time
from dflash.training.data.dataset import open_dataset
from dflash.training.drafters.init import new_drafter
from dflash.training.recipe import DrafterShape
from dflash.training.train import cache_features


@pytest.fixture
def counted(monkeypatch):
    """What is computed from now on: trainings by their folder, and timed answers by drafter and prompt."""
    computed: Counter = Counter()
    train, run = ablation.train, ablation._run

    def counted_train(recipe, **options):
        computed["training", recipe.run.folder.name] += 1
        return train(recipe, **options)

    def counted_run(side, tokens, planned, session=""):
        computed["answer" if session else "warm-up", planned.name, tuple(tokens)] += 1
        return run(side, tokens, planned, session)

    monkeypatch.setattr(ablation, "train", counted_train)
    monkeypatch.setattr(ablation, "_run", counted_run)
    return computed


def of(what: str, computed: Counter) -> int:
    return sum(count for (kind, *_), count in computed.items() if kind == what)


def test_every_cell_is_computed_once_and_what_is_there_is_used_again(make, counted):
    plan = ablate(make())
    assert (of("training", counted), of("answer", counted)) == (2, 15)  # four cells and the plain one, three prompts
    cells = collect(plan)
    assert [cell.row()["identical"] for cell in cells] == [True] * 4
    assert all(cell.row()["complete"] and cell.row()["acceptance_length"] >= 1 for cell in cells)
    assert len({cell.row()["parameters"] for cell in cells}) == 1

    counted.clear()
    assert [c.row() for c in collect(ablate(make()))] == [c.row() for c in cells]
    assert not counted

    more = make(prompts=plan.study.prompts | {"more": {"file": plan.study.prompts["short"]["file"]}})
    ablate(more)  # the fourth prompt is the only new one
    assert (of("training", counted), of("answer", counted)) == (0, 5)

    counted.clear()
    ablate(make(vary={"train.objective.gamma": [7, 2, 3], "decode.block_size": [2]}))
    assert (of("training", counted), of("answer", counted)) == (1, 3)


def test_whatever_changes_a_result_is_a_new_cell_and_nothing_else(make, place):
    def names(**changes):
        return [(cell.training, cell.answers) for cell in open_plan(make(**changes)).cells]

    same = names()
    assert names(train={"run.log_every": 3, "run.checkpoint_every": 1}) == same
    assert names(train={"run.evaluate_tokens": 5}) != same
    first, *_ = same
    for key, value in (("drafter.seed", 4), ("run.steps", 4), ("data.sequences", 5), ("objective.kind", "kl")):
        (training, answers), *_ = names(train={key: value})
        assert training != first[0]
        assert answers != first[1]
    (training, answers), *_ = names(decode={"max_tokens": 9})
    assert training == first[0]
    assert answers != first[1]
    assert len({training for training, _ in same}) == 2
    assert len({answers for _, answers in same}) == 4


def test_cells_take_turns_and_another_is_first_on_each_prompt(make, monkeypatch):
    order: list[tuple[tuple[int, ...], str]] = []
    run = ablation._run

    def recorded(side, tokens, planned, session=""):
        if session:
            order.append((tuple(tokens), planned.name + str(len(order) == 0)))
        return run(side, tokens, planned, session)

    monkeypatch.setattr(ablation, "_run", recorded)
    ablate(make(recipe=None, plain=False, vary={"decode.drafter": ["ngram"], "decode.block_size": [4, 3, 2]}))
    prompts = list(dict.fromkeys(tokens for tokens, _ in order))
    turns = [[name.removesuffix("True").removesuffix("False") for t, name in order if t == p] for p in prompts]
    assert turns[1] == turns[0][1:] + turns[0][:1]
    assert turns[2] == turns[0][2:] + turns[0][:2]
    assert len(set(turns[0])) == 3


def test_an_interruption_at_any_computation_loses_that_one_only(make, monkeypatch):
    finished: Counter = Counter()
    lives = [0]

    def mortal(function):
        def called(*arguments, **options):
            lives[0] -= 1
            if lives[0] < 0:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return called

    def kept(answers, prompt, answer):
        finished[answers.path.stem, prompt] += 1
        keep(answers, prompt, answer)

    keep = Answers.keep
    train_one = ablation.train_one
    monkeypatch.setattr(Answers, "keep", kept)
    monkeypatch.setattr(ablation, "train", mortal(ablation.train))
    monkeypatch.setattr(ablation, "_run", mortal(ablation._run))

    def trained(plan, key, *arguments):
        train_one(plan, key, *arguments)
        finished[key] += 1

    monkeypatch.setattr(ablation, "train_one", trained)
    for lived in (0, 1, 9, 100):  # in the first training, the second, among the answers, to the end
        lives[0] = lived
        try:
            plan = ablate(make())
        except KeyboardInterrupt:
            assert lived < 100
    assert len(finished) == 2 + 3 * 5
    assert set(finished.values()) == {1}
    assert all(cell.row()["complete"] for cell in collect(plan))


def test_features_are_cached_once_for_cells_that_read_the_same_layers(make, place):
    changes = {
        "vary": {"train.objective.kind": ["cross_entropy", "kl"], "train.drafter.target_layer_ids": [[0, 2], [1]]},
        "prompts": {"one": {"file": str(place / "prompts.jsonl"), "limit": 1}},
        "design": "one_at_a_time",
        "plain": False,
    }
    plan = ablate(make(cache_features=True, **changes))
    assert len(list((plan.folder / "features").iterdir())) == 2
    direct = ablate(dataclasses.replace(make(**changes), folder=plan.folder / "direct"))
    assert [c.row()["acceptance_length"] for c in collect(plan)] == [
        c.row()["acceptance_length"] for c in collect(direct)
    ]


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


def test_features_are_computed_once_for_all_kinds_and_for_the_one_that_needs_most(make, place, monkeypatch):
    read: list[tuple] = []
    monkeypatch.setattr(ablation, "cache_features", lambda *a, **options: read.append(cache_features(*a, **options)))
    kinds = {
        "dspark": {"train.drafter.kind": "dspark", "train.drafter.options": {"markov_rank": 8}},
        "dflash": {"train.drafter.kind": "dflash"},
        "reversed": {"train.drafter.target_layer_ids": [2, 0]},
    }
    study = make(cache_features=True, plain=False, vary={"drafter": kinds})
    before = expected_time(open_plan(study))
    tokens = int(open_dataset(place / "data", "train", None).lengths.sum())
    assert f"; {tokens} tokens of features, " in before.training_from
    plan = ablate(study)
    assert len(read) == len(list((plan.folder / "features").iterdir())) == 1
    assert [cell.row()["complete"] for cell in collect(plan)] == [True] * 3
    more = open_plan(make(cache_features=True, plain=False, vary={"drafter": kinds}, seeds=[0, 1]))
    assert "features" not in expected_time(more).training_from  # they are there
    (needing,) = more.caches([cell.training for cell in more.cells if "dflash" in cell.cell.levels["drafter"]]).values()
    assert more.trainings[needing].drafter.kind == "dspark"  # it would fill the folder again, finished or not


def test_two_processes_cannot_share_a_folder(make):
    study = make()
    with exclusive_lock(study.folder), pytest.raises(DFlashError, match="Another process is writing"):
        ablate(study)


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_leaves_tables_plots_and_commands_that_make_a_cell_again(write, tmp_path):
    file = write()
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
    shown = invoke("ablate", file).stdout
    assert "not told apart" in shown or "too few prompts" in shown
    assert "pairs agree: of the pairs of cells that differ in the factor alone" in shown
    assert [line.partition(":")[0] for line in shown.splitlines() if "median over prompts" in line] == [
        "acceptance length",
        "ratio of acceptance_length",
    ]


def test_a_dry_run_prints_cells_and_the_expected_time_and_trains_nothing(write, tmp_path):
    file = write()
    before = json.loads(invoke("ablate", file, "--dry-run", "--json").stdout)
    assert [cell["of_steps"] for cell in before["cells"]] == [3] * 4
    assert all(cell["steps"] == cell["answers"] == 0 for cell in before["cells"])
    assert before["expected"]["training"] > 0 < before["expected"]["decoding"]
    assert "a trial of" in before["expected"]["training_from"]
    assert not list((tmp_path / "study").glob("*/*"))
    table = invoke("ablate", file, "--dry-run").stdout
    assert "4 cells, 2 drafters to train, 3 prompts" in table
    assert "15 answers and 5 warm-ups of at most" in table  # four cells and the plain one
    assert invoke("ablate", file).exit_code == 0
    after = json.loads(invoke("ablate", file, "--dry-run", "--json").stdout)
    assert after["expected"]["training"] == after["expected"]["decoding"] == 0
    assert [cell["answers"] for cell in after["cells"]] == [3] * 4
    longer = invoke("ablate", file, "--dry-run", "--json", "--set", "seeds=[0, 1]")
    assert "from 2 finished training(s)" in json.loads(longer.stdout)["expected"]["training_from"]


def test_ctrl_c_says_that_the_same_command_continues(write, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ablation, "decode_missing", interrupted)
    result = invoke("ablate", write())
    assert result.exit_code == 130
    assert re.search(r"Stopped. What is finished stays in .*study; the same command continues.", result.stderr)


# --- kill -9 ----------------------------------------------------------------------------------------------

_COUNTING = """
import sys
from dflash.study import ablate, ablation, load_study

log = open(sys.argv[2], "a", buffering=1)
train, run = ablation.train, ablation._run

def counted_train(recipe, **options):
    log.write(f"training {recipe.run.folder.name}\\n")
    return train(recipe, **options)

def counted_run(side, tokens, planned, session=""):
    if session:
        log.write(f"answer {id(planned)} {tokens}\\n".replace(str(id(planned)), keys[id(side)]))
    return run(side, tokens, planned, session)

def make_sides(plan, wanted):
    made = real_sides(plan, wanted)
    keys.update({id(side): key for key, side in made.items()})
    return made

keys, real_sides = {}, ablation.make_sides
ablation.train, ablation._run, ablation.make_sides = counted_train, counted_run, make_sides
ablate(load_study(sys.argv[1]))
"""


@pytest.mark.slow
def test_kill_9_at_five_random_moments_loses_at_most_the_running_cell(write, tmp_path):
    file, log, study = write(), tmp_path / "computed.log", tmp_path / "study"
    log.write_text("")
    command = [sys.executable, "-c", _COUNTING, str(file), str(log)]
    moments = random.Random(7)

    def begun() -> list[str]:
        return log.read_text().splitlines()

    def there() -> set[str]:
        """What is complete on the disk."""
        done = {f"training {path.parent.name}" for path in study.glob("trained/*/finished.json")}
        for path in study.glob("answers/*.json"):
            done |= {f"answer {path.stem} {prompt}" for prompt in json.loads(path.read_text())["answers"]}
        return done

    complete: set[str] = set()
    for _ in range(5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        last = len(begun()) + moments.randint(1, 3)
        while len(begun()) < last:
            assert process.poll() is None, "the study ended before it could be killed five times"
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert complete <= there()  # a kill takes nothing away that was complete
        complete = there()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    units = len(set(begun()))
    assert units == 2 + 3 * 5
    assert units <= len(begun()) <= units + 5  # each kill costs one computation at most
    write_results(open_plan_of(file))
    assert all(row["complete"] == "True" for row in csv.DictReader((study / "results.csv").open()))


def open_plan_of(file: Path):
    from dflash.study import load_study

    return open_plan(load_study(file))


def test_a_killed_write_leaves_no_half_answer_and_its_remains_are_removed(make):
    plan = ablate(make(recipe=None, vary={"decode.drafter": ["ngram"]}))
    (file, _) = sorted((plan.folder / "answers").iterdir())
    key = next(iter(json.loads(file.read_text())["answers"]))
    values = json.loads(file.read_text())
    del values["answers"][key]
    file.write_text(json.dumps(values))
    (file.parent / f".{file.stem}-abcdefgh.json").write_text('{"answers": {"a": ')
    again = ablate(plan.study)
    assert json.loads(file.read_text())["answers"][key]["tokens"]
    assert len(list(file.parent.iterdir())) == 2
    assert effects(again, collect(again)) == []
