"""A target alone gets the drafter that the package has for it, in Python and in every command that drafts."""

import json
import logging
import re
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from support.cli import assert_one_error, invoke
from support.errors import refused
from support.models import TEXT_VOCAB, llama_model, qwen3_model, random_drafter, save_target

import dflash
from dflash import DFlashDraftModel, DFlashSpeculativeDecoder, bundled, load_drafter, load_target
from dflash.cli import loading
from dflash.core.errors import CheckpointError, IncompatibleModelsError
from dflash.core.files import flat, read_json
from dflash.drafters.checkpoints.quantized import description
from dflash.models import ModelOptions
from dflash.target.identity import target_fingerprint
from dflash.target.load import PAIR

_spec = spec_from_file_location("publish", Path(__file__).parents[2] / ".ci" / "publish.py")
publish = module_from_spec(_spec)
_spec.loader.exec_module(publish)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder with a package's ``real/``, whose one drafter is published for the target in ``target/``."""
    monkeypatch.setattr(bundled, "REAL", tmp_path / "real")
    monkeypatch.setattr(bundled, "INDEX", tmp_path / "real" / "drafters.json")
    target = save_target(qwen3_model(1, vocab=TEXT_VOCAB), tmp_path / "target")
    made_for = target_fingerprint(load_target(target))
    drafter = random_drafter(3, TEXT_VOCAB, intermediate_size=64, target_fingerprint=made_for)
    dflash.save_drafter(drafter, tmp_path / "real" / "tiny")
    (tmp_path / "real" / bundled.HELDOUT).write_text('{"prompt": "Hi"}\n{"prompt": "Tell me more."}\n')
    publish.main([str(tmp_path / "real" / "tiny"), "--target", str(target), "--name", "org/tiny"])
    return tmp_path


def quantised(package):
    """The same target in 8 bits, as mlx-lm writes it."""
    folder = package / "packed"
    mlx_lm.convert(str(package / "target"), str(folder), quantize=True, q_group_size=32, q_bits=8)
    assert read_json(folder / "config.json")["quantization"]["bits"] == 8
    return folder


def same_weights(one, other) -> bool:
    pairs = zip(flat(one.parameters()).items(), flat(other.parameters()).items(), strict=True)
    return all(a == b and mx.array_equal(x, y).item() for (a, x), (b, y) in pairs)


# --- finding ----------------------------------------------------------------------------------------------


def test_a_target_alone_gets_its_drafter_at_any_precision_and_without_a_warning(package, caplog):
    expected = load_drafter(package / "real" / "tiny")
    with caplog.at_level(logging.WARNING, "dflash"):
        for target in (package / "target", quantised(package)):
            decoder = DFlashSpeculativeDecoder.from_pretrained(target, block_size=4)
            assert same_weights(decoder.draft_model, expected)
            assert decoder.block_size == 4
    assert caplog.messages == []
    eight = DFlashSpeculativeDecoder.from_pretrained(package / "target", draft_bits=8)
    assert description(eight.draft_model)["bits"] == 8


def test_another_target_of_the_same_shape_has_none(package):
    other = save_target(qwen3_model(2, vocab=TEXT_VOCAB), package / "other")
    with pytest.raises(IncompatibleModelsError) as error:
        DFlashSpeculativeDecoder.from_pretrained(other)
    refused(error, "No drafter is bundled for this target", "org/tiny", "dflash fit")


def test_the_bundled_models_are_in_the_index_of_the_package():
    found = bundled.find_drafter(load_target(PAIR / "target"))
    assert found == bundled.BundledDrafter(PAIR / "drafter", "the bundled target")
    for entry in read_json(bundled.INDEX).values():
        folder = (bundled.INDEX.parent / entry["folder"]).resolve()
        assert folder.is_relative_to(PAIR.parent)
        config = load_drafter(folder).config
        assert config.target_fingerprint is None  # one drafter for every quantisation
        assert (folder.parent / bundled.HELDOUT).is_file()


# --- commands ---------------------------------------------------------------------------------------------


def test_every_command_that_drafts_finds_it(package, prompts):
    target, drafter = ("--target", package / "target"), package / "real" / "tiny"

    def drafted(*options: object) -> list[int]:
        return json.loads(invoke("generate", "Hi", *target, "--max-tokens", "12", "--json", *options).stdout)["drafted"]

    assert drafted() == drafted("--drafter", drafter) == drafted("--drafter", "bundled") != []
    file = package / "cache.safetensors"
    for command in (
        ["bench", "--prompts", prompts, "--max-tokens", "6", "--drafter", "ngram", "--drafter", "bundled"],
        ["eval", "--prompts", prompts, "--max-tokens", "6"],
        ["cache-prompt", "Read this: ", "--prompt-cache-file", file],
        ["generate", "Hi", "--prompt-cache-file", file, "--max-tokens", "6"],
    ):
        result = invoke(*command, *target)
        assert result.exit_code == 0, result.output


def test_decoders_of_several_drafters_share_the_target_and_one_of_them_says_which(package):
    names = ("bundled", "ngram+bundled", str(package / "real" / "tiny"))
    decoders = loading.load_decoders(ModelOptions(package / "target", block_size=4, draft_bits=8), names)
    one, combined, named = decoders.values()
    assert tuple(decoders) == names
    assert one.loaded_target.model is combined.loaded_target.model is named.loaded_target.model
    assert same_weights(one.draft_model, combined.draft_model.model)
    assert same_weights(one.draft_model, named.draft_model)
    assert description(one.draft_model)["bits"] == 8
    assert one.block_size == combined.block_size == 4


LOADERS = (
    lambda drafter: DFlashSpeculativeDecoder.from_pretrained(None, drafter),
    lambda drafter: loading.load_decoder(ModelOptions(drafter=drafter)),
)


def test_a_drafter_alone_gets_the_bundled_target_if_it_was_trained_for_that_one(tmp_path):
    made_for, other = target_fingerprint(load_target("bundled")), tmp_path / "other"
    config = load_drafter(PAIR / "drafter").config
    own = DFlashDraftModel(replace(config, num_hidden_layers=1, layer_types=(), target_fingerprint=made_for))
    dflash.save_drafter(own, tmp_path / "own")
    for name in (str(tmp_path / "own"), f"ngram+{tmp_path / 'own'}", "ngram"):
        for load in LOADERS:
            assert load(name).loaded_target.folder == PAIR / "target"
    dflash.save_drafter(random_drafter(3, TEXT_VOCAB, target_fingerprint="of another"), other)
    for name, error, words in (
        (other, IncompatibleModelsError, f"{other} works only with the target that it was trained for: give both"),
        (PAIR / "drafter", IncompatibleModelsError, "give both, or neither"),  # does not say what it was trained for
        ("mtp", IncompatibleModelsError, "holds no mtp.* tensors, so the drafter 'mtp' has nothing to draft with"),
        ("./nope", CheckpointError, "No checkpoint folder at './nope'"),
        ("run/nope", CheckpointError, "There is no folder 'run/nope'; with a drafter of the hub"),
    ):
        for load in LOADERS:
            with pytest.raises(error) as refusal:
                load(str(name))
            refused(refusal, words)


def test_the_bundled_target_has_a_name_wherever_a_target_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").mkdir()  # a folder of that name is ./bundled
    (tmp_path / "one.jsonl").write_text('{"prompt": "Hi", "response": "Hello."}\n')
    for command in (
        ["generate", "Hi", "--max-tokens", "3", "--trace", "trace.jsonl"],
        ["prepare", "one.jsonl", "data"],
    ):
        result = invoke(*command, "--target", "bundled")
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[0])["target"] == "bundled"
    assert "target: bundled\n" in invoke("recipe", "--target", "bundled", "--data", "data").stdout


def test_where_there_is_none_every_command_says_what_to_do(package, prompts):
    other = ("--target", save_target(llama_model(1, TEXT_VOCAB), package / "other"))
    for command in (["generate", "Hi"], ["bench", "--prompts", prompts], ["eval", "--prompts", prompts], ["demo"]):
        assert_one_error(invoke(*command, *other), "No drafter is bundled for this target.*dflash fit --target")
    assert_one_error(invoke("generate", "Hi", *other, "--drafter", "bundled"), "No drafter is bundled")


def test_doctor_shows_the_drafter_that_it_found_or_that_there_is_none(package, monkeypatch):
    monkeypatch.setattr("dflash.evaluation.doctor.costs", lambda decoder: {0: 0.01, 1: 0.02})
    for named in ((), ("--drafter", "bundled")):
        shown = invoke("doctor", "--target", package / "target", *named).stdout
        assert "made for org/tiny" in shown
        assert "positions that one pass fills" in shown
    shown = invoke("doctor", "--target", save_target(llama_model(1, TEXT_VOCAB), package / "other")).stdout
    assert "none; dflash fit makes one" in shown
    assert "positions that one pass fills" not in shown


def test_the_demo_answers_a_request_for_a_target_with_the_drafter_found_for_it(package, monkeypatch):
    monkeypatch.setattr("dflash.evaluation.demo.MAX_TOKENS", 16)
    monkeypatch.setattr("dflash.evaluation.demo.LEAST_TOKENS", 8)
    result = invoke("demo", "--target", package / "target")
    assert result.exit_code == 0, result.output
    assert re.search(r"Request: (Hi|Tell me more\.)", result.stdout)


# --- publishing -------------------------------------------------------------------------------------------


def test_publishing_again_replaces_the_entry_and_quantises_when_asked(package):
    before = load_drafter(package / "real" / "tiny")
    second = save_target(qwen3_model(5, vocab=TEXT_VOCAB), package / "second")
    publish.publish(package / "real" / "tiny", second, "org/second", bits=8)
    (entry,) = read_json(bundled.INDEX).values()
    assert entry == {"folder": "tiny", "name": "org/second"}
    after = load_drafter(package / "real" / "tiny")
    assert description(after)["bits"] == 8
    assert description(before) is None
    assert bundled.find_drafter(load_target(package / "target")) is None


def test_a_drafter_that_was_trained_for_another_target_is_not_published(package):
    other = load_target(save_target(qwen3_model(2, vocab=TEXT_VOCAB), package / "other"))
    wrong = package / "real" / "wrong"
    dflash.save_drafter(random_drafter(3, TEXT_VOCAB, target_fingerprint=target_fingerprint(other)), wrong)
    files = [bundled.INDEX, wrong / "config.json"]
    before = [file.read_bytes() for file in files]
    with pytest.raises(SystemExit, match=r"error: The drafter in .*wrong was trained for another target than"):
        publish.main([str(wrong), "--target", str(package / "target"), "--name", "x"])
    assert [file.read_bytes() for file in files] == before
