"""Quantised drafters draft what their dequantised weights do, and survive saving bit by bit."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.cli import assert_one_error, invoke
from support.kinds import random_drafter as random_drafter_of_kind
from support.models import TEXT_VOCAB, plain_greedy, qwen3_model, random_drafter, save_target
from support.packagings import VOCAB, assert_same_drafts, logits, write

from dflash import DFlashSpeculativeDecoder, load_drafter, load_target, save_drafter
from dflash.core.backend import to_compute_dtype
from dflash.core.errors import CheckpointError, DFlashError
from dflash.core.files import flat
from dflash.drafters.checkpoints.quantized import description, quantize_drafter
from dflash.generate import PAIR

SHAPES = {"intermediate_size": 64, "head_dim": 16}  # every input divides by 32, of k_proj to down_proj
AFFINE = {"group_size": 32, "bits": 4, "mode": "affine"}
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}


def drafter(**changes):
    return random_drafter(3, VOCAB, **(SHAPES | changes))


def packed(weights: dict, options: dict, names, stored: mx.Dtype = mx.bfloat16) -> tuple[dict, dict]:
    """Weights with the layers ``names`` packed as ``options`` say, and the same unpacked again."""
    dense, quantised = dict(weights), dict(weights)
    for name in names:
        scheme = options.get(name) or {k: v for k, v in options.items() if not isinstance(v, dict)}
        parts = mx.quantize(weights[f"{name}.weight"].astype(stored), **scheme)
        quantised[f"{name}.weight"] = parts[0]
        quantised |= {f"{name}.{part}": value for part, value in zip(("scales", "biases"), parts[1:], strict=False)}
        wide = [p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p for p in parts]
        dense[f"{name}.weight"] = mx.dequantize(*wide, **scheme).astype(mx.float32)
    return quantised, dense


ALL = [name.removesuffix(".weight") for name, w in flat(drafter().parameters()).items() if w.ndim == 2]
SOME = [name for name in ALL if "o_proj" not in name and name != "fc"]
MIXED = AFFINE | {"fc": AFFINE | {"bits": 8}, "layers.0.mlp.up_proj": {"group_size": 32, "bits": 6, "mode": "affine"}}
FORMS = {  # what is in the config, the layers that are packed, the type of the scales
    "affine": (AFFINE, ALL, mx.bfloat16),
    "affine, float16 scales": (AFFINE, ALL, mx.float16),
    "affine, float32 scales": (AFFINE, ALL, mx.float32),
    "layers left out": (AFFINE, SOME, mx.bfloat16),
    "another width for some": (MIXED, ALL, mx.bfloat16),
    "mxfp4": (MXFP4, ALL, mx.bfloat16),
    "mxfp4, layers left out": (MXFP4, SOME, mx.bfloat16),
    "mxfp4 with 8 affine bits for one": (MXFP4 | {"fc": AFFINE | {"bits": 8}}, ALL, mx.bfloat16),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_drafter_drafts_what_its_weights_unpacked_do_and_loses_nothing_when_saved(tmp_path, form):
    options, names, stored = FORMS[form]
    model = drafter()
    weights = {n: w.astype(mx.bfloat16).astype(mx.float32) for n, w in flat(model.parameters()).items()}
    quantised, dense = packed(weights, options, names, stored)
    key = "quantization" if form == "affine" else "quantization_config"
    first = load_drafter(write(tmp_path / "q", model.config.to_dict() | {key: options}, quantised))
    drafts = logits(first)
    plain = logits(write(tmp_path / "plain", model.config.to_dict(), dense))
    np.testing.assert_allclose(drafts, plain, atol=2e-4, rtol=1e-4)
    assert np.abs(drafts - logits(model)).max() > 1e-2, "nothing was quantised"

    save_drafter(first, tmp_path / "again")
    again = load_drafter(tmp_path / "again")
    assert description(again) == description(first)
    assert sorted(n for n, layer in again.named_modules() if isinstance(layer, nn.QuantizedLinear)) == sorted(names)
    for name, w in flat(first.parameters()).items():
        assert mx.array_equal(w, flat(again.parameters())[name]).item(), name
    assert_same_drafts(again, first)


def test_convolutions_are_quantised_too(tmp_path):
    model = random_drafter_of_kind("dflash2", 3, VOCAB)
    quantize_drafter(model, bits=8, group_size=32)
    save_drafter(model, tmp_path)
    assert isinstance(model.layers[0].mlp_conv.kernel_projection, nn.QuantizedLinear)
    to_compute_dtype(model)
    assert_same_drafts(tmp_path, model)


def test_names_in_the_description_may_have_a_prefix_and_false_leaves_a_layer_out(tmp_path):
    model, options = drafter(), AFFINE | {"fc": AFFINE | {"bits": 8}}
    names = [name for name in ALL if name != "layers.1.mlp.up_proj"]
    quantised, dense = packed(flat(model.parameters()), options, names)
    described = AFFINE | {"model.fc": AFFINE | {"bits": 8}, "model.layers.1.mlp.up_proj": False}
    config = model.config.to_dict()
    folder = write(
        tmp_path / "q", config | {"quantization": described}, {f"model.{n}": w for n, w in quantised.items()}
    )
    plain = write(tmp_path / "plain", config, dense)
    np.testing.assert_allclose(logits(folder), logits(plain), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 9}, "bits 9"),
        ({"group_size": 48}, "group size 48"),
        ({"mode": "int4"}, "'int4'; expected one of affine, mxfp4"),
        ({"mode": "mxfp4", "group_size": 64}, "'mxfp4' needs bits 4 and group size 32"),
        ({"bits": 8}, "has shape"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path, options, words):
    model = drafter()
    quantised, _ = packed(flat(model.parameters()), AFFINE, ALL)
    with pytest.raises(CheckpointError, match=words):
        load_drafter(write(tmp_path, model.config.to_dict() | {"quantization": AFFINE | options}, quantised))


def test_quantising_leaves_out_what_is_named_or_does_not_divide():
    model = drafter(intermediate_size=40)
    kept = quantize_drafter(model, 4, 32, leave_out=["fc", "o_proj"])
    outputs = [f"layers.{i}.{part}" for i in range(2) for part in ("mlp.down_proj", "self_attn.o_proj")]
    assert kept == ["fc", *outputs]
    assert description(model) == AFFINE
    for wrong, words in (({"bits": 7}, "bits 7"), ({"mode": "x"}, "'x'"), ({"leave_out": ["nothing"]}, "'nothing'")):
        with pytest.raises(DFlashError, match=words):
            quantize_drafter(drafter(), **({"group_size": 32} | wrong))
    with pytest.raises(DFlashError, match="quantised already"):
        quantize_drafter(model, 4, 32)
    with pytest.raises(DFlashError, match="groups of 128"):
        quantize_drafter(drafter(), 4, 128)


def test_the_bundled_drafter_quantised_at_load_keeps_its_acceptance_and_the_targets_text():
    request = json.loads((PAIR / "heldout.jsonl").read_text().splitlines()[0])["prompt"]

    def decoded(**options):
        decoder = DFlashSpeculativeDecoder.from_pretrained(**options)
        answer = list(decoder.stream_generate(request, 60))
        return 60 / len(answer), "".join(response.text for response in answer)

    whole, text = decoded()
    for bits, least in ((8, 0.9), (4, 0.8)):
        length, quantised_text = decoded(draft_bits=bits)
        assert quantised_text == text
        assert length > least * whole
    assert description(load_drafter(PAIR / "drafter", bits=8)) == {"group_size": 64, "bits": 8, "mode": "affine"}


def test_what_cannot_be_quantised_or_limited_at_load_is_refused(tmp_path):
    save_drafter(drafter(), tmp_path)
    assert load_drafter(tmp_path, window=5).make_cache().layers[0].limit == 5
    odd = {"bits": mx.array([4, 4])}
    for options, words in (({"bits": 7}, "bits 7"), (odd, "has bits array"), ({"window": 0}, "at least 1")):
        with pytest.raises(DFlashError, match=words):
            load_drafter(tmp_path, **options)
    for options, words in (({"bits": 8}, "NgramDrafter has no weights"), ({"window": 8}, "NgramDrafter")):
        with pytest.raises(DFlashError, match=words):
            load_drafter("ngram", **options)


# --- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "group_size", "bits"), [("mxfp8", 32, 8), ("nvfp4", 16, 4)])
def test_every_mode_of_mlx_quantises_and_loads(tmp_path, mode, group_size, bits):
    model = drafter()
    quantize_drafter(model, bits, group_size, mode)
    save_drafter(model, tmp_path)
    loaded = load_drafter(tmp_path)
    assert description(loaded) == {"group_size": group_size, "bits": bits, "mode": mode}
    to_compute_dtype(model)
    np.testing.assert_allclose(logits(loaded), logits(model), atol=1e-5)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_a_quantised_drafter_decodes_the_targets_own_tokens(tmp_path, mode):
    save_drafter(random_drafter(3, TEXT_VOCAB, **SHAPES), tmp_path / "drafter")
    folder = save_target(qwen3_model(0, TEXT_VOCAB), tmp_path / "target")
    options = ["--mode", mode, "--leave-out", "fc"] + (["--group-size", "32"] if mode == "affine" else [])
    answer = invoke("quantize", tmp_path / "drafter", tmp_path / "small", *options)
    assert answer.exit_code == 0, answer.output
    assert "4 bits, groups of 32" in answer.stdout
    assert "Left as they are: fc." in answer.stdout
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == {"group_size": 32, "bits": 4, "mode": mode}
    stored = mx.load(str(tmp_path / "small" / "model.safetensors"))
    assert {w.dtype for name, w in stored.items() if "norm" in name or "fc" in name} == {mx.bfloat16}
    target = load_target(folder)
    tokens, lead = plain_greedy(target.model, [1, 2, 3], 12)
    assert lead > 2e-4
    decoder = DFlashSpeculativeDecoder(target, load_drafter(tmp_path / "small"))
    assert decoder.spec_generate(mx.array([[1, 2, 3]]), 12, stop_token_ids=[]).tolist() == [[1, 2, 3, *tokens]]
    assert_one_error(invoke("quantize", tmp_path / "drafter", tmp_path / "small"), "not an empty folder")
    assert_one_error(invoke("quantize", tmp_path / "small", tmp_path / "new", *options), "quantised already")
    assert_one_error(invoke("quantize", tmp_path / "drafter", tmp_path / "new", "--mode", "int4"), "'int4'")
    assert_one_error(invoke("quantize", "ngram", tmp_path / "new"), "NgramDrafter has no weights")
