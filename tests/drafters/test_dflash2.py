"""DFlash 2 against the NumPy reference: the same candidates, scores, acceptance and tokens, and exact sampling."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support import packagings, reference
from support.agreement import KNOWN, assert_pairs_are_exact, assert_same_blocks, context_of, pair_of
from support.models import HIDDEN, draft_config, plain_greedy, randomize
from support.models import target as small_target
from support.packagings import FULL, SLIDING
from support.reference_dflash2 import DenseDFlash2

from dflash import DFlashSpeculativeDecoder, load_drafter, save_drafter
from dflash.core.backend import to_compute_dtype
from dflash.core.files import flat
from dflash.decoding.sampling import DrawingSampler
from dflash.drafters.checkpoints.quantized import quantize_drafter
from dflash.drafters.dflash2 import DFlash2Config, DFlash2DraftModel

VOCAB = 24
OWN = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 6}

VARIANTS = {
    "as published": {"is_causal": False, "layer_types": (SLIDING, SLIDING), "sliding_window": 6},
    "causal": {"is_causal": True, "layer_types": (SLIDING, FULL), "sliding_window": 9, "conv_kernel_size": 3},
    "taps longer than the block": {"block_size": 3, "conv_kernel_size": 5, "conv_group_size": 4},
    "one channel a group, one tap": {"conv_kernel_size": 1, "conv_group_size": 1, "selector_top_k": 1},
    "logit options": {"output_multiplier": 0.5, "final_logit_softcapping": 4.0, "input_embedding_scale": 3.0},
    "padded vocabulary": {"selector_vocab_size": 19, "selector_top_k": 16},
    "reduced vocabulary": {"draft_vocab_size": len(KNOWN), "selector_top_k": 7},
}


def random_dflash2(seed: int, vocab: int = VOCAB, **changes) -> DFlash2DraftModel:
    """Every part counts: convolutions mix rows about evenly, and the selector often overrules the best logit."""
    model = DFlash2DraftModel(DFlash2Config(**{**vars(draft_config(vocab)), **OWN, **changes}))
    if model.config.draft_vocab_size:
        model.reduce_vocabulary(mx.array(KNOWN), own_head=True)
    randomize(model, seed, scale=2.0)
    for i, (name, weight) in enumerate(flat(model.parameters()).items()):
        noise = mx.random.normal(weight.shape, key=mx.random.key(seed + 10 * i))
        if name.endswith("base_kernel"):
            model.load_weights([(name, 0.7 * noise)], strict=False)
        elif name.endswith("codebook"):
            model.load_weights([(name, 1.5 * noise)], strict=False)
    return model


def pair(seed: int, vocab: int = VOCAB, **changes):
    return pair_of(random_dflash2(seed, vocab, **changes), DenseDFlash2, seed, vocab)


def assert_follows(proposal, path) -> None:
    """Candidates, scores and tokens are the reference's."""
    assert proposal.candidates[0].tolist() == path.candidates
    np.testing.assert_allclose(np.array(proposal.logits[0]), np.stack(path.scores), atol=2e-3, rtol=1e-4)
    assert proposal.tokens[0].tolist() == path.tokens


@pytest.mark.parametrize("context", [1, 45])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_follow_the_formulas_at_any_context_length(variant, context):
    both = pair(1, **VARIANTS[variant])
    drafter, (features, cache) = both.drafter, context_of(both, context)
    path = both.dense.walk(features, 5)
    proposal = drafter.propose(mx.array([[5]]), drafter.block_size - 1, cache)
    assert_follows(proposal, path)
    assert proposal.log_q is None
    short = drafter.propose(mx.array([[5]]), 2, cache)
    assert short.tokens[0].tolist() == path.tokens[:2]
    np.testing.assert_allclose(np.array(short.logits), np.array(proposal.logits[:, :2]), atol=2e-3, rtol=1e-4)


def test_every_part_counts_so_that_the_comparison_can_miss_none():
    both = pair(1, **VARIANTS["as published"])
    dense, (features, _) = both.dense, context_of(both, 20)
    path = dense.walk(features, 5)
    assert any(c[0] != t for c, t in zip(path.candidates, path.tokens, strict=True)), "the selector overrules nothing"
    for name in ("attention_conv.base_kernel", "mlp_conv.kernel_projection.weight", "predecessor_codebook"):
        other = DenseDFlash2(
            {k: 0.9 * w if k.endswith(name) else w for k, w in dense.weights.items()}, dense.config, dense.target
        )
        changed = other.walk(features, 5)
        assert np.abs(np.stack(changed.scores) - np.stack(path.scores)).max() > 0.1, name


@pytest.mark.parametrize("variant", ["as published", "causal", "padded vocabulary"])
def test_sampled_tokens_come_from_the_candidates_alone_and_their_distribution_is_told(variant):
    both, temperature = pair(1, **VARIANTS[variant]), 12.0
    features, cache = context_of(both, 9)
    mx.random.seed(1)
    sampled = both.drafter.draw(mx.array([[5]]), 7, cache, DrawingSampler(temperature, top_k=2))
    path = both.dense.walk(features, 5, sampled.tokens[0].tolist())
    assert sampled.tokens[0].tolist() != both.dense.walk(features, 5).tokens, "nothing was sampled"
    assert_follows(sampled, path)
    q = np.exp(np.array(sampled.log_q[0], np.float64))
    np.testing.assert_allclose(q, reference.softmax(np.stack(path.scores) / temperature), atol=2e-3)


DECODING = [("as published", 7, 1), ("causal", 17, 7), ("as published", 40, 7), ("logit options", 5, 0)]


@pytest.mark.parametrize(("variant", "prompt", "seed"), DECODING)
def test_acceptance_and_tokens_equal_the_reference_over_many_blocks(variant, prompt, seed):
    assert_same_blocks(pair(seed, 4, **(VARIANTS[variant] | {"selector_top_k": 3})), prompt, 48, kinds=4)


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_the_text_is_that_of_plain_decoding_on_other_caches_too(kind):
    target, prompt = small_target(kind, 2), [3, 1, 4, 1, 5]
    drafter = random_dflash2(2, 32, **VARIANTS["as published"])
    expected, _ = plain_greedy(target.model, prompt, 40)
    for rule in ("first_mismatch", "speculative_sampling"):
        ids = DFlashSpeculativeDecoder(target, drafter, policy="full").spec_generate(prompt, 40, verify=rule)
        assert ids.tolist() == [prompt + expected]


def test_speculative_sampling_with_a_sparse_q_is_exact_over_joint_tokens(monkeypatch):
    """The drafter can never sample two of the five tokens that the target may."""
    both = pair(3, 5, selector_top_k=3)
    assert_pairs_are_exact(monkeypatch, both.target, both.drafter, 1.4, 6.0, 51.2)  # 24 degrees of freedom, 0.1 %


# --- files ------------------------------------------------------------------------------------------------


def published() -> tuple[dict, dict]:
    return packagings.published(random_dflash2(3, packagings.VOCAB, **VARIANTS["as published"]))


def test_what_is_saved_is_the_published_packaging_and_loads_bit_equal(tmp_path):
    drafter = random_dflash2(3, packagings.VOCAB, **VARIANTS["padded vocabulary"])
    config = packagings.assert_saved(drafter, tmp_path)
    assert config["architectures"] == ["DFlash2DraftModel"]
    own = OWN | {"selector_top_k": 16, "selector_vocab_size": 19, "block_size": 8, "mask_token_id": 31}
    assert own.items() <= config["dflash_config"].items()
    assert not own.keys() & config.keys()
    stored = mx.load(str(tmp_path / "model.safetensors"))
    shapes = {name: w.shape for name, w in stored.items() if "conv" in name or "selector" in name}
    convolution = {"base_kernel": (2, 2, HIDDEN), "kernel_projection.weight": (2 * 2 * HIDDEN // 8, HIDDEN)}
    expected = {
        f"layers.{i}.{part}_conv.{name}": shape
        for i in (0, 1)
        for part in ("attention", "mlp")
        for name, shape in convolution.items()
    }
    tables = dict.fromkeys(("predecessor_codebook", "successor_codebook"), (packagings.VOCAB, 5))
    selector = tables | {"hidden_projection.weight": (5, HIDDEN)}
    assert shapes == expected | {f"candidate_selector.{name}": shape for name, shape in selector.items()}


FORMS = {
    "z-lab": lambda c, w: (c, w),
    "by its other name": lambda c, w: (c | {"architectures": ["Qwen3DFlash2DraftModel"]}, w),
    "by its keys, renamed by a server": lambda c, w: (c | {"architectures": ["DFlashDraftModel"]}, w),
    "flat": lambda c, w: ({k: v for k, v in c.items() if k != "dflash_config"} | c["dflash_config"], w),
    "tables with a suffix": lambda c, w: (c, {f"{k}.weight" if k.endswith("codebook") else k: v for k, v in w.items()}),
    "kernels in float32": lambda c, w: (
        c, {k: v if k.endswith("base_kernel") else v.astype(mx.bfloat16) for k, v in w.items()}
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_packaging_drafts_the_same(tmp_path, form):
    config, weights = published()
    if form == "kernels in float32":
        weights = {k: v.astype(mx.bfloat16).astype(mx.float32) for k, v in weights.items()}
    folder = packagings.write(tmp_path / "form", *FORMS[form](config, weights))
    assert type(load_drafter(folder)) is DFlash2DraftModel
    packagings.assert_same_drafts(folder, packagings.write(tmp_path / "plain", config, weights))


def test_blocks_are_causal_only_where_the_config_says_so(tmp_path):
    """Its layers slide and are bidirectional: layer types alone would say causal."""
    config, weights = published()
    assert config["is_causal"] is False
    scores = {
        causal: packagings.proposal(packagings.write(tmp_path / str(causal), config | {"is_causal": causal}, weights))
        for causal in (False, True, None)
    }
    assert mx.array_equal(scores[True].logits, scores[None].logits)
    assert mx.abs(scores[True].logits - scores[False].logits).max() > 0.1


REFUSED = {
    "a missing key": ({"conv_group_size": None}, ["conv_group_size missing"]),
    "groups that do not divide": ({"conv_group_size": 5}, ["hidden_size 32", "conv_group_size 5"]),
    "more candidates than tokens": ({"selector_top_k": 33}, ["selector_top_k 33", "32"]),
    "no candidates": ({"selector_top_k": 0}, ["selector_top_k", "positive"]),
    "a rank that does not fit": ({"selector_rank": 4}, ["codebook has shape (32, 5)", "(32, 4)"]),
    "taps that do not fit": ({"conv_kernel_size": 3}, ["base_kernel has shape (2, 2, 32)"]),
    "MLA": ({"attention_mode": "mla"}, ["attention_mode 'mla'"]),
    "sinks": ({"attention_sink_bias": True}, ["attention_sink_bias", "sinks"]),
    "norms": ({"fc_norm": True}, ["fc_norm", "auxiliary norms"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, name):
    changes, parts = REFUSED[name]
    config, weights = published()
    inner = {k: v for k, v in (config["dflash_config"] | changes).items() if v is not None}
    packagings.assert_refused(tmp_path, config | {"dflash_config": inner}, weights, *parts)


def test_quantised_it_loads_again_and_drafts_the_same(tmp_path):
    drafter = random_dflash2(3, packagings.VOCAB, **VARIANTS["as published"])
    quantize_drafter(drafter, bits=8, group_size=32)
    save_drafter(drafter, tmp_path)
    assert isinstance(drafter.layers[0].mlp_conv.kernel_projection, nn.QuantizedLinear)
    to_compute_dtype(drafter)
    packagings.assert_same_drafts(tmp_path, drafter)
