"""A DFlash drafter on its target: embeddings and head as the target scales them, and a target of another training."""

import logging
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.models import qwen3_model, random_drafter

from dflash import LoadedTargetModel
from dflash.adapters.conformance import small_models
from dflash.target.identity import target_fingerprint


def drafter_for(target: LoadedTargetModel, ids: list[int] | None = None, **changes):
    shape = {"hidden_size": target.hidden_size, "num_target_layers": target.num_layers, "target_layer_ids": (0,)}
    drafter = random_drafter(3, target.vocab_size, **shape, **changes)
    if ids is not None:
        drafter.reduce_vocabulary(mx.array(ids), own_head=False)
    drafter.bind(target)
    return drafter


@pytest.mark.parametrize("architecture", ["gemma3_text", "gemma2"])
def test_embeddings_are_scaled_as_the_target_scales_them(architecture):
    """A published Gemma drafter does not name the factor that Gemma's backbone applies: sqrt(hidden size)."""
    target, tokens = LoadedTargetModel(small_models.build(architecture)), mx.array([[3, 7]])
    scaled = np.array(target.embed(tokens)) * target.hidden_size**0.5
    for factor in (1.0, 0.5):
        drafter = drafter_for(target, input_embedding_scale=factor)
        np.testing.assert_allclose(np.array(drafter.embed(tokens)), scaled * factor, rtol=1e-5)


def test_what_the_head_of_a_muse_target_does_is_not_done_twice():
    """Published drafters of Muse name the multiplier, rounded, and the cap that mlx-lm's model applies by itself."""
    model = small_models.build("muse_glimmer")
    target, factor, cap = LoadedTargetModel(model), model.args.output_multiplier, model.args.final_logit_softcapping
    drafter = drafter_for(target, output_multiplier=round(factor, 9), final_logit_softcapping=cap)
    hidden = mx.random.normal((1, 3, target.hidden_size), key=mx.random.key(1))
    raw = model.lm_head(hidden) if "lm_head" in model else model.model.embed_tokens.as_linear(hidden)
    assert mx.allclose(drafter.head(hidden), cap * mx.tanh(factor * raw / cap), atol=1e-5)
    drafter.config = replace(drafter.config, output_multiplier=factor / 2)
    assert not mx.allclose(drafter.head(hidden), target.head(hidden), atol=1e-3)


@pytest.mark.parametrize("ids", [None, [7, 3, 21]])
@pytest.mark.parametrize(
    ("multiplier", "cap", "logits"),
    [
        (1.0, None, lambda raw: 5 * np.tanh(raw / 5)),  # the target's own, whether the file names them or not
        (1.0, 5.0, lambda raw: 5 * np.tanh(raw / 5)),
        (0.5, 5.0, lambda raw: 5 * np.tanh(raw / 2 / 5)),
        (0.5, None, lambda raw: raw / 2),
        (1.0, 9.0, lambda raw: 9 * np.tanh(raw / 9)),
    ],
)
def test_a_multiplier_and_a_cap_replace_those_of_the_targets_head(multiplier, cap, logits, ids):
    target = LoadedTargetModel(small_models.build("gemma2"))
    target.adapter.config.final_logit_softcapping = 5.0
    changes = {} if ids is None else {"draft_vocab_size": len(ids)}
    drafter = drafter_for(target, ids, output_multiplier=multiplier, final_logit_softcapping=cap, **changes)
    hidden = 3 * mx.random.normal((1, 4, target.hidden_size), key=mx.random.key(0))
    raw = np.array(target.adapter.embedding.as_linear(hidden))[..., slice(None) if ids is None else ids]
    np.testing.assert_allclose(np.array(drafter.head(hidden)), logits(raw), rtol=1e-4, atol=1e-4)


def test_a_drafter_on_another_target_of_the_same_shape_gets_a_warning(caplog):
    mine, other = (LoadedTargetModel(qwen3_model(seed, 24)) for seed in (0, 1))
    drafter = random_drafter(3, 24, target_fingerprint=target_fingerprint(mine))
    with caplog.at_level(logging.WARNING):
        drafter.bind(mine)
        random_drafter(3, 24).bind(other)
        assert caplog.messages == []
        drafter.bind(other)
    assert "another target of the same shape" in caplog.text
