"""Every published packaging of one drafter's config drafts exactly what its plain form does."""

import json

import mlx.core as mx
import numpy as np
import pytest
from support.packagings import (
    BLOCK,
    BY_TYPE,
    FLOATS,
    FULL,
    LAYERED,
    NOISE,
    NULLS,
    SLIDING,
    VOCAB,
    WINDOW,
    YARN,
    deepspec,
    inside,
    logits,
    plain,
    renamed,
    speculators,
    with_copies,
    write,
)

from dflash import load_drafter, save_drafter

SAME = {
    "keys that say nothing": lambda c, w: (c | NOISE, w),
    "trainer's notes inside": lambda c, w: (inside(c, num_anchors=512, loss_decay_gamma=7.0, new_switch=False), w),
    "whole numbers with a point": lambda c, w: (inside(c | FLOATS, mask_token_id=31.0), w),
    "null values": lambda c, w: (c | NULLS, w),
    "block size inside": lambda c, w: (inside(c | {"block_size": 3}, block_size=8), w),
    "ids at the top": lambda c, w: (c | c["dflash_config"] | {"dflash_config": {}}, w),
    "the text config of a wrapper": lambda c, w: ({"text_config": c, "model_type": "wrapper"}, w),
    "text config beside dflash_config": lambda c, w: (
        {"text_config": {k: v for k, v in c.items() if k != "dflash_config"}, "dflash_config": c["dflash_config"]}, w
    ),
    "grouped attention named": lambda c, w: (inside(c, attention_mode="gqa", projector_type="dflash"), w),
    "the mask token's text": lambda c, w: (inside(c, mask_token="<|MASK|>"), w),
    "null inside, a value at the top": lambda c, w: (inside(c | {"bos_token_id": 1}, bos_token_id=None), w),
    "the target's quantisation": lambda c, w: (c | {"quantization_config": {"quant_method": "fp8"}}, w),
    "the target's list of layers": lambda c, w: (c | {"layer_types": [FULL] * 36}, w),
    "the target's text config": lambda c, w: (c | {"text_config": {"hidden_size": 99, "num_hidden_layers": 36}}, w),
    "layer ids with a point": lambda c, w: (inside(c, target_layer_ids=[0.0, 1.0, 3.0]), w),
    "prefix model.": lambda c, w: (c, renamed(w, lambda n: f"model.{n}")),
    "prefix of two wrappers": lambda c, w: (c, renamed(w, lambda n: f"module.model.{n}")),
    "prefix on some": lambda c, w: (c, renamed(w, lambda n: f"model.{n}" if n.startswith("layers") else n)),
    "copies of the target's weights": lambda c, w: (c, with_copies(w)),
    "copies under a prefix": lambda c, w: (c, renamed(with_copies(w), lambda n: f"model.{n}")),
    "assistant's names": lambda c, w: (
        c,
        renamed(w, lambda n: n.replace("layers.0.", "midlayer.").replace("hidden_norm", "encoder.output_norm_enc"))
        | {"encoder.fc.weight": w["fc.weight"]},
    ),
    "DeepSpec": lambda c, w: (deepspec(c), with_copies(w)),
    "speculators": lambda c, w: (speculators(c), with_copies(w)),
    "speculators with decimal points": lambda c, w: (
        speculators(c, block_size=8.0, aux_hidden_state_layer_ids=[1.0, 2.0, 4.0]), w
    ),
    "speculators without defaults": lambda c, w: (
        {k: v for k, v in speculators(c).items() if k not in ("speculators_config", "draft_vocab_size")}, w
    ),
    "speculators with tables of the whole vocabulary": lambda c, w: (
        speculators(c),
        with_copies(w) | {"d2t": mx.zeros(VOCAB, mx.int64), "t2d": mx.ones(VOCAB, mx.bool_)},
    ),
    "no head_dim": lambda c, w: ({k: v for k, v in c.items() if k != "head_dim"}, w),
    "rope of images": lambda c, w: (c | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}, w),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain_logits(tmp_path_factory) -> np.ndarray:
    return logits(write(tmp_path_factory.mktemp("plain"), *plain()))


@pytest.mark.parametrize("form", SAME)
def test_every_packaging_drafts_what_the_plain_form_does(tmp_path, form, plain_logits):
    config, weights = SAME[form](*plain())
    if "encoder.fc.weight" in weights:
        weights.pop("fc.weight")
    np.testing.assert_array_equal(logits(write(tmp_path, config, weights)), plain_logits)


def replaced(config: dict, *names: str, **values) -> dict:
    return {k: v for k, v in config.items() if k not in names} | values


MEANS = {  # packaging of a config: what it means, in plain words of ours
    "dflash_config.causal": (lambda c: inside(c, causal=True), {"is_causal": True}),
    "causal false on sliding layers": (lambda c: inside(c | LAYERED, causal=False), WINDOW | {"is_causal": False}),
    "is_causal before causal": (lambda c: inside(c | {"is_causal": True}, causal=False), {"is_causal": True}),
    # JetSpec trains with it, and so it is followed. z-lab's loader passes it over, and drafts worse.
    "causal head": (lambda c: inside(c, causal_head=True), {"is_causal": True}),
    "causal head false": (lambda c: inside(c | LAYERED, causal_head=False), WINDOW),
    "query causal": (lambda c: c | {"dflash_query_causal": True}, {"is_causal": True}),
    "speculators with a window": (
        lambda c: speculators(
            replaced(c, "layer_types", "sliding_window"), layer_types=[SLIDING, FULL], sliding_window=5
        ),
        WINDOW,
    ),
    "speculators, not causal": (
        lambda c: speculators(c | LAYERED, sliding_window=5, sliding_window_non_causal=True),
        WINDOW | {"is_causal": False},
    ),
    "window by number of layers": (
        lambda c: replaced(c, "layer_types", use_sliding_window=True, max_window_layers=1, sliding_window=5),
        {"layer_types": (FULL, SLIDING), "sliding_window": 5},
    ),
    "window that is not used": (
        lambda c: replaced(c, "layer_types", use_sliding_window=False, max_window_layers=0, sliding_window=5), {}
    ),
    "softcap of the top level": (lambda c: c | {"final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
    "softcap off inside": (lambda c: inside(c | {"final_logit_softcapping": 3.0}, final_logit_softcapping=None), {}),
    "softcap 0": (lambda c: c | {"final_logit_softcapping": 0}, {}),
    "pairs of neighbours": (lambda c: c | {"rope_is_neox_style": False}, {"rope_is_neox_style": False}),
    "pairs of neighbours inside": (lambda c: inside(c, is_neox_style=False), {"rope_is_neox_style": False}),
    "original length of the top level": (
        lambda c: c
        | {"rope_scaling": YARN | {"original_max_position_embeddings": 9}, "original_max_position_embeddings": 64},
        {"rope_scaling": YARN},
    ),
    # gpt-oss's own name, which transformers does not read: without another, max_position_embeddings is the original
    # length, for the layers of a drafter are Qwen3's. (A loader for gpt-oss itself would take 64.)
    "original length in a name of gpt-oss": (
        lambda c: c | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "initial_context_length": 64},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ),
    "rope by layer type": (
        lambda c: c | {"rope_parameters": BY_TYPE, "layer_types": [SLIDING, FULL], "sliding_window": 5},
        WINDOW
        | {"rope_parameters": {FULL: YARN | {"rope_theta": 5000.0}, SLIDING: {"rope_theta": 10000.0}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", MEANS)
def test_what_a_packaging_says_means_the_same_arithmetic(tmp_path, form, plain_logits):
    packaging, meaning = MEANS[form]
    config, weights = plain()
    found = logits(write(tmp_path / "form", packaging(config), weights))
    np.testing.assert_array_equal(found, logits(write(tmp_path / "plain", *plain(**meaning))))
    if meaning:
        assert np.abs(found - plain_logits).max() > 1e-3, "nothing changed"


@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "DSparkDraftModel"])
def test_a_deepspec_drafter_drafts_at_the_anchors_position_too(tmp_path, architecture, plain_logits):
    """Its block of 8 positions holds 8 drafts, and the first is read where z-lab's block has the anchor."""
    config, weights = plain()
    packaged = deepspec(config, architectures=[architecture])
    packaged.pop("sample_from_anchor")
    folder = write(tmp_path / "dspark", packaged, weights)
    assert load_drafter(folder).block_size == BLOCK + 1
    drafts = logits(folder, length=BLOCK)
    np.testing.assert_array_equal(drafts[1:], plain_logits)
    save_drafter(load_drafter(folder), tmp_path / "again", dtype=mx.float32)
    np.testing.assert_array_equal(logits(tmp_path / "again", length=BLOCK), drafts)


def test_shifted_drafts_of_a_causal_head_are_those_of_the_positions_before(tmp_path):
    """JetSpec: slots 0 to 6 of a block of 8 draft, which in a causal block do not depend on slot 7."""
    config, weights = plain()
    shifted = write(tmp_path / "shifted", inside(config, causal_head=True, draft_shift=True), weights)
    drafts = logits(shifted)
    assert load_drafter(shifted).block_size == BLOCK
    unshifted = logits(write(tmp_path / "plain", inside(config, causal_head=True), weights))
    np.testing.assert_allclose(drafts[1:], unshifted[:-1], atol=1e-5)


@pytest.mark.parametrize(
    ("drafts", "explicit", "width"), [(7, None, 8), (8, None, 9), (None, True, 9), (None, False, 8), (None, None, 8)]
)
def test_speculators_say_how_many_drafts_a_block_holds(tmp_path, drafts, explicit, width):
    config, weights = plain()
    packaged = speculators(config, sample_from_anchor=explicit)
    packaged["speculators_config"]["proposal_methods"] = [{"speculative_tokens": drafts}] if drafts else []
    assert load_drafter(write(tmp_path, packaged, weights)).block_size == width


@pytest.mark.parametrize("family", ["Qwen3", "GptOss", "Gemma3Text", "Qwen3Next"])
def test_a_copy_of_a_targets_config_around_the_drafters_own_keys_loads(tmp_path, family, plain_logits):
    """Trainers start from the target's config; what they leave of it is no error."""
    transformers = pytest.importorskip("transformers")
    copied = getattr(transformers, f"{family}Config")().to_dict()
    config, weights = plain()
    own = config | {"hidden_act": "silu", "final_logit_softcapping": None, "rope_parameters": None}
    own |= {"attention_bias": False}
    folder = write(tmp_path, json.loads(json.dumps(copied | own, default=str)), weights)
    np.testing.assert_array_equal(logits(folder), plain_logits)
