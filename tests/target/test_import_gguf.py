"""A GGUF file becomes a target: the same logits and tokens, and nothing of the file left out silently."""

import json
import sys

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama, qwen2, qwen3
from support.cli import assert_one_error, invoke
from support.errors import refused
from support.gguf import gguf_metadata, gguf_tensors, random_blocks, save_by_mlx, write_gguf
from support.models import TEXT_VOCAB, byte_tokenizer, plain_greedy, randomize

from dflash import load_target
from dflash.core.errors import CheckpointError
from dflash.target.gguf import GGUF, GROUP_SIZE, read_gguf
from dflash.target.gguf_tokenizer import build_tokenizer
from dflash.target.import_gguf import import_gguf

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def small(module, seed: int, **changes):
    args = {"vocab_size": TEXT_VOCAB, "rms_norm_eps": 1e-6, "num_attention_heads": 4, "num_key_value_heads": 2}
    name = module.__name__.rpartition(".")[2]
    args |= {"model_type": name, "max_position_embeddings": 512, "rope_theta": 20_000.0} | SIZES | changes
    return randomize(module.Model(module.ModelArgs.from_dict(args)), seed, scale=2.0)


MODELS = {
    "llama": lambda: small(llama, 1, tie_word_embeddings=False),
    "llama, tied, with biases": lambda: small(llama, 2, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: small(qwen2, 3),
    "qwen3": lambda: small(qwen3, 4, tie_word_embeddings=False, head_dim=16),
}


def logits(model, seed: int = 0) -> np.ndarray:
    return np.array(model(mx.random.randint(0, TEXT_VOCAB, (2, 24), key=mx.random.key(seed))))


@pytest.mark.parametrize(
    ("name", "write"), [*((name, write_gguf) for name in MODELS), ("llama", save_by_mlx), ("qwen3", save_by_mlx)]
)
def test_logits_and_text_are_those_of_the_model_in_the_file(name, write, tmp_path):
    model = MODELS[name]()
    path = write(tmp_path / "model.gguf", gguf_tensors(model), gguf_metadata(model))
    import_gguf(path, tmp_path / "target")
    imported = load_target(tmp_path / "target")
    np.testing.assert_allclose(logits(imported.model), logits(model), atol=1e-4)
    prompt = byte_tokenizer().encode("Say 12 abab")
    assert plain_greedy(imported.model, prompt, 12)[0] == plain_greedy(model, prompt, 12)[0]
    messages = [{"role": "user", "content": "12 tabs 🙂 <|im_end|>"}]
    rendered = byte_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert imported.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == rendered
    assert imported.tokenizer.encode(rendered) == byte_tokenizer().encode(rendered)
    assert imported.tokenizer.decode(imported.tokenizer.encode("naïve 漢字\n")) == "naïve 漢字\n"
    assert imported.stop_token_ids() == {byte_tokenizer().eos_token_id}


@pytest.mark.parametrize(
    ("stored", "others", "bits"),
    [("Q4_0", {}, 4), ("Q4_1", {"output": "Q8_0"}, 4), ("Q8_0", {"blk.0.attn_v": "F16"}, 8), ("F16", {}, None)],
)
def test_packed_weights_stay_packed_and_say_the_same_as_plain_ones(stored, others, bits, tmp_path):
    model = MODELS["llama"]()
    written = gguf_tensors(model)
    path = write_gguf(tmp_path / "model.gguf", written, gguf_metadata(model), stored, **others)
    quantization = import_gguf(path, tmp_path / "packed").get("quantization", {})
    assert quantization.get("bits") == bits
    assert quantization.get("lm_head") == ({"group_size": 32, "bits": 8} if "output" in others else None)
    assert "quantization" not in import_gguf(path, tmp_path / "plain", "float32")
    packed, plain = (load_target(tmp_path / name).model for name in ("packed", "plain"))
    np.testing.assert_allclose(logits(packed), logits(plain), atol=0.02)
    error = {4: 1 / 8, 8: 1 / 254, None: 5e-4}[bits]  # half a step of the largest weight; Q4_0 cuts off a whole one
    for name, array in gguf_tensors(plain).items():
        np.testing.assert_allclose(array, written[name], atol=1.05 * error * np.abs(written[name]).max())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K"])
def test_packed_weights_are_those_of_llama_cpp(kind, tmp_path):
    of = gguf.GGMLQuantizationType[kind]
    blocks = random_blocks(kind, 12)
    blocks[-1, :2] = 0  # a scale of 0
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "any")
    writer.add_tensor("x.weight", blocks.reshape(3, -1), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    packed = read_gguf(tmp_path / "model.gguf").tensors()
    bits = int(kind[1])
    read = mx.dequantize(packed["x.weight"], packed["x.scales"], packed["x.biases"], GROUP_SIZE, bits)
    np.testing.assert_array_equal(read, gguf.dequantize(blocks.reshape(3, -1), of))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q6_K", "IQ4_NL"])
def test_weights_that_mlx_cannot_hold_packed_become_plain(kind, tmp_path):
    model = small(llama, 1, hidden_size=256, intermediate_size=256)
    path = write_gguf(tmp_path / "model.gguf", gguf_tensors(model), gguf_metadata(model), kind)
    assert "quantization" not in import_gguf(path, tmp_path / "target")
    weights = mx.load(str(tmp_path / "target/model.safetensors"))
    assert {w.dtype for w in weights.values()} == {mx.float16}
    of = gguf.GGMLQuantizationType[kind]
    expected = gguf.dequantize(random_blocks(kind, 256 * 256 // gguf.GGML_QUANT_SIZES[of][0]).reshape(256, -1), of)
    np.testing.assert_allclose(weights["model.layers.1.mlp.up_proj.weight"], expected.astype(np.float16))


# --- what is refused ----------------------------------------------------------------------------------------


def changed(tmp_path, tensors=lambda t: t, stored="F32", **metadata):
    model = MODELS["llama"]()
    values = gguf_metadata(model) | {key.replace("__", "."): value for key, value in metadata.items()}
    values = {key: value for key, value in values.items() if value is not None}
    return write_gguf(tmp_path / "model.gguf", tensors(gguf_tensors(model)), values, stored)


def without(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def also(name, *shape):
    return lambda tensors: tensors | {name: np.ones(shape, np.float32)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general__architecture": "falcon"}, ["'falcon'", "llama, qwen2, qwen3"]),
        ({"tensors": also("blk.0.ffn_gate_inp.weight", 4, 32)}, ["blk.0.ffn_gate_inp.weight", "no use"]),
        ({"tensors": also("blk.1.attn_q_norm.weight", 8)}, ["model.layers.1.self_attn.q_norm.weight", "no use"]),
        ({"tensors": also("blk.0.attn_q.bias", 32)}, ["model.layers.0.self_attn.q_proj.bias", "no use"]),
        ({"tensors": without("blk.1.ffn_up.weight")}, ["lacks the tensor for model.layers.1.mlp.up_proj.weight"]),
        ({"tensors": also("output_norm.weight", 31)}, ["model.norm.weight has shape (31,), expected (32,)"]),
        (
            {"tensors": lambda tensors: tensors | {"rope_freqs.weight": np.arange(1.0, 5.0)}},
            ["rope_freqs.weight", "LLaMA 3"],
        ),
        ({"llama__expert_count": 8}, ["llama.expert_count to 8", "hub"]),
        ({"llama__rope__scaling__type": "yarn"}, ["'yarn'", "'linear'"]),
        ({"llama__rope__dimension_count": 4}, ["llama.rope.dimension_count is 4", "8 numbers"]),
        ({"llama__block_count": None}, ["llama.block_count must be one number, got None"]),
        ({"tokenizer__ggml__model": "llama"}, ["kind 'llama'", "'gpt2'"]),
        ({"tokenizer__ggml__pre": "tekken"}, ["'tekken'", "known are", "smollm"]),
        ({"tokenizer__ggml__tokens": None}, ["no tokenizer.ggml.tokens"]),
        ({"tokenizer__ggml__merges": ["a zz"]}, ["damaged tokenizer"]),
    ],
)
def test_what_would_be_lost_or_misread_is_refused_by_name(change, words, tmp_path):
    with pytest.raises(CheckpointError) as error:
        import_gguf(changed(tmp_path, **change), tmp_path / "target")
    refused(error, *words)
    assert not (tmp_path / "target/config.json").exists()


def test_a_file_that_is_no_gguf_or_ends_early_is_refused(tmp_path):
    whole = changed(tmp_path).read_bytes()
    for size in (0, 3, 20, 200, 2000, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(CheckpointError) as error:
            import_gguf(tmp_path / "cut.gguf", tmp_path / "target")
        refused(error, "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"safe" + whole[4:])
    with pytest.raises(CheckpointError, match=r"no GGUF file, damaged or truncated; download"):
        import_gguf(tmp_path / "cut.gguf", tmp_path / "target")


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    path = changed(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError) as error:
        import_gguf(path, tmp_path / "target")
    refused(error, "llama.cpp's package gguf", "pip install '.[gguf]'")


# --- llama 3 ------------------------------------------------------------------------------------------------


def test_the_rotary_factors_of_llama_3_become_its_settings(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    model = small(llama, 5, rope_theta=500_000.0, rope_scaling=scaling)
    plain = 500_000.0 ** (np.arange(0, 8, 2) / 8)
    factors = np.array(model.model.layers[0].self_attn.rope._freqs) / plain
    assert len(set(factors.round(3))) > 1
    tensors = gguf_tensors(model) | {"rope_freqs.weight": factors.astype(np.float32)}
    path = write_gguf(tmp_path / "model.gguf", tensors, gguf_metadata(model))
    assert import_gguf(path, tmp_path / "target")["rope_scaling"] == scaling
    np.testing.assert_allclose(logits(load_target(tmp_path / "target").model), logits(model), atol=1e-4)


def tokens_of(pre: str, text: str) -> list[str]:
    """Pieces of a text whose words are whole tokens, so that only the splitting shows."""
    metadata = gguf_metadata(MODELS["llama"]()) | {"tokenizer.ggml.pre": pre}
    split = build_tokenizer(GGUF("x", metadata, {})).pre_tokenizer
    return [piece for piece, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ1234", "Ġif", "(", "x", "):", "Ċ", "Ġy"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġif", "(", "x", "):", "Ċ", "Ġy"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġif", "(x", "):Ċ", "Ġy"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "Ġif", "(x", "):Ċ", "Ġy"]),
    ],
)
def test_texts_are_split_as_each_family_splits_them(pre, pieces):
    assert tokens_of(pre, "It's 1234 if(x):\n y") == pieces


def test_a_begin_token_is_added_where_the_file_says_so():
    metadata = gguf_metadata(MODELS["llama"]()) | {"tokenizer.ggml.bos_token_id": 65}
    plain = build_tokenizer(GGUF("x", metadata, {})).encode("ab").ids
    assert build_tokenizer(GGUF("x", metadata | {"tokenizer.ggml.add_bos_token": True}, {})).encode("ab").ids == [
        65,
        *plain,
    ]


def test_the_command_makes_a_target_once(tmp_path):
    path = changed(tmp_path)
    result = invoke("import", path, tmp_path / "target", "--dtype", "float16")
    assert result.exit_code == 0, result.output
    assert "llama, 2 layers of width 32, vocabulary of 264 tokens, float16" in result.stdout
    assert json.loads((tmp_path / "target/generation_config.json").read_text())["eos_token_id"] == 259
    weights = mx.load(str(tmp_path / "target/model.safetensors"))
    assert {w.dtype for w in weights.values()} == {mx.float16}
    assert_one_error(invoke("import", path, tmp_path / "target"), "holds a model already; choose a new folder")
    assert_one_error(invoke("import", tmp_path / "none.gguf", tmp_path / "target"), "There is no file .*none.gguf")
    assert_one_error(invoke("import", tmp_path, tmp_path / "other"), "is a folder; expected a GGUF file")
    assert sorted(file.name for file in tmp_path.iterdir() if file.name != path.name) == ["target"]
