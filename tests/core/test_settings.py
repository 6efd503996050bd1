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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"config": {}, "samples": 1, "fit": {"stesp": 3}}, r"fit: unknown key 'stesp'; did you mean 'steps'\?"),
        ({"config": {}, "samples": 1}, "here: fit missing"),
        ({"config": {}, "samples": "many", "fit": {"steps": 1}}, "samples must be of type int, got 'many'"),
    ],
)
def test_a_key_that_is_unknown_missing_or_of_another_type_is_named(data, message):
    with pytest.raises(SettingsError, match=message):
        from_dict(TargetSettings, data, "here")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "not valid YAML"),
        (b"target: a\ndata:\n  seed: 1\n  seed: 2\n", r"not valid YAML: the key 'seed' is there twice\s.*line 4"),
        (b"target: caf\xe9", r"Cannot read the recipe .*recipe\.yaml: it is not UTF-8 text"),
        (None, r"Cannot read the recipe .*recipe\.yaml: No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        load_settings(Recipe, tmp_path / "recipe.yaml")


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
