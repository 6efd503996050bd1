"""DFlare against the NumPy reference: drafts, acceptance and tokens; its files, its loss and how a new one starts."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support import dense_loss, packagings, reference
from support.agreement import assert_same_blocks, context_of, pair_of
from support.models import HIDDEN, draft_config, qwen3_model, random_drafter, randomize
from support.packagings import FULL, SLIDING

from dflash import LoadedTargetModel, load_drafter, save_drafter
from dflash.core.errors import TrainingError
from dflash.drafters.dflare import QwenDFlareDraftModel
from dflash.training.drafters.init import new_drafter
from dflash.training.drafters.loss import drafter_loss
from dflash.training.drafters.objectives import ObjectiveSettings
from dflash.training.loop.optimizer import is_inner_matrix
from dflash.training.recipe import DrafterShape

VARIANTS = {
    "full": {},
    "three layers, window": {"num_hidden_layers": 3, "layer_types": (SLIDING, FULL, SLIDING), "sliding_window": 6},
    "causal, biases": {"is_causal": True, "attention_bias": True},
}


class DenseDFlare(reference.DenseDrafter):
    """Every layer's context: its own mean of the taps, and its own projections."""

    def context(self, layer: int, features_SF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        taps = features_SF.reshape(len(features_SF), -1, HIDDEN)
        weights = reference.softmax(self.weights["layer_fusion_weights"][layer])
        fused = sum(weights[t] * taps[:, t] for t in range(taps.shape[1]))
        hidden = reference.rms_norm(fused, self.weights["hidden_norm.weight"], self.eps)
        prefix = f"layers.{layer}.self_attn"
        renamed = {n.replace("_proj_target.", "_proj."): w for n, w in self.weights.items() if "_proj_target" in n}
        own = self.layers[layer]
        with_targets = reference.Layer(
            renamed | {f"{prefix}.k_norm.weight": self.weights[f"{prefix}.k_norm.weight"]},
            own.prefix, own.heads, own.kv_heads, own.eps, own.inverse,
        )  # fmt: skip
        return with_targets.keys_values(hidden, np.arange(len(features_SF)))


def random_dflare(seed: int, vocab: int, **changes) -> QwenDFlareDraftModel:
    return randomize(QwenDFlareDraftModel(draft_config(vocab, **changes)), seed, scale=2.0)


def pair(seed: int, vocab: int, **changes):
    return pair_of(random_dflare(seed, vocab, **changes), DenseDFlare, seed, vocab)


@pytest.mark.parametrize("context", [1, 7, 45])
@pytest.mark.parametrize("variant", VARIANTS)
def test_draft_logits_follow_the_formulas_at_any_context_length(variant, context):
    both = pair(1, 24, **VARIANTS[variant])
    features, cache = context_of(both, context)
    proposal = both.drafter.propose(mx.array([[5]]), 7, cache)
    np.testing.assert_allclose(np.array(proposal.logits[0]), both.dense.logits(features, 5), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("variant", "prompt", "seed"), [("full", 7, 7), ("three layers, window", 17, 3)])
def test_acceptance_and_tokens_equal_the_reference_over_many_blocks(variant, prompt, seed):
    assert_same_blocks(pair(seed, 4, **VARIANTS[variant]), prompt, 48)


def test_published_files_load_by_their_names_and_what_is_saved_loads_bit_equal(tmp_path):
    drafter = random_dflare(3, packagings.VOCAB)
    config, weights = packagings.published(drafter)
    folder = packagings.write(tmp_path / "published", config | {"architectures": ["QwenDFlareDraftModel"]}, weights)
    loaded = load_drafter(folder)
    assert type(loaded) is QwenDFlareDraftModel
    assert "fc" not in loaded
    packagings.assert_same_drafts(loaded, drafter)
    assert packagings.assert_saved(loaded, tmp_path / "again")["architectures"] == ["QwenDFlareDraftModel"]


# --- training ---------------------------------------------------------------------------------------------


def own_context(w, p, layer, config, d):
    taps = mx.array(d.features, mx.float64).reshape(len(d.tokens), -1, HIDDEN)
    weights = mx.exp(dense_loss.log_softmax(w["layer_fusion_weights"][layer]))
    fused = sum(weights[t] * taps[:, t] for t in range(taps.shape[1]))
    context = dense_loss.norm(fused, w["hidden_norm.weight"], config.rms_norm_eps)
    return context, p["self_attn.k_proj_target.weight"], p["self_attn.v_proj_target.weight"]


def test_loss_and_gradients_equal_a_dense_float64_implementation():
    model = randomize(QwenDFlareDraftModel(draft_config(dense_loss.VOCAB, block_size=6)), 2)
    model.bind(dense_loss.RandomTarget(2))
    documents, objective = dense_loss.pack_of_three(), ObjectiveSettings("mix", 0.3, dense_loss.GAMMA)
    expected = dense_loss.dense_loss_and_gradients(model, documents, objective, own_context)
    dense_loss.assert_equal(dense_loss.loss_and_gradients(model, documents, objective), expected)
    own = {name for name in expected[1] if "_target" in name or "fusion" in name}
    assert len(own) == 2 * 2 + 1
    assert min(mx.abs(expected[1][name]).max().item() for name in own) > 1e-4, "a part does not learn"


def test_gradients_are_the_same_where_layers_are_computed_again():
    model = randomize(QwenDFlareDraftModel(draft_config(dense_loss.VOCAB, block_size=6)), 2)
    model.bind(dense_loss.RandomTarget(2))
    batch, objective = dense_loss.pad_documents(dense_loss.pack_of_three()), ObjectiveSettings()
    steps = [partial(drafter_loss, objective=objective, grad_checkpoint=again) for again in (False, True)]
    kept, again = (dict(tree_flatten(nn.value_and_grad(model, step)(model, batch)[1])) for step in steps)
    for name, gradient in kept.items():
        assert mx.allclose(gradient, again[name], rtol=1e-4, atol=1e-6).item(), name


def test_a_new_ones_layers_read_the_taps_of_their_own_depth(tmp_path):
    target = LoadedTargetModel(qwen3_model(1, 24))
    shape = DrafterShape("dflare", num_hidden_layers=3, target_layer_ids=(0, 1, 2, 3), mask_token=23, seed=1)
    model = new_drafter(shape, target)
    assert np.array(model.layer_fusion_weights).tolist() == [[2, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 2]]
    assert not is_inner_matrix("layer_fusion_weights", model.layer_fusion_weights)
    save_drafter(random_drafter(0, 24), tmp_path)
    with pytest.raises(TrainingError, match=r"one of the kind 'dflare' cannot start: fc\.weight is not in both, or"):
        new_drafter(DrafterShape("dflare", from_=str(tmp_path)), target)
