"""A value of ``config.json`` that no model can have is named in one line: no traceback, no hang, no gigabytes."""

import json
import logging
import re
import resource
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models import TEXT_VOCAB, qwen3_model, random_drafter, save_target

import dflash
from dflash import DFlashSpeculativeDecoder
from dflash.core.backend import on_cpu
from dflash.core.errors import DFlashError

WRONG = st.one_of(
    st.sampled_from([0, -1, "", "x", None, True, [], [1], {}, {"a": 1}, 10**9, 10**12, 1e300]),
    st.integers(-(10**9), 10**12),
    st.text(max_size=5),
    st.floats(),
)
MOST_MEMORY = 2 * 2**30  # bytes more than are mapped already


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A small target and a drafter for it, copies of which get the wrong values."""
    folder = tmp_path_factory.mktemp("configs")
    save_target(qwen3_model(1, vocab=TEXT_VOCAB), folder / "target")
    dflash.save_drafter(random_drafter(3, TEXT_VOCAB), folder / "drafter")
    return {name: folder / name for name in ("target", "drafter")}


@pytest.fixture(autouse=True)
def little_memory():
    """Let no case allocate what a huge size asks for, where memory is the process's own."""
    logging.disable(logging.WARNING)
    if not on_cpu() or sys.platform != "linux":
        yield
        logging.disable(logging.NOTSET)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY, hard))
    yield
    logging.disable(logging.NOTSET)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(scope="module")
def good_target(folders):
    return dflash.load_target(folders["target"])


@pytest.fixture
def answer(folders, good_target):
    """What a request answers, or the error, if one config is changed."""
    return lambda which, change: answered(folders, good_target, which, change)


def answered(folders: dict[str, Path], good_target: dflash.LoadedTargetModel, which: str, change) -> str:
    file = folders[which] / "config.json"
    before = file.read_text()
    values = json.loads(before)
    change(values)
    file.write_text(json.dumps(values))
    try:
        target = dflash.load_target(folders["target"]) if which == "target" else good_target
        return DFlashSpeculativeDecoder(target, dflash.load_drafter(folders["drafter"])).generate("hi", max_tokens=4)
    except DFlashError as error:
        return f"error: {error}".replace("\n", "A SECOND LINE")
    finally:
        file.write_text(before)


KEYS = {
    "target": "model_type hidden_size num_hidden_layers intermediate_size num_attention_heads rms_norm_eps vocab_size "
    "num_key_value_heads max_position_embeddings head_dim tie_word_embeddings rope_theta eos_token_id rope_scaling "
    "rope_parameters quantization quantization_config text_config layer_types sliding_window architectures auto_map "
    "torch_dtype dtype attention_bias bos_token_id",
    "drafter": "architectures dflash_config mask_token_id target_layer_ids rope_scaling tie_word_embeddings "
    "hidden_size num_hidden_layers num_attention_heads intermediate_size num_key_value_heads vocab_size head_dim "
    "num_target_layers block_size max_position_embeddings rope_theta rms_norm_eps layer_types model_type dtype "
    "sliding_window is_causal "
    "rope_parameters draft_vocab_size use_sliding_window max_window_layers sample_from_anchor elastic_blocks "
    "output_multiplier input_embedding_scale final_logit_softcapping quantization drafter_kind markov_rank draft_shift "
    "speculators_config aux_hidden_state_layer_ids target_hidden_size text_config is_neox_style projector_type",
}


@pytest.mark.parametrize("which", KEYS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_of_any_key_answers_or_is_one_line(answer, which, data):
    key, value = data.draw(st.sampled_from(KEYS[which].split())), data.draw(WRONG)
    inside = which == "drafter" and key in ("mask_token_id", "target_layer_ids")
    said = answer(which, lambda values: (values["dflash_config"] if inside else values).update({key: value}))
    assert "A SECOND LINE" not in said


@pytest.mark.parametrize("which", KEYS)
def test_any_missing_key_is_too(folders, answer, which):
    for key in json.loads((folders[which] / "config.json").read_text()):
        assert "A SECOND LINE" not in answer(which, lambda values, key=key: values.pop(key))


NAMED = {
    "target": [
        *((key, value) for key in ("hidden_size", "num_hidden_layers", "vocab_size", "head_dim", "num_attention_heads")
          for value in (0, -1, "many", None, True, [1], 10**9, 10**12) if (key, value) != ("head_dim", None)),
        *(("max_position_embeddings", value) for value in (0, -5, "many", 1.5)),
        *((key, value) for key in ("rms_norm_eps", "rope_theta") for value in (0, -1, "x", [1], 1e300)),
        *(("eos_token_id", value) for value in ("x", 1.5, {"a": 1})),
        *((key, value) for key in ("rope_scaling", "quantization") for value in ("x", 3)),
        ("tie_word_embeddings", "x"),
        ("model_type", 3),
    ],
    "drafter": [
        *((key, value)
          for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "block_size")
          for value in (0, -1, "many", True, [1], 10**9, 10**12)),
        *(("max_position_embeddings", value) for value in (0, -5, "many", 1.5)),
        *((key, value) for key in ("rms_norm_eps", "rope_theta") for value in (0, -1, "x", [1])),
        ("rope_scaling", "x"),
        ("layer_types", 3),
    ],
}  # fmt: skip


@pytest.mark.parametrize("which", NAMED)
def test_what_no_model_can_have_is_named_with_its_key_and_value(answer, which):
    for key, value in NAMED[which]:
        said = answer(which, lambda values, change={key: value}: values.update(change))
        assert said.startswith("error: "), (key, value, said)
        assert re.search(rf"\b{key}\b.*{re.escape(repr(value).strip(chr(39)))}", said), (key, value, said)


def test_a_config_without_a_kind_and_a_value_within_another_are_named(answer):
    assert "'model_type' is missing" in answer("target", lambda values: values.clear())
    scaling = {"rope_scaling": {"type": "linear", "factor": 0}}
    assert "factor must be a number above 0, got 0" in answer("target", lambda values: values.update(scaling))
