"""DSpark against the NumPy reference: the same drafts, confidences, acceptance and tokens, and exact sampling."""

from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest
from support import packagings, reference
from support.agreement import (
    KNOWN,
    assert_pairs_are_exact,
    assert_same_blocks,
    context_of,
    numpy_weights,
    pair_of,
)
from support.models import draft_config, randomize
from support.packagings import FULL, SLIDING
from support.reference_dspark import DenseDSpark

from dflash import load_drafter, save_drafter
from dflash.decoding.sampling import DrawingSampler
from dflash.drafters.dspark import DSparkConfig, DSparkDraftModel

VOCAB = 24

VARIANTS = {
    "vanilla": {},
    "gated, causal window": {
        "markov_head_type": "gated", "layer_types": (SLIDING, SLIDING), "sliding_window": 6
    },
    "rnn, window, not causal": {
        "markov_head_type": "rnn", "is_causal": False, "layer_types": (SLIDING, FULL), "sliding_window": 9
    },
    "anchor drafts nothing": {"markov_head_type": "rnn", "sample_from_anchor": False, "is_causal": True},
    "confidence alone": {"markov_rank": 0},
    "Markov alone": {"enable_confidence_head": False},
    "calibrated, from hidden states alone": {
        "confidence_head_with_markov": False, "confidence_temperatures": (0.5, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 4.0)
    },
    "logit options": {"output_multiplier": 0.5, "final_logit_softcapping": 4.0, "input_embedding_scale": 3.0},
    "reduced vocabulary": {"draft_vocab_size": len(KNOWN)},
}  # fmt: skip


def random_dspark(seed: int, vocab: int = VOCAB, known: list[int] = KNOWN, **changes) -> DSparkDraftModel:
    values = {**vars(draft_config(vocab)), "markov_rank": 6, "sample_from_anchor": True, **changes}
    model = DSparkDraftModel(DSparkConfig(**values))
    if model.config.draft_vocab_size:
        model.reduce_vocabulary(mx.array(known), own_head=True)
    return randomize(model, seed, scale=2.0)


def pair(seed: int, vocab: int = VOCAB, **changes):
    return pair_of(random_dspark(seed, vocab, **changes), DenseDSpark, seed, vocab)


@pytest.mark.parametrize("context", [1, 7, 45])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_follow_the_formulas_at_any_context_length(variant, context):
    both = pair(1, **VARIANTS[variant])
    drafter, dense, (features, cache) = both.drafter, both.dense, context_of(both, context)
    length = drafter.block_size - 1
    assert length == 8 - (not drafter.config.sample_from_anchor)
    proposal, expected = drafter.propose(mx.array([[5]]), length, cache), dense.drafts(features, 5)
    assert proposal.tokens.tolist() == [expected.tokens]
    known = np.stack(expected.logits) if dense.known is None else np.stack(expected.logits)[:, dense.known]
    np.testing.assert_allclose(np.array(proposal.logits[0]), known, atol=1e-3, rtol=1e-4)
    assert proposal.candidates is None if dense.known is None else proposal.candidates[0].tolist() == [KNOWN] * length
    assert proposal.log_q is None
    assert (proposal.confidence is None) == (not drafter.config.enable_confidence_head)
    if proposal.confidence is not None:
        np.testing.assert_allclose(np.array(proposal.confidence[0]), expected.confidence, atol=1e-4)
    short = drafter.propose(mx.array([[5]]), 2, cache)
    np.testing.assert_allclose(np.array(short.logits[0]), np.array(proposal.logits[0, :2]), atol=1e-4)


@pytest.mark.parametrize("variant", ["vanilla", "gated, causal window", "rnn, window, not causal"])
def test_sampled_tokens_take_the_place_of_the_best_and_their_distribution_is_told(variant):
    both, sampler = pair(1, **VARIANTS[variant]), DrawingSampler(5.0, top_k=9)
    features, cache = context_of(both, 9)
    mx.random.seed(1)
    sampled = both.drafter.draw(mx.array([[5]]), 8, cache, sampler)
    expected = both.dense.drafts(features, 5, sampled.tokens[0].tolist())
    assert sampled.tokens[0].tolist() != both.dense.drafts(features, 5).tokens, "nothing was sampled"
    np.testing.assert_allclose(np.array(sampled.logits[0]), np.stack(expected.logits), atol=1e-3, rtol=1e-4)
    assert sampled.acceptance_chances() is None, "the head would have read what was sampled"
    np.testing.assert_array_equal(np.array(sampled.log_q[0]), np.array(sampler.log_distribution(sampled.logits[0])))


DECODING = [("vanilla", 7, 3), ("gated, causal window", 17, 7), ("rnn, window, not causal", 40, 1),
            ("anchor drafts nothing", 5, 5)]  # fmt: skip


@pytest.mark.parametrize(("variant", "prompt", "seed"), DECODING)
def test_acceptance_and_tokens_equal_the_reference_over_many_blocks(variant, prompt, seed):
    assert_same_blocks(pair(seed, 4, **VARIANTS[variant]), prompt, 48)


def test_speculative_sampling_with_markov_drafts_is_exact_over_joint_tokens(monkeypatch):
    both = pair(3, 4, markov_head_type="rnn")
    assert_pairs_are_exact(monkeypatch, both.target, both.drafter, 6.0, 1.0, 37.7)  # 15 degrees of freedom, 0.1 %


# --- packagings -------------------------------------------------------------------------------------------


def plain(**changes) -> tuple[dict, dict]:
    """In SpecForge's packaging, which is also the package's own."""
    return packagings.published(random_dspark(3, packagings.VOCAB, **changes))


def flat(config: dict, **changes) -> dict:
    inner = {k: v for k, v in config["dflash_config"].items() if k not in ("projector_type", "attention_mode")}
    inner.pop("sample_from_anchor")
    return {k: v for k, v in config.items() if k != "dflash_config"} | inner | changes


def deepspec(config: dict) -> dict:
    noise = {"num_anchors": 512, "partial_rotary_factor": 0.25, "tie_word_embeddings": False}
    return flat(config, architectures=["Qwen3DSparkModel"], **noise)


def lfm2(config: dict) -> dict:
    inner = {k: v for k, v in config["dflash_config"].items() if k not in ("projector_type", "sample_from_anchor")}
    return config | {"architectures": ["Lfm2DSparkDraftModel"], "dflash_config": inner, "rope_is_neox_style": True}


def speculators(config: dict, **changes) -> dict:
    values = flat(config)
    heads = {k: values.pop(k) for k in list(values) if k.startswith(("markov", "confidence", "enable_confidence"))}
    packaged = packagings.speculators(config, **heads)
    packaged["speculators_config"] |= {"algorithm": "dspark", "proposal_methods": [{"speculative_tokens": 8}]}
    packaged["transformer_layer_config"].pop("dflash_config", None)
    names = {"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark"}
    return packaged | names | changes


PACKAGINGS = {
    "DeepSpec": deepspec,
    "SpecForge": lambda c: c,
    "SpecForge without the anchor's key": lambda c: c | {
        "dflash_config": {k: v for k, v in c["dflash_config"].items() if k != "sample_from_anchor"}
    },
    "speculators": speculators,
    "LFM2.5": lfm2,
    "a DFlash label with the anchor's key": lambda c: flat(c, architectures=["DFlashDraftModel"]) | {
        "sample_from_anchor": True
    },
}  # fmt: skip


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
@pytest.mark.parametrize("form", PACKAGINGS)
def test_every_packaging_drafts_the_same(tmp_path, form, head):
    drafter = random_dspark(3, packagings.VOCAB, markov_head_type=head)
    config, weights = packagings.published(drafter)
    packaged = packagings.write(tmp_path / "form", PACKAGINGS[form](config), weights)
    assert type(load_drafter(packaged)) is DSparkDraftModel
    packagings.assert_same_drafts(packaged, drafter)


def test_the_markov_head_has_an_older_name(tmp_path):
    config, weights = plain()
    older = packagings.renamed(weights, lambda name: name.replace("markov_head.", "logit_head."))
    assert older.keys() != weights.keys()
    packagings.assert_same_drafts(
        packagings.write(tmp_path / "new", config, weights), packagings.write(tmp_path / "old", config, older)
    )


def test_what_is_saved_is_the_published_packaging_and_loads_bit_equal(tmp_path):
    config = packagings.assert_saved(random_dspark(3, packagings.VOCAB, markov_head_type="gated"), tmp_path)
    assert config["architectures"] == ["DSparkDraftModel"]
    assert config["dflash_config"]["projector_type"] == "dspark"
    assert config["dflash_config"]["markov_rank"] == 6


@pytest.mark.parametrize("tables", ["both", "embedding", "copies"])
def test_tables_of_its_own_are_used_unless_they_are_the_targets(tmp_path, tables):
    config, weights = plain()
    table = packagings.target().model.model.embed_tokens.weight
    other = mx.random.normal(table.shape, key=mx.random.key(9))
    weights |= {"embed_tokens.weight": table if tables == "copies" else other}
    if tables != "embedding":
        weights["lm_head.weight"] = table if tables == "copies" else other[::-1]
    folder = packagings.write(tmp_path / "own", deepspec(config), weights)
    drafter = load_drafter(folder)
    drafter.bind(packagings.target())
    own = {"both": {"embed_tokens", "lm_head"}, "embedding": {"embed_tokens"}, "copies": set()}[tables]
    assert {"embed_tokens", "lm_head"} & drafter.keys() == own

    target = packagings.target().model
    dense_weights = numpy_weights(target)
    if tables != "copies":
        dense_weights["model.embed_tokens.weight"] = np.array(other, np.float64)
        dense_weights["lm_head.weight"] = np.array(table, np.float64)
    dense_target = reference.DenseTarget(dense_weights, asdict(target.args))
    dense = DenseDSpark(numpy_weights(drafter), asdict(drafter.config), dense_target)
    expected = dense.drafts(np.array(packagings.features(), np.float64)[0], 5)
    save_drafter(load_drafter(folder), tmp_path / "again", mx.float32)
    proposal = packagings.assert_same_drafts(folder, tmp_path / "again")
    assert proposal.tokens.tolist() == [expected.tokens]
    np.testing.assert_allclose(np.array(proposal.logits[0]), np.stack(expected.logits), atol=1e-3, rtol=1e-4)
    np.testing.assert_allclose(np.array(proposal.confidence[0]), expected.confidence, atol=1e-4)


def test_speculators_with_a_reduced_vocabulary_and_an_anchor_of_its_own(tmp_path):
    known = len(packagings.KNOWN)
    changes = {"draft_vocab_size": known, "sample_from_anchor": False}
    drafter = random_dspark(3, packagings.VOCAB, packagings.KNOWN, **changes)
    config = packagings.assert_saved(drafter, tmp_path / "saved", mx.float32)
    weights = dict(mx.load(str(tmp_path / "saved" / "model.safetensors")))
    config = speculators(config, draft_vocab_size=known)
    config.pop("sample_from_anchor")
    config["speculators_config"]["proposal_methods"] = []
    folder = packagings.write(tmp_path / "form", config, weights)
    assert load_drafter(folder).target_layer_ids == (0, 1, 3)
    proposal = packagings.assert_same_drafts(folder, drafter)
    assert proposal.logits.shape == (1, 7, known)
    assert set(proposal.tokens[0].tolist()) <= set(packagings.KNOWN)


REFUSED = {
    "no packaging": ({"architectures": ["DFlashDraftModel"]}, {}, ["sample_from_anchor", "DFlashDraftModel"]),
    "head": ({"markov_head_type": "gate"}, {}, ["markov_head_type 'gate'", "'gated'"]),
    "rank": ({"markov_rank": -1}, {}, ["markov_rank", "-1"]),
    "temperatures": ({"confidence_temperatures": [1.0, 2.0]}, {}, ["confidence_temperatures", "8"]),
    "sinks": ({"attention_sink_bias": True}, {}, ["attention_sink_bias", "sinks"]),
    "gated attention": ({"architectures": ["Qwen35DSparkModel"]}, {}, ["Qwen35DSparkModel", "gated attention"]),
    "Gemma 4": ({"architectures": ["Gemma4DSparkModel"]}, {}, ["Gemma4DSparkModel", "Gemma 4"]),
    "MLA": ({"architectures": ["DeepseekV4DSparkModel"]}, {}, ["latent"]),
    "weights of another head": ({}, {"markov_head.gate_proj.weight": 1}, ["gate_proj", "Markov"]),
    "no weights": ({}, {"markov_head.markov_w1.weight": None}, ["lacks markov_head.markov_w1.weight"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(tmp_path, name):
    changes, tensors, words = REFUSED[name]
    config, weights = plain()
    weights |= {n: mx.ones((4, 4)) for n, value in tensors.items() if value}
    weights = {n: w for n, w in weights.items() if tensors.get(n, 1)}
    packagings.assert_refused(tmp_path, deepspec(config) | changes, weights, *words)
