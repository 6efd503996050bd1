"""Things are found by name, ours and other packages'; a broken package is an error only where it is needed."""

from importlib.metadata import EntryPoint

import pytest

from dflash.errors import DFlashError
from dflash.registry import Registry, load_plugin


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
    monkeypatch.setattr("dflash.registry.entry_points", lambda group: entries if group == "dflash.tests" else [])
    return registry


def test_names_lead_to_what_was_registered_and_to_what_packages_announce(rules):
    assert rules.get("ours") == rules.get("also_ours") == "our rule"
    assert rules.get("theirs") == pytest.approx(3.14159, abs=1e-5)
    assert list(rules.all()) == ["also_ours", "ours", "theirs"]
    assert rules.find("unheard_of") is None


def test_an_unknown_name_brings_the_nearest_one(rules):
    with pytest.raises(DFlashError, match=r"Unknown rule 'thers'; did you mean 'theirs'\?"):
        rules.get("thers")


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


def test_a_plugin_of_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "study.yaml").write_text("a: 1")
    with pytest.raises(DFlashError, match=r"study\.yaml is no Python; expected a \.py file"):
        load_plugin(tmp_path / "study.yaml")


def test_a_plugin_is_a_file_or_a_module(tmp_path):
    file = tmp_path / "my_plugin.py"
    file.write_text("value = 7\n")
    assert load_plugin(file).value == 7
    assert load_plugin("math").pi > 3
    file.write_text("1 / 0\n")
    for plugin in (file, tmp_path / "none.py", "no_such_module"):
        with pytest.raises(DFlashError, match="Cannot load the plug-in"):
            load_plugin(plugin)
