"""Recipe files become checked dataclasses, and every mistake names its key."""

from dataclasses import dataclass, field
from typing import Any

import pytest

import dflash  # noqa: F401  (loads a fast BLAS before MLX)
from dflash.core.settings import (
    Checked,
    SettingsError,
    from_dict,
    load_settings,
    setting,
    settings_help,
    to_dict,
    with_defaults,
)
from dflash.training.recipe import Recipe
from dflash.training.toy.target import TargetSettings


@dataclass(frozen=True)
class Inner(Checked):
    kind: str = setting("plain", "which kind")
    size: int | None = setting(3, "how large", above=0, at_most=8)
    from_: str | None = setting(None, "where from")


@dataclass(frozen=True)
class Outer(Checked):
    name: str = setting(meaning="what it is called")
    inner: Inner = field(default_factory=Inner)
    options: dict[str, Any] = setting(meaning="free keys", factory=dict)  # noqa: RUF009


def test_an_unknown_key_names_the_nearest(tmp_path):
    with pytest.raises(SettingsError, match=r"fit: unknown key 'stesp'; did you mean 'steps'\?"):
        from_dict(TargetSettings, {"config": {}, "samples": 1, "fit": {"stesp": 3}}, "here")
    with pytest.raises(SettingsError, match="here: fit missing"):
        from_dict(TargetSettings, {"config": {}, "samples": 1}, "here")
    with pytest.raises(SettingsError, match="samples must be of type int, got 'many'"):
        from_dict(TargetSettings, {"config": {}, "samples": "many", "fit": {"steps": 1}}, "here")
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(SettingsError, match="not valid YAML"):
        load_settings(TargetSettings, tmp_path / "broken.yaml")


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    (tmp_path / "twice.yaml").write_text("target: a\ndata:\n  folder: x\n  seed: 1\n  seed: 2\n")
    with pytest.raises(SettingsError, match=r"not valid YAML: the key 'seed' is there twice\s.*line 5"):
        load_settings(Recipe, tmp_path / "twice.yaml")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"target: caf\xe9")
    with pytest.raises(SettingsError, match=r"Cannot read the recipe .*latin\.yaml: it is not UTF-8 text"):
        load_settings(Recipe, tmp_path / "latin.yaml")
    with pytest.raises(SettingsError, match=r"Cannot read the recipe .*: No such file"):
        load_settings(Recipe, tmp_path / "none.yaml")


@pytest.mark.parametrize("size", [0, 9, -1])
def test_values_beyond_their_limits_are_refused_wherever_they_come_from(size):
    message = f"size must be above 0 and at most 8, got {size}"
    with pytest.raises(SettingsError, match=message):
        Inner(size=size)
    with pytest.raises(SettingsError, match=f"there: inner: {message}"):
        from_dict(Outer, {"name": "x", "inner": {"size": size}}, "there")
    assert Inner(size=None).size is None


def test_a_key_that_is_a_word_of_python_keeps_its_name():
    made = from_dict(Outer, {"name": "x", "inner": {"from": "there"}, "options": {"free_": 1}}, "here")
    assert made.inner.from_ == "there"
    assert to_dict(made) == {
        "name": "x",
        "inner": {"kind": "plain", "size": 3, "from": "there"},
        "options": {"free_": 1},
    }
    assert from_dict(Outer, to_dict(made), "again") == made


def test_plain_data_of_older_settings_gets_the_defaults_of_newer_ones():
    older = {"name": "x", "inner": {"size": 5, "gone": 1}}
    assert with_defaults(Outer, older) == {
        "name": "x",
        "inner": {"size": 5, "gone": 1, "kind": "plain", "from": None},
        "options": {},
    }
    assert older == {"name": "x", "inner": {"size": 5, "gone": 1}}


def test_help_has_key_type_default_and_meaning_of_every_setting():
    told = {line.key: (line.type, line.default, line.meaning) for line in settings_help(Outer)}
    assert told == {
        "name": ("text", None, "what it is called"),
        "inner.kind": ("text", "plain", "which kind"),
        "inner.size": ("integer or null", "3", "how large"),
        "inner.from": ("text or null", "null", "where from"),
        "options": ("keys and values", "{}", "free keys"),
    }
