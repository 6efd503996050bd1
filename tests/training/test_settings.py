"""Recipe files become checked dataclasses, and every mistake names its key."""

import pytest

import dflash  # noqa: F401  (loads a fast BLAS before MLX)
from dflash.training.recipe import Recipe
from dflash.training.settings import SettingsError, from_dict, load_settings
from dflash.training.toy.target import (
    TargetSettings,
)


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
