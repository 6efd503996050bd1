"""Checkpoints: bit-exact both ways, and every bad one refused in one line of its own."""

import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import mlx.core as mx
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from mlx.utils import tree_flatten
from support.errors import refused
from support.models import TEXT_VOCAB, plain_greedy, qwen3_model, random_drafter, save_target

from dflash import DFlashSpeculativeDecoder, load_drafter, load_target, save_drafter
from dflash.core.backend import compute_dtype
from dflash.core.errors import CheckpointError, DFlashError, IncompatibleModelsError

CPU = mx.default_device() == mx.Device(mx.cpu)

PUBLISHED_NAMES = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{i}.{name}.weight"
    for i in range(2)
    for name in (
        *("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
}


def drafter_folder(folder: Path, **changes) -> Path:
    save_drafter(random_drafter(0, TEXT_VOCAB, **changes), folder)
    return folder


@pytest.fixture
def saved(tmp_path) -> Path:
    return drafter_folder(tmp_path / "drafter")


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    return save_target(qwen3_model(0, TEXT_VOCAB), tmp_path_factory.mktemp("target"))


def stored(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "model.safetensors"))


def rewrite(folder: Path, change) -> None:
    weights = stored(folder)
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def truncate(file: Path, kept: float) -> None:
    os.truncate(file, int(file.stat().st_size * kept))


def assert_refused(load, path, *words: str, kind: type[DFlashError] = CheckpointError) -> None:
    with pytest.raises(kind) as error:
        load(path)
    refused(error, *words)


# --- both ways --------------------------------------------------------------------------------------------


def test_a_saved_drafter_has_the_published_names_and_config(saved):
    assert set(stored(saved)) == PUBLISHED_NAMES
    assert {w.dtype for w in stored(saved).values()} == {mx.bfloat16}
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dtype"] == "bfloat16"


def test_bfloat16_weights_come_back_bit_by_bit(saved, tmp_path):
    save_drafter(load_drafter(saved), tmp_path / "again")
    first, again = stored(saved), stored(tmp_path / "again")
    assert first.keys() == again.keys()
    for name, w in first.items():
        assert mx.array_equal(w.view(mx.uint16), again[name].view(mx.uint16)), name
    assert load_drafter(tmp_path / "again").config == load_drafter(saved).config


@pytest.mark.skipif(not CPU, reason="a GPU computes in the stored dtype")
def test_on_the_cpu_drafter_and_target_compute_in_float32(saved, target_folder):
    for model in (load_drafter(saved), load_target(target_folder).model):
        assert {w.dtype for _, w in tree_flatten(model.parameters())} == {mx.float32}


def test_only_half_precision_is_widened():
    assert compute_dtype(mx.float32) == mx.float32
    assert compute_dtype(mx.bfloat16) == (mx.float32 if CPU else mx.bfloat16)


def test_weights_may_be_spread_over_several_files(saved):
    weights = stored(saved)
    mx.eval(weights)
    names = sorted(weights)
    for part, held in enumerate((names[:5], names[5:]), start=1):
        mx.save_safetensors(str(saved / f"model-0000{part}-of-00002.safetensors"), {n: weights[n] for n in held})
    (saved / "model.safetensors").unlink()
    assert {n for n, _ in tree_flatten(load_drafter(saved).parameters())} == PUBLISHED_NAMES


# --- a save that fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", [False, True])
def test_a_failed_save_leaves_the_old_checkpoint_and_no_other_file(saved, monkeypatch, writes):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}

    def broken(path, *_, **__):
        if writes:
            Path(path).write_bytes(b"half a file")
        raise RuntimeError("disk full")

    monkeypatch.setattr(mx, "save_safetensors", broken)
    with pytest.raises(OSError, match=r"Cannot write .*model\.safetensors: disk full"):
        save_drafter(random_drafter(9, TEXT_VOCAB), saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


def test_a_save_replaces_an_older_checkpoint_and_leaves_two_files(saved):
    newer = random_drafter(9, TEXT_VOCAB)
    save_drafter(newer, saved)
    assert sorted(file.name for file in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert mx.array_equal(stored(saved)["fc.weight"], newer.fc.weight.astype(mx.bfloat16))
    assert (saved / "model.safetensors").stat().st_mode & 0o444 == 0o444


# --- bad drafters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "path"),
    [(load_drafter, "/no/such/folder"), (load_drafter, "no-such-folder"), (load_target, "./no/such/folder")],
)
def test_a_missing_path_is_named(load, path):
    assert_refused(load, path, path, "config.json")


def test_a_file_in_place_of_a_folder_is_refused(saved):
    assert_refused(load_drafter, saved / "model.safetensors", "No checkpoint folder")


@pytest.mark.parametrize(
    ("load", "reason", "words"),
    [
        (load_target, OSError("no network\nlong story"), "no network"),
        (load_drafter, LocalEntryNotFoundError("a paragraph"), "hub: it cannot be reached from here."),
        (load_drafter, RepositoryNotFoundError("a", response=Mock()), "hub: it has no such model, or a private one."),
        (load_drafter, GatedRepoError("ask for access", response=Mock()), "ask for access"),
    ],
)
def test_a_hub_name_that_cannot_be_downloaded_is_one_line(load, reason, words, monkeypatch):
    def refuse(*_, **__):
        raise reason

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match="There is no folder 'nobody/nothing'") as error:
        load("nobody/nothing")
    refused(error, "on the hub", words)
    assert len(str(error.value)) < 120


def test_a_hub_name_is_downloaded_without_pickled_weights(saved, monkeypatch):
    asked = {}

    def fake(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert load_drafter("some/drafter").config.vocab_size == TEXT_VOCAB
    assert asked["name"] == "some/drafter"
    assert not any(p.endswith((".bin", ".pt", ".py", "*")) for p in asked["patterns"])


def test_a_run_in_place_of_its_drafter_is_told_apart(saved, tmp_path):
    run = tmp_path / "one"
    shutil.copytree(saved, run)
    (run / "recipe.json").write_text("{}")
    assert_refused(load_drafter, run, f"{run} is a run; make its drafter with: dflash export {run} {run}/drafter")
    shutil.copytree(saved, run / "drafter")
    assert_refused(load_drafter, run, f"{run} is a run; its drafter is {run}/drafter")
    assert load_drafter(run / "drafter").block_size == 8


def weights_with(change):
    return lambda folder: rewrite(folder, change)


def config_with(**changes):
    return lambda folder: edit_config(folder, **changes)


DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), ["config.json is missing"]),
    "broken JSON": (lambda d: (d / "config.json").write_text('{"a": '), ["config.json", "not valid JSON"]),
    "config is no text": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"), ["not valid JSON"]),
    "config is a list": (lambda d: (d / "config.json").write_text("[1]"), ["must hold a JSON object", "list"]),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ["no *.safetensors"]),
    "truncated": (lambda d: truncate(d / "model.safetensors", 0.6), ["model.safetensors", "damaged or truncated"]),
    "empty file": (lambda d: os.truncate(d / "model.safetensors", 0), ["damaged or truncated"]),
    "not safetensors": (lambda d: (d / "model.safetensors").write_bytes(b"x" * 999), ["damaged or truncated"]),
    "missing weight": (
        weights_with(lambda w: w.pop("layers.1.mlp.up_proj.weight")), ["lacks layers.1.mlp.up_proj.weight"]
    ),
    "extra weight": (
        weights_with(lambda w: w.update({"layers.2.mlp.up_proj.weight": mx.zeros(3)})),
        ["holds layers.2.mlp.up_proj.weight", "unknown"],
    ),
    "misshapen weight": (
        weights_with(lambda w: w.update({"fc.weight": w["fc.weight"][:, 1:]})), ["fc.weight", "(32, 95)", "(32, 96)"]
    ),
    "config of a deeper drafter": (config_with(num_hidden_layers=3, layer_types=None), ["lacks", "and 8 more"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_drafter_is_refused_in_one_telling_line(saved, name):
    damage, words = DAMAGE[name]
    damage(saved)
    assert_refused(load_drafter, saved, *words)


# --- drafters of other targets ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 40}, ["hidden_size 40", "32"]),
        ({"vocab_size": 300}, ["vocab_size 300", "264"]),
        ({"num_target_layers": 6}, ["6", "4", "layers"]),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path, target_folder, changes, words):
    drafter_folder(tmp_path / "other", **changes)
    with pytest.raises(IncompatibleModelsError) as error:
        DFlashSpeculativeDecoder.from_pretrained(target_folder, tmp_path / "other")
    refused(error, *words, "trained for this target")


def test_from_pretrained_loads_a_pair_that_decodes_what_plain_decoding_writes(saved, target_folder):
    decoder = DFlashSpeculativeDecoder.from_pretrained(target_folder, saved, block_size=4)
    assert decoder.block_size == 4
    prompt = decoder.loaded_target.build_prompt("hi")
    tokens, lead = plain_greedy(decoder.target_model, prompt, 20)
    assert lead > 2e-4, "a near tie: float32 may fall on its other side"
    ids = decoder.spec_generate(mx.array([prompt]), 20, stop_token_ids=[])
    assert ids[0, len(prompt) :].tolist() == tokens


def test_a_drafter_without_its_target_is_refused(saved):
    with pytest.raises(DFlashError) as error:
        DFlashSpeculativeDecoder.from_pretrained(drafter=saved)
    refused(error, "both")


# --- bad targets ------------------------------------------------------------------------------------------


BAD_TARGETS = {
    "no config": (lambda d: (d / "config.json").unlink(), CheckpointError, ["config.json"]),
    "broken JSON": (lambda d: (d / "config.json").write_text("{"), CheckpointError, ["config.json"]),
    "truncated": (lambda d: truncate(d / "model.safetensors", 0.6), CheckpointError, ["load"]),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), CheckpointError, ["safetensors"]),
    "missing weight": (
        weights_with(lambda w: w.pop("model.norm.weight")), CheckpointError, ["1 parameters", "model.norm.weight"]
    ),
    "no model_type": (lambda d: (d / "config.json").write_text("{}"), CheckpointError, ["model_type"]),
    "model_type unknown to mlx-lm": (config_with(model_type="abacus"), CheckpointError, ["abacus"]),
    "model_type of another family": (config_with(model_type="qwen2"), DFlashError, []),
    "missing config value": (config_with(hidden_size=None), CheckpointError, []),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_a_bad_target_is_refused_in_one_telling_line(tmp_path, target_folder, name):
    damage, kind, words = BAD_TARGETS[name]
    folder = tmp_path / "damaged-target"
    shutil.copytree(target_folder, folder)
    damage(folder)
    assert_refused(load_target, folder, "damaged-target", *words, kind=kind)
