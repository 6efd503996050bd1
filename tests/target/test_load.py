"""What is wrong with a target's folder is said in one line, and what is missing is missed only where it is needed."""

import json
import logging

import mlx.core as mx
import pytest
from support.errors import refused
from support.models import STOP, byte_tokenizer, qwen3_model, random_drafter, save_target

import dflash
from dflash.core.errors import CheckpointError, GenerationError
from dflash.target import load_target


@pytest.fixture
def folder(tmp_path):
    return save_target(qwen3_model(1, vocab=264), tmp_path / "target")


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_nan_weights_are_refused_by_name(folder, name):
    weights = mx.load(str(folder / "model.safetensors"))
    weights[name][..., 5] = mx.nan
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(CheckpointError, match=rf"target holds NaN in {name}; download or convert it again"):
        load_target(folder)


def test_without_tokenizer_files_token_ids_decode_and_text_is_refused(folder, tmp_path, caplog):
    target = load_target(folder)
    assert target.build_prompt("ab", chat=False) == byte_tokenizer().encode("ab")
    assert target.stop_token_ids() == {byte_tokenizer().convert_tokens_to_ids(STOP)}
    target = load_target(save_target(qwen3_model(1), tmp_path / "bare", tokenizer=False))
    assert "no tokenizer files" in caplog.text
    assert (target.tokenizer, target.stop_token_ids()) == (None, frozenset())
    _, features = target.forward_with_hidden_states(mx.array([[1, 2, 3]]), target.make_cache(), (0, 2))
    assert features.shape == (1, 3, 64)
    with pytest.raises(GenerationError, match=r"no tokenizer.*tokenizer\.json"):
        target.build_prompt("hello")


def test_a_tokenizer_of_another_size_than_the_model_is_warned_of(tmp_path, caplog):
    load_target(save_target(qwen3_model(1, vocab=264), tmp_path / "own"))
    assert caplog.messages == []
    for rows in (200, 4000):
        load_target(save_target(qwen3_model(1, vocab=rows), tmp_path / str(rows)))
        assert f"has 262 tokens, the model {rows}: is it another model's?" in caplog.messages[-1]


def test_a_drafter_in_place_of_the_target_is_told_apart(tmp_path, caplog):
    dflash.save_drafter(random_drafter(3), tmp_path / "drafter")
    with pytest.raises(CheckpointError) as error:
        load_target(tmp_path / "drafter")
    refused(error, "it is a drafter, not a target")
    assert caplog.text == ""


def with_code_of_its_own(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "odd.py"} | changes))
    (folder / "odd.py").write_text("from mlx_lm.models.qwen3 import Model, ModelArgs\n")


def test_code_in_a_checkpoint_runs_only_if_it_is_trusted(folder):
    with_code_of_its_own(folder)
    with pytest.raises(CheckpointError, match=r"Python code of its own.*--trust-remote-code.*trust_remote_code=True"):
        load_target(folder)
    assert load_target(folder, trust_remote_code=True).num_layers == 4
    decoder = dflash.DFlashSpeculativeDecoder.from_pretrained(folder, "ngram", trust_remote_code=True)
    assert decoder.loaded_target.num_layers == 4


def test_an_architecture_that_transformers_does_not_know_loads_without_a_word(folder, capfd):
    with_code_of_its_own(folder, model_type="odd")
    handler = logging.StreamHandler()  # that of transformers may hold the stream of an earlier test
    logging.getLogger("transformers").addHandler(handler)
    try:
        load_target(folder, trust_remote_code=True)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert "model of type" not in capfd.readouterr().err


def test_packages_with_architectures_are_imported_before_the_model_is_loaded(folder, monkeypatch):
    """A package may put its own module under ``mlx_lm.models``."""
    order = []
    monkeypatch.setattr("dflash.target.load.registered_adapters", lambda: order.append("packages"))
    monkeypatch.setattr("mlx_lm.load", lambda *_, **__: order.append("model") or 1 / 0)
    with pytest.raises(CheckpointError, match="division by zero"):
        load_target(folder)
    assert order == ["packages", "model"]
