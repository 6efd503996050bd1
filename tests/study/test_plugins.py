"""Parts of plug-ins in studies: options are levels, a changed source is a new cell, and everything else stays."""

import json
import linecache
import logging
import re
from pathlib import Path

import pytest
from support import plugin
from support.cli import assert_one_error, invoke

from dflash.core import registry
from dflash.core.registry import load_plugin
from dflash.core.settings import SettingsError
from dflash.study import ablate
from dflash.study.ablation import open_plan
from dflash.study.settings import make_cells

RULE = """
import mlx.core as mx
from dflash import Verified, register_drafter, register_policy, register_verify, Policy
from dflash.training import register_objective
from neighbour_of_mine import LIMIT

@register_verify("lenient")
def lenient(proposal, logits_LV, sampler, epsilon=0.5):
    return Verified([logits_LV[0].argmax().item()], 0)

@register_objective("mine")
def mine(predictions):
    return mx.logsumexp(predictions.logits_TV, axis=-1)
"""
DECODED = {"recipe": None, "plain": False, "decode": {"drafter": "ngram", "max_tokens": 4}}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Write a plug-in and its neighbour, and load them as a new process would."""
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    monkeypatch.setattr(registry, "PLUGINS", [])
    monkeypatch.setattr("dflash.study.files.PLUGINS", registry.PLUGINS)

    def write(text: str = RULE, neighbour: str = "LIMIT = 1\n") -> Path:
        (tmp_path / "neighbour_of_mine.py").write_text(neighbour)
        (tmp_path / "mine.py").write_text(text)
        monkeypatch.delitem(__import__("sys").modules, "neighbour_of_mine", raising=False)
        load_plugin(tmp_path / "mine.py")
        return tmp_path / "mine.py"

    return write


def keys(study) -> list[tuple[str | None, str]]:
    return [(cell.training, cell.answers) for cell in open_plan(study).cells]


@pytest.mark.parametrize(
    ("text", "neighbour", "new"),
    [
        (RULE, "LIMIT = 1\n", False),
        (RULE.replace("0.5", "0.1"), "LIMIT = 1\n", True),
        (RULE, "LIMIT = 2\n", True),
    ],
)
def test_a_changed_source_of_a_rule_is_a_new_cell_and_no_other(make, mine, text, neighbour, new):
    mine()
    study = make(**DECODED | {"vary": {"decode.verify": ["first_mismatch", "lenient"]}})
    (_, ours), (_, before) = keys(study)
    mine(text, neighbour)
    assert keys(study)[0] == (None, ours)
    assert (keys(study)[1][1] != before) == new


@pytest.mark.parametrize("train", [{"objective.kind": "mine"}, {}])
def test_a_changed_source_of_an_objective_is_another_training(make, mine, train):
    mine()
    study = make(train=train)
    before = keys(study)
    mine(RULE.replace("axis=-1)", "axis=-1) * 2"))
    assert (keys(study) == before) == (train == {})
    assert all((one != two) == bool(train) for (one, _), (two, _) in zip(keys(study), before, strict=True))


def test_a_change_is_said_its_cell_made_again_and_the_rest_kept(write, mine, tmp_path, caplog):
    file = write(**DECODED | {"vary": {"decode.verify": ["first_mismatch", "lenient"]}})
    answers, said = tmp_path / "study" / "answers", "The verification rule lenient has changed: its cells are new ones"
    with_plugin = ["ablate", file, "--plugin", mine()]
    assert invoke(*with_plugin).exit_code == 0
    commands = (tmp_path / "study" / "commands.sh").read_text().splitlines()[1:]
    assert all(command.startswith(f"dflash --plugin {tmp_path / 'mine.py'} ablate ") for command in commands)
    first = {path.name: path.read_text() for path in answers.iterdir()}
    assert invoke(*with_plugin).exit_code == 0
    assert {path.name: path.read_text() for path in answers.iterdir()} == first
    assert said not in caplog.text

    mine(RULE.replace("0.5", "0.1"))
    left = json.loads(invoke(*with_plugin, "--dry-run", "--json").stdout)["left"]
    assert left["cells"] == 1
    assert said in caplog.text
    caplog.clear()
    assert invoke(*with_plugin).exit_code == 0
    assert said in caplog.text
    second = {path.name: path.read_text() for path in answers.iterdir()}
    assert first.items() <= second.items()
    assert len(second) == len(first) + 1
    caplog.clear()
    assert invoke(*with_plugin).exit_code == 0
    assert said not in caplog.text


def test_a_part_without_a_source_is_named_by_its_name_alone_and_that_is_said(make, caplog):
    typed = "from dflash import Policy, register_policy\nregister_policy('typed')(Policy)"
    study = make(**DECODED | {"vary": {"decode.policy": ["typed"]}})
    exec(compile(typed, "<typed>", "exec"), {"__name__": "__main__"})
    caplog.set_level(logging.WARNING)
    before = keys(study)
    assert "The policy typed has no source file" in caplog.text
    linecache.cache["<cell>"] = (len(typed), None, typed.splitlines(keepends=True), "<cell>")  # as notebooks do
    exec(compile(typed, "<cell>", "exec"), {"__name__": "__main__"})
    caplog.clear()
    assert keys(study) != before
    assert "no source file" not in caplog.text


# --- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vary", "labels"),
    [
        (
            {"decode.verify": {"name": "typical", "options": {"epsilon": [0.05, 0.1]}}},
            ["typical:epsilon=0.05", "typical:epsilon=0.1"],
        ),
        (
            {"decode.verify": ["first_mismatch", {"name": "typical", "options": {"epsilon": "1e-4"}}]},
            ["first_mismatch", "typical:epsilon=0.0001"],
        ),
        (
            {"decode.drafter": ["bigram", {"name": "ngram", "options": {"sizes": [[4, 2]], "block_size": [4, 8]}}]},
            ["bigram", "ngram:block_size=4,sizes=[4, 2]", "ngram:block_size=8,sizes=[4, 2]"],
        ),
        ({"decode.policy": [4, {"name": "up_to", "options": {"drafts": [4]}}]}, ["4", "up_to:drafts=4"]),
        ({"decode.sampler": [{"name": "nth", "options": {"place": [0, 1]}}]}, ["nth:place=0", "nth:place=1"]),
        ({"rule": {"a": {"decode.verify": {"name": "typical", "options": {"epsilon": 0.2}}}}}, ["a"]),
    ],
)
def test_options_are_levels_of_a_factor(make, vary, labels):
    decode = {} if "decode.drafter" in vary else {"drafter": "bigram"}
    cells = make_cells(make(recipe=None, decode=decode, vary=vary))
    assert [label for cell in cells for label in cell.levels.values()] == labels


def test_equal_options_are_one_cell_however_they_are_written(make):
    text = {"decode.verify": ["typical:epsilon=.10"]}
    whole = {"decode.verify": {"name": "typical", "options": {"epsilon": 0.1}}}
    assert keys(make(**DECODED | {"vary": text})) == keys(make(**DECODED | {"vary": whole}))
    with pytest.raises(SettingsError, match="are the same cell; leave one of them out"):
        open_plan(make(**DECODED | {"vary": {"decode.verify": ["typical:epsilon=.1", "typical:epsilon=0.1"]}}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vary": {"decode.drafter": ["bigram:size=3"]}}, "The drafter 'bigram' has no option 'size'"),
        ({"vary": {"decode.drafter": ["ngram+bigram:size=3"]}}, "The drafter 'bigram' has no option 'size'"),
        ({"vary": {"decode.drafter": ["half"]}}, "Half is no Drafter: it lacks bind"),
        ({"vary": {"decode.drafter": ["bigrm"]}}, "No checkpoint folder at 'bigrm'"),
        (
            {"vary": {"decode.drafter": ["FOLDER"]}},
            "The drafter 'bigram' needs no files and no training; give its name",
        ),
        ({"vary": {"decode.verify": ["typical:epsilom=3"]}}, "has no option 'epsilom'; did you mean 'epsilon'"),
        ({"vary": {"decode.verify": [{"nam": "typical"}]}}, r"vary: decode.verify: expected a name, or \{name: NAME"),
        ({"vary": {"decode.verify": {"name": "typical", "options": {"epsilon": []}}}}, "has no values"),
        ({"vary": {"decode.policy": ["up_to"]}}, "The policy 'up_to' needs a value for its option 'drafts'"),
    ],
)
def test_a_mistake_in_a_part_is_one_line_before_anything_is_decoded(write, tmp_path, changes, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text('{"drafter_kind": "bigram"}')
    changes = json.loads(json.dumps(changes).replace("FOLDER", str(tmp_path / "folder")))
    file = write(**{"recipe": None, "decode": {"max_tokens": 4}} | changes)
    assert_one_error(invoke("ablate", file, "--dry-run", "--plugin", Path(plugin.__file__)), message)
    assert not (tmp_path / "study").exists()


def test_a_drafter_of_a_plugin_is_ablated_by_its_name_and_writes_the_targets_text(make):
    names = ["ngram", "bigram", "ngram+bigram", {"name": "bigram", "options": {"block_size": [2, 4]}}]
    plan = ablate(make(recipe=None, decode={"max_tokens": 8, "policy": "full"}, vary={"decode.drafter": names}))
    texts = {cell.name: [a.tokens for a in plan.answers(cell.answers).values()] for cell in plan.cells}
    assert len(texts) == 5
    assert all(text == [a.tokens for a in plan.answers(plan.cells[0].plain).values()] for text in texts.values())
    assert re.search(r"bigram:block_size=4", str(plan.cells[-1]))
