"""A tiny drafter in every published packaging. The plain form is z-lab's; each helper rewrites it as another one."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash import LoadedTargetModel, Proposal, load_drafter, save_drafter
from dflash.core.errors import CheckpointError
from dflash.core.files import flat as flat_weights

from .errors import refused
from .models import HIDDEN, qwen3_model, random_drafter

VOCAB, BLOCK = 32, 8
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@lru_cache
def target(seed: int = 0) -> LoadedTargetModel:
    return LoadedTargetModel(qwen3_model(seed, VOCAB))


def published(drafter) -> tuple[dict, dict]:
    """The config and float32 weights of a drafter, as this package publishes them."""
    return json.loads(json.dumps(drafter.config.to_dict())), flat_weights(drafter.parameters())


def plain(**changes) -> tuple[dict, dict]:
    """:func:`published` of one drafter; equal but for ``changes`` to its config."""
    return published(random_drafter(3, VOCAB, **changes))


def write(folder: Path, config: dict, weights: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def features(layers: int = 3, context: int = 9) -> mx.array:
    """``[1, context, F]``, longer than the windows here."""
    return mx.random.normal((1, context, layers * HIDDEN), key=mx.random.key(7))


def proposal(drafter: Any, length: int | None = None) -> Proposal:
    """A block of a drafter, or of the one in a folder, after a context that arrives in two pieces."""
    drafter = load_drafter(drafter) if isinstance(drafter, Path) else drafter
    drafter.bind(target())
    cache, context = drafter.make_cache(), features(len(drafter.target_layer_ids))
    for piece in (context[:, :4], context[:, 4:]):
        drafter.extend_context(piece, cache, mx.zeros(piece.shape[:2], mx.int32))
    return drafter.propose(mx.array([[5]]), length or drafter.block_size - 1, cache)


def logits(drafter: Any, length: int | None = None) -> np.ndarray:
    """``[length, V]`` of :func:`proposal`; minus infinity for tokens that the drafter does not know."""
    found = proposal(drafter, length)
    known = np.array(found.logits[0].astype(mx.float32))
    if found.candidates is None:
        return known
    everything = np.full((len(known), VOCAB), -np.inf, np.float32)
    np.put_along_axis(everything, np.array(found.candidates[0]), known, axis=1)
    return everything


def assert_same_drafts(drafter: Any, other: Any) -> Proposal:
    """Every array of :func:`proposal` is bit-equal."""
    mine, theirs = proposal(drafter), proposal(other)
    for name in ("tokens", "logits", "candidates", "confidence"):
        arrays = [getattr(found, name) for found in (mine, theirs)]
        assert (arrays[0] is None) == (arrays[1] is None), name
        if arrays[0] is not None:
            np.testing.assert_array_equal(*map(np.array, arrays))
    return mine


def assert_saved(drafter: Any, folder: Path, dtype: mx.Dtype = mx.bfloat16) -> dict:
    """What is saved in ``dtype`` loads bit-equal; returns its ``config.json``."""
    save_drafter(drafter, folder, dtype)
    loaded, weights = load_drafter(folder), flat_weights(drafter.parameters())
    assert type(loaded) is type(drafter)
    assert loaded.config == drafter.config
    for name, weight in flat_weights(loaded.parameters()).items():
        assert mx.array_equal(weight, weights[name].astype(dtype)).item(), name
    return json.loads((folder / "config.json").read_text())


def assert_refused(folder: Path, config: dict, weights: dict, *words: str) -> None:
    """Loading raises one line that has all of ``words``."""
    with pytest.raises(CheckpointError) as error:
        load_drafter(write(folder, config, weights))
    refused(error, *words)


def inside(config: dict, **values) -> dict:
    return config | {"dflash_config": config["dflash_config"] | values}


def renamed(weights: dict, rename) -> dict:
    return {rename(name): w for name, w in weights.items()}


def without_inside(config: dict, *names: str) -> dict:
    return config | {"dflash_config": {k: v for k, v in config["dflash_config"].items() if k not in names}}


def flat(config: dict) -> dict:
    """All keys at the top."""
    return {name: value for name, value in config.items() if name != "dflash_config"} | config["dflash_config"]


def with_copies(weights: dict, own: bool = False) -> dict:
    """Copies of what is the target's, in every spelling; their values are never read, but for those of ``own``."""
    table = mx.full((VOCAB, HIDDEN), 9.0)
    names = ["verifier_lm_head.weight", *(() if own else ("embed_tokens.weight", "lm_head.weight"))]
    tables = dict.fromkeys(names, table) | {"verifier_norm.weight": mx.ones(HIDDEN)}
    rotary = ("rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")
    return weights | tables | {name: mx.zeros(6) for name in rotary}


def deepspec(config: dict, **changes) -> dict:
    """Flat: no ``dflash_config``; the rest of the config is a copy of the target's."""
    heads = {"markov_rank": 0, "markov_head_type": "vanilla", "enable_confidence_head": False, "num_anchors": 512}
    own = {"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": False, "partial_rotary_factor": 0.25}
    return flat(config) | own | heads | changes


def speculators(config: dict, **changes) -> dict:
    """vLLM's: the decoder layer nested, tap ids one more, names of their own."""
    moved = ("dflash_config", "block_size", "architectures")
    nested = {name: value for name, value in config.items() if name not in moved}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config["block_size"] - 1}],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "aux_hidden_state_layer_ids": [i + 1 for i in config["dflash_config"]["target_layer_ids"]],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "block_size": config["block_size"],
        "draft_vocab_size": config["vocab_size"],
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "max_anchors": 3072,
        "transformer_layer_config": nested | {"sliding_window": None},
        "tie_word_embeddings": False,
    } | changes


NOISE = {
    "_name_or_path": "/home/me/run", "initial_context_length": 4096, "transformers_version": "5.15.0",
    "do_sample": True, "temperature": 0.6, "top_k": 20, "num_beams": 1, "repetition_penalty": 1.0,
    "torch_dtype": "bfloat16", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "eos_token_id": [1, 2],
    "pad_token_id": None, "bos_token_id": None, "layer_norm_eps": 1e-5, "trained_steps": 12000, "notes": "mine",
    "router_aux_loss_coef": 0.001, "num_local_experts": 32, "swiglu_limit": 7.0, "max_window_layers": 28,
    "use_sliding_window": False, "attention_dropout": 0.0, "quantization": None, "quantization_config": None,
    "mlp_bias": False, "hidden_act": "silu", "attention_sink_bias": None, "logit_scale": 1.0, "markov_rank": 0,
}  # fmt: skip
FLOATS = {"hidden_size": 32.0, "num_hidden_layers": 2.0, "block_size": 8.0, "rope_theta": 10000, "head_dim": 12.0}
NULLS = {"rope_scaling": None, "sliding_window": None, "is_causal": None, "layer_types": None, "rope_parameters": None}
WINDOW = {"layer_types": (SLIDING, FULL), "sliding_window": 5}
LAYERED = {"layer_types": [SLIDING, FULL], "sliding_window": 5}
BY_TYPE = {FULL: YARN | {"rope_theta": 5000.0}, SLIDING: {"rope_type": "default"}}

KNOWN = [0, 3, 4, 9, 17, 30]


def reduced(config: dict, weights: dict, head: bool, tables: str) -> tuple[dict, dict]:
    known = mx.array(KNOWN, mx.int64)
    mask = mx.zeros(VOCAB, mx.bool_)
    mask[known] = True
    weights = dict(weights)
    if head:
        weights["lm_head.weight"] = target().model.model.embed_tokens.weight[known]
    if "d2t" in tables:
        weights["d2t"] = known - mx.arange(len(KNOWN))
    if "t2d" in tables:
        weights["t2d"] = mask
    return speculators(config, draft_vocab_size=len(KNOWN)), weights
