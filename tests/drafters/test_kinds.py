"""A registered kind of drafter is saved, loaded, exported to the command line and decoded as any other."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from drafters import gated_drafter
from support.cli import assert_one_error, invoke
from support.models import TEXT_VOCAB, draft_config, plain_greedy, qwen3_model, random_drafter, randomize, save_target
from support.packagings import assert_saved

from dflash import DFlashDraftModel, DFlashSpeculativeDecoder, load_drafter, load_target, save_drafter
from dflash.core.errors import CheckpointError, DFlashError
from dflash.drafters import kinds

PLUGIN = Path(gated_drafter.__file__)


def gated(**changes) -> gated_drafter.GatedDrafter:
    config = gated_drafter.GatedConfig(**{**vars(draft_config(TEXT_VOCAB)), "gate_scale": 2.5, **changes})
    return randomize(gated_drafter.GatedDrafter(config), 3, scale=2.0)


def test_a_kind_of_ones_own_is_saved_loaded_and_decoded(tmp_path):
    assert len(PLUGIN.read_text().splitlines()) <= 30
    config = assert_saved(gated(), tmp_path / "d", mx.float32)
    assert (config["drafter_kind"], config["architectures"], config["gate_scale"]) == ("gated", ["GatedDrafter"], 2.5)
    loaded = load_drafter(tmp_path / "d")
    target = load_target(save_target(qwen3_model(0, TEXT_VOCAB), tmp_path / "t"))
    features = mx.random.normal((1, 4, loaded.fc.weight.shape[1]), key=mx.random.key(0))
    assert not mx.allclose(loaded.context(features), DFlashDraftModel.context(loaded, features)).item()
    tokens, lead = plain_greedy(target.model, [1, 2, 3], 12)
    assert lead > 2e-4
    decoder = DFlashSpeculativeDecoder(target, loaded)
    assert decoder.spec_generate(mx.array([[1, 2, 3]]), 12, stop_token_ids=[]).tolist() == [[1, 2, 3, *tokens]]


def test_the_command_line_knows_a_kind_by_its_plugin(tmp_path):
    save_drafter(gated(), tmp_path / "d")
    save_target(qwen3_model(0, TEXT_VOCAB), tmp_path / "t")
    for file, name in ((PLUGIN, "plugin.py"), (tmp_path / "d" / "config.json", "d/config.json")):
        (tmp_path / name).write_text(file.read_text().replace('"gated"', '"gated_elsewhere"'))
    command = ["generate", "ab", "--target", tmp_path / "t", "--drafter", tmp_path / "d", "--max-tokens", "6"]
    assert_one_error(invoke(*command), "drafter_kind 'gated_elsewhere' is not registered here.*--plugin")
    answer = invoke("--plugin", tmp_path / "plugin.py", *command, "--policy", "full")
    assert answer.exit_code == 0, answer.stderr


def test_a_class_that_nothing_could_load_again_is_not_saved(tmp_path):
    class Unregistered(DFlashDraftModel):
        pass

    with pytest.raises(CheckpointError, match=r"Unregistered is not registered.*@register_drafter"):
        save_drafter(Unregistered(draft_config()), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_published_files_are_of_the_published_kind(tmp_path):
    save_drafter(random_drafter(0), tmp_path)
    assert "drafter_kind" not in json.loads((tmp_path / "config.json").read_text())
    assert type(load_drafter(tmp_path)) is kinds.drafter_class("dflash") is DFlashDraftModel


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, "dflash"),
        ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"drafter_kind": "gated"}, "gated"),
        ({"drafter_kind": None, "model_type": "gated"}, "gated"),
        ({"model_type": "qwen3", "architectures": ["gated"]}, "gated"),
        ({"architectures": "gated"}, "gated"),
        ({"architectures": None}, "dflash"),
    ],
)
def test_a_config_names_its_kind(config, kind):
    assert kinds.kind_in(config) == kind


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(DFlashError, match=r"Unknown drafter 'gate'; did you mean 'gated'\?"):
        kinds.drafter_class("gate")
