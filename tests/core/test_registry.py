"""Things are found by name, ours and other packages'; a broken package is an error only where it is needed."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from support.errors import refused

from dflash.core.errors import DFlashError, did_you_mean
from dflash.core.registry import Registry, load_plugin
from dflash.core.source import source_hash
from dflash.policies.base import POLICIES


@pytest.fixture
def rules(monkeypatch):
    """A registry of rules with one of its own, one of another package, and one broken package."""
    registry: Registry = Registry("rule", "dflash.tests")
    registry.register("ours", "also_ours")("our rule")
    entries = [
        EntryPoint("theirs", "math:pi", "dflash.tests"),
        EntryPoint("ours", "math:pi", "dflash.tests"),
        EntryPoint("a_module", "math", "dflash.tests"),
        EntryPoint("broken", "no_such_module:rule", "dflash.tests"),
    ]
    monkeypatch.setattr("dflash.core.registry.entry_points", lambda group: entries if group == "dflash.tests" else [])
    return registry


def test_names_lead_to_what_was_registered_and_to_what_packages_announce(rules):
    assert rules.get("ours") == rules.get("also_ours") == "our rule"
    assert rules.get("theirs") == pytest.approx(3.14159, abs=1e-5)
    assert list(rules.all()) == ["also_ours", "ours", "theirs"]
    assert rules.find("unheard_of") is None


def test_a_temporary_name_hides_another_and_loses_nothing_that_came_meanwhile(rules):
    with rules.temporary("ours", "another"), rules.temporary("new", "rule"):
        assert (rules.get("ours"), rules.get("new")) == ("another", "rule")
    assert list(rules.all()) == ["also_ours", "ours", "theirs"]
    assert rules.get("ours") == "our rule"


def test_an_unknown_name_brings_the_nearest_one(rules):
    with pytest.raises(DFlashError, match=r"Unknown rule 'thers'; did you mean 'theirs'\? Import .* --plugin FILE"):
        rules.get("thers")


def test_of_many_known_names_only_the_nearest_are_listed():
    known = [f"{first}{second}" for first in "abcdef" for second in "uvwxyz"]
    assert did_you_mean("am", known) == "the nearest are az, ay, ax, aw, av."
    assert did_you_mean("aw!", known) == "did you mean 'aw'?"
    assert did_you_mean("?", known[:3]) == "known are au, av, aw."


def test_an_unknown_name_says_what_else_may_be_given():
    with pytest.raises(DFlashError, match=r"'emma'; known are adaptive, full.*\. A number of drafts works too\."):
        POLICIES.get("emma")


FIRST_IMPORTS = """
import sys
from importlib import import_module
for module, registry, name in (
    ("decoding.verify", "VERIFY_RULES", "speculative_sampling"),
    ("policies.base", "POLICIES", "adaptive"),
    ("drafters.kinds", "drafters", "mtp"),
    ("training.callbacks", "CALLBACKS", "wandb"),
):
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "dflash"]:
        del sys.modules[loaded]
    registry = getattr(import_module(f"dflash.{module}"), registry)
    registry.get(name)
    assert registry.source(name) is None
"""


def test_a_registry_knows_all_of_ours_as_soon_as_it_is_imported():
    subprocess.run([sys.executable, "-c", FIRST_IMPORTS], check=True)


def test_the_source_of_what_packages_announce_is_that_of_their_module(monkeypatch):
    entries = [EntryPoint("theirs", "json.decoder:JSONDecoder", "dflash.tests")]
    monkeypatch.setattr("dflash.core.registry.entry_points", lambda group: entries)
    registry: Registry = Registry("rule", "dflash.tests")
    assert registry.source("theirs")
    assert registry.source("theirs") == source_hash(json.decoder.__file__, "json")
    assert registry.source("nobody") is None


def test_a_broken_package_is_a_warning_until_its_name_is_asked_for(rules, caplog):
    rules.load_entry_points()
    rules.load_entry_points()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(rules.broken) == 1
    with pytest.raises(DFlashError, match=r"'broken' \(no_such_module:rule\).*No module named.*Repair or uninstall"):
        rules.get("broken")


@pytest.mark.parametrize("names", [(), (len,), ("",), ("good", 3)])
def test_registering_without_a_name_is_an_error(rules, names):
    with pytest.raises(TypeError, match="takes the name of the rule"):
        rules.register(*names)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("study.yaml", "study.yaml is no Python; expected a .py file"),
        ("../no_suffix", "no_suffix is no Python; expected a .py file"),
        ("none.txt", "none.txt is no Python; expected a .py file"),
        ("none.py", "There is no plug-in file"),
        ("folder.py", "There is no plug-in file"),
        ("fails.py", "Cannot load the plug-in"),
    ],
)
def test_a_plugin_that_is_no_python_not_there_or_fails_is_refused(tmp_path, name, words):
    (tmp_path / "study.yaml").write_text("a: 1")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "fails.py").write_text("1 / 0\n")
    with pytest.raises(DFlashError) as error:
        load_plugin(tmp_path / name)
    refused(error, words)


def test_a_plugin_is_a_module_or_a_file_that_imports_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "a_neighbour.py").write_text("value = 8\n")
    (tmp_path / "with_neighbour.py").write_text("from a_neighbour import value\n")
    assert load_plugin(tmp_path / "with_neighbour.py").value == 8
    assert load_plugin("math").pi > 3
    with pytest.raises(DFlashError, match="Cannot load the plug-in"):
        load_plugin("no_such_module")
