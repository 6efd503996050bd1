"""From a run to the published format, and to the hub when asked."""

import json
import shutil
from unittest.mock import Mock

import mlx.nn as nn
import pytest
from support.cli import assert_one_error, invoke
from support.runs import recipe

from dflash import DFlashConfig, DFlashDraftModel, load_drafter, register_drafter
from dflash.core.errors import DFlashError
from dflash.training import export
from dflash.training.train import train


def test_export_writes_best_or_last_and_refuses_what_is_no_run(undisturbed, tmp_path):
    assert invoke("export", undisturbed, tmp_path / "best").exit_code == 0
    trained = undisturbed / "drafter" / "model.safetensors"
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == trained.read_bytes()
    assert invoke("export", undisturbed, tmp_path / "last", "--last").exit_code == 0
    assert "not evaluated" in (tmp_path / "last" / "README.md").read_text()
    (tmp_path / "last" / "recipe.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for wrong, out in [*((tmp_path / name, "x") for name in (".", "best", "last")), (undisturbed, "file")]:
        answer = invoke("export", wrong, tmp_path / out)
        assert (answer.exit_code, answer.stderr.count("\n")) == (1, 1)
    named = ("--push", "caf\udce9")
    assert_one_error(invoke("export", undisturbed, tmp_path / "named", *named), "--push is not UTF-8 text")


def test_a_card_names_what_has_a_name(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "push", lambda folder, name: name)
    named = ["--target-name", "org/one", "--push", "me/drafter"]
    assert invoke("export", undisturbed, tmp_path / "out", *named).exit_code == 0
    card = (tmp_path / "out/README.md").read_text()
    assert "base_model: org/one\n" in card
    assert "# A DFlash drafter for org/one\n" in card
    assert "--target org/one --drafter me/drafter\n```\n\n## Measured" in card
    assert "target: org/one\n" in card
    results = {"acceptance_by_position": [], "acceptance_length": 1.0, "blocks": 1, "step": 1}
    recorded, config = export.recorded_recipe(undisturbed), load_drafter(undisturbed / "drafter").config
    for found, words in (({}, "up to 2 held-out prompts"), ({"prompts": 1}, "of 1 held-out prompt,")):
        assert words in export.card(recorded, config, results | found)  # older runs do not say how many were decoded
    assert "--target bundled --drafter" in export.card(recorded | {"target": "bundled"}, config, None)


def test_export_overwrites_a_drafter_and_nothing_else(undisturbed, tmp_path):
    for _ in range(2):
        assert invoke("export", undisturbed, tmp_path).exit_code == 0
    (tmp_path / "mine.txt").write_text("")
    answer = invoke("export", undisturbed, tmp_path)
    assert answer.exit_code == 1
    assert "holds other files, such as 'mine.txt'; choose a new folder, or remove them." in answer.stderr


def test_nothing_is_pushed_without_being_asked_and_a_refusal_is_one_line(undisturbed, tmp_path, monkeypatch):
    hub = Mock()
    hub.create_repo.side_effect = [RuntimeError("401 Unauthorized\nlong text"), "https://hub/me/it"]
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    assert invoke("export", undisturbed, tmp_path / "a").exit_code == 0
    assert not hub.mock_calls
    answer = invoke("export", undisturbed, tmp_path / "a", "--push", "me/it")
    assert answer.stderr == "error: Cannot upload to 'me/it' on the hub: 401 Unauthorized long text\n"
    assert not hub.upload_folder.called
    assert invoke("export", undisturbed, tmp_path / "a", "--push", "me/it").stdout.strip() == "https://hub/me/it"
    hub.create_repo.assert_called_with("me/it", exist_ok=True)
    hub.upload_folder.assert_called_once_with(
        repo_id="me/it", folder_path=str(tmp_path / "a"), allow_patterns=list(export.EXPORTED)
    )
    with pytest.raises(DFlashError, match="holds no drafter"):
        export.push(tmp_path / "nothing", "me/it")


@register_drafter("gated-for-a-test")
class GatedDrafter(DFlashDraftModel):
    """A class of one's own: one more weight, kept by recipe, run, export and load."""

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.gate = nn.Linear(config.hidden_size, 1)


def test_a_drafter_class_of_ones_own_is_trained_exported_and_loaded(folder):
    train(recipe(folder, "gated", "run.steps=1", "drafter.kind=gated-for-a-test"))
    loaded = load_drafter(folder / "gated" / "drafter")
    assert type(loaded) is GatedDrafter
    assert loaded.gate.weight.shape == (1, loaded.config.hidden_size)
    assert "gated-for-a-test" in (folder / "gated" / "drafter" / "config.json").read_text()


def test_weights_that_do_not_fit_the_config_are_named(undisturbed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    message = r"The weights of .* do not fit its config\.json: Expected shape"
    assert_one_error(invoke("export", run, tmp_path / "out"), message)
