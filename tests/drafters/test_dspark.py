"""DSpark against the NumPy reference: the same drafts, confidences, acceptance and tokens, and exact sampling."""

import json
from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support import packagings, reference
from support.agreement import (
    assert_pairs_are_exact,
    assert_same_blocks,
    features_of,
    feed_in_pieces,
    numpy_weights,
    prompt_of,
)
from support.errors import refused
from support.models import HIDDEN, draft_config, qwen3_model, randomize
from support.reference_dspark import DenseDSpark

from dflash import LoadedTargetModel, load_drafter, save_drafter
from dflash.core.errors import CheckpointError
from dflash.decoding.sampling import DrawingSampler
from dflash.drafters.dspark import DSparkConfig, DSparkDraftModel

SLIDING, FULL = "sliding_attention", "full_attention"
VOCAB = 24
KNOWN = [1, 2, 3, 5, 8, 13, 21]

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


def dspark_config(vocab: int = VOCAB, **changes) -> DSparkConfig:
    own = {"markov_rank": 6, "sample_from_anchor": True}
    return DSparkConfig(**{**vars(draft_config(vocab)), **own, **changes})


def random_dspark(seed: int, vocab: int = VOCAB, own_head: bool = True, **changes) -> DSparkDraftModel:
    model = DSparkDraftModel(dspark_config(vocab, **changes))
    if model.config.draft_vocab_size:
        model.reduce_vocabulary(mx.array(KNOWN), own_head)
    return randomize(model, seed, scale=2.0)


def pair(seed: int, vocab: int = VOCAB, **changes):
    """The same target and drafter twice: for the package and for the reference."""
    model = qwen3_model(seed, vocab, tied=seed % 2 == 0)
    target, drafter = LoadedTargetModel(model), random_dspark(seed, vocab, **changes)
    drafter.bind(target)
    dense_target = reference.DenseTarget(numpy_weights(model), asdict(model.args))
    dense = DenseDSpark(numpy_weights(drafter), asdict(drafter.config), dense_target)
    dense.known = KNOWN if drafter.config.draft_vocab_size else None
    return target, drafter, dense_target, dense


@pytest.mark.parametrize("context", [1, 7, 45])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_follow_the_formulas_at_any_context_length(variant, context):
    target, drafter, dense_target, dense = pair(1, **VARIANTS[variant])
    tokens = prompt_of(context, VOCAB)
    features, cache = features_of(dense_target, drafter, tokens), feed_in_pieces(target, drafter, tokens)
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
def test_drawn_tokens_take_the_place_of_the_best_and_their_distribution_is_told(variant):
    target, drafter, dense_target, dense = pair(1, **VARIANTS[variant])
    tokens = prompt_of(9, VOCAB)
    cache, sampler = drafter.make_cache(), DrawingSampler(5.0, top_k=9)
    _, features = target.forward_with_hidden_states(mx.array([tokens]), None, drafter.target_layer_ids)
    drafter.extend_context(features, cache, mx.array([tokens]))
    mx.random.seed(1)
    drawn = drafter.draw(mx.array([[5]]), 8, cache, sampler)
    dense_features = features_of(dense_target, drafter, tokens)
    expected = dense.drafts(dense_features, 5, drawn.tokens[0].tolist())
    assert drawn.tokens[0].tolist() != dense.drafts(dense_features, 5).tokens, "nothing was drawn"
    np.testing.assert_allclose(np.array(drawn.logits[0]), np.stack(expected.logits), atol=1e-3, rtol=1e-4)
    assert drawn.acceptance_chances() is None, "the head has read what was drawn"
    np.testing.assert_array_equal(np.array(drawn.log_q[0]), np.array(sampler.log_distribution(drawn.logits[0])))


DECODING = [("vanilla", 7, 3), ("gated, causal window", 17, 7), ("rnn, window, not causal", 40, 1),
            ("anchor drafts nothing", 5, 5)]  # fmt: skip


@pytest.mark.parametrize(("variant", "prompt", "seed"), DECODING)
def test_acceptance_and_tokens_equal_the_reference_over_many_blocks(variant, prompt, seed):
    both = pair(seed, 4, **VARIANTS[variant])
    assert_same_blocks(both, prompt_of(prompt, 4), 48, both[1].block_size)


def test_speculative_sampling_with_markov_drafts_is_exact_over_joint_tokens(monkeypatch):
    target, drafter, _, _ = pair(3, 4, markov_head_type="rnn")
    assert_pairs_are_exact(monkeypatch, target, drafter, 6.0, 1.0, 37.7)  # 15 degrees of freedom, 0.1 %


# --- packagings -------------------------------------------------------------------------------------------


def plain(**changes) -> tuple[dict, dict]:
    """Config and weights of one drafter as this package publishes them: in SpecForge's packaging."""
    drafter = random_dspark(3, packagings.VOCAB, **changes)
    weights = dict(tree_flatten(drafter.parameters()))
    return json.loads(json.dumps(drafter.config.to_dict())), weights


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


def drafted(folder) -> list[np.ndarray]:
    """Everything that a loaded drafter says of a block, over a context that arrives in two pieces."""
    drafter = load_drafter(folder)
    assert type(drafter) is DSparkDraftModel
    drafter.bind(packagings.target())
    cache = drafter.make_cache()
    features = mx.random.normal((1, 9, 3 * HIDDEN), key=mx.random.key(7))
    for piece in (features[:, :4], features[:, 4:]):
        drafter.extend_context(piece, cache, mx.zeros(piece.shape[:2], mx.int32))
    proposal = drafter.propose(mx.array([[5]]), drafter.block_size - 1, cache)
    return [np.array(part) for part in (proposal.tokens, proposal.logits, proposal.confidence)]


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
    config, weights = plain(markov_head_type=head)
    save_drafter(random_dspark(3, packagings.VOCAB, markov_head_type=head), tmp_path / "saved", mx.float32)
    packaged = packagings.write(tmp_path / "form", PACKAGINGS[form](config), weights)
    for mine, expected in zip(drafted(packaged), drafted(tmp_path / "saved"), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_the_markov_head_has_an_older_name(tmp_path):
    config, weights = plain()
    older = {name.replace("markov_head.", "logit_head."): weight for name, weight in weights.items()}
    assert older.keys() != weights.keys()
    of_both = (packagings.write(tmp_path / name, config, w) for name, w in (("new", weights), ("old", older)))
    for new, old in zip(*map(drafted, of_both), strict=True):
        np.testing.assert_array_equal(new, old)


def test_what_is_saved_is_the_published_packaging_and_loads_bit_equal(tmp_path):
    drafter = random_dspark(3, packagings.VOCAB, markov_head_type="gated")
    save_drafter(drafter, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DSparkDraftModel"]
    assert config["dflash_config"]["projector_type"] == "dspark"
    assert config["dflash_config"]["markov_rank"] == 6
    loaded = load_drafter(tmp_path)
    assert loaded.config == drafter.config
    for (name, mine), (_, saved) in zip(
        tree_flatten(loaded.parameters()), tree_flatten(drafter.parameters()), strict=True
    ):
        assert mx.array_equal(mine, saved.astype(mx.bfloat16)).item(), name


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
    features = np.array(mx.random.normal((1, 9, 3 * HIDDEN), key=mx.random.key(7)), np.float64)[0]
    expected = dense.drafts(features, 5)
    tokens, logits, confidence = drafted(folder)
    assert tokens.tolist() == [expected.tokens]
    np.testing.assert_allclose(logits[0], np.stack(expected.logits), atol=1e-3, rtol=1e-4)
    np.testing.assert_allclose(confidence[0], expected.confidence, atol=1e-4)
    save_drafter(load_drafter(folder), tmp_path / "again", mx.float32)
    np.testing.assert_array_equal(drafted(tmp_path / "again")[1], logits)


def test_speculators_with_a_reduced_vocabulary_and_an_anchor_of_its_own(tmp_path):
    known = len(packagings.KNOWN)
    drafter = DSparkDraftModel(dspark_config(packagings.VOCAB, draft_vocab_size=known, sample_from_anchor=False))
    drafter.reduce_vocabulary(mx.array(packagings.KNOWN), own_head=True)
    randomize(drafter, 3, scale=2.0)
    save_drafter(drafter, tmp_path / "saved", mx.float32)
    weights = dict(mx.load(str(tmp_path / "saved" / "model.safetensors")))
    config = speculators(json.loads((tmp_path / "saved" / "config.json").read_text()), draft_vocab_size=known)
    config.pop("sample_from_anchor")
    config["speculators_config"]["proposal_methods"] = []
    folder = packagings.write(tmp_path / "form", config, weights)
    assert load_drafter(folder).target_layer_ids == (0, 1, 3)
    tokens, logits, confidence = drafted(folder)
    assert tokens.shape == (1, 7)
    for mine, expected in zip((tokens, logits, confidence), drafted(tmp_path / "saved"), strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert logits.shape == (1, 7, known)
    assert set(tokens[0].tolist()) <= set(packagings.KNOWN)


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
    with pytest.raises(CheckpointError) as error:
        load_drafter(packagings.write(tmp_path, deepspec(config) | changes, weights))
    refused(error, *words)
