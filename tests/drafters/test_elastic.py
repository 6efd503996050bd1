"""A drafter of elastic blocks fills only what it is asked for, in decoding and in training."""

from dataclasses import replace

import mlx.core as mx
import pytest
from support.models import HIDDEN, draft_config, qwen3_model, randomize

from dflash import LoadedTargetModel, load_drafter, save_drafter
from dflash.drafters.blocks import draft_hidden
from dflash.drafters.checkpoints.config import DFlashConfig
from dflash.drafters.kinds import drafter_class

SLIDING, FULL = "sliding_attention", "full_attention"

KINDS = {
    "dflash": {},
    "dflash, windows": {"layer_types": (SLIDING, FULL), "sliding_window": 5, "is_causal": False},
    "dflash, anchor drafts": {"sample_from_anchor": True},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5},
    "dspark": {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": True},
    "domino": {"gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": 1, "sample_from_anchor": True},
    "dflare": {},
}


@pytest.fixture(scope="module")
def target() -> LoadedTargetModel:
    return LoadedTargetModel(qwen3_model(0))


def drafter_of(kind: str, target: LoadedTargetModel, **changes):
    """Always the same weights."""
    drafter_type = drafter_class(kind.split(",")[0])
    drafter = drafter_type(drafter_type.config_class(**{**vars(draft_config()), **KINDS[kind], **changes}))
    randomize(drafter, 1, scale=2.0)
    drafter.bind(target)
    return drafter


def drafts_after(drafter, length: int) -> mx.array:
    """Logits of ``length`` drafts after some context."""
    mx.random.seed(3)
    features, cache = mx.random.normal((1, 9, 3 * HIDDEN)), drafter.make_cache()
    drafter.extend_context(features, cache, mx.arange(9)[None])
    return drafter.propose(mx.array([[4]]), length, cache).logits


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_a_drafter_whose_blocks_are_as_short(kind, target):
    elastic = drafter_of(kind, target, elastic_blocks=True)
    for length in range(1, elastic.block_size):
        short = drafter_of(kind, target, block_size=length + (not elastic.config.sample_from_anchor))
        assert mx.allclose(drafts_after(elastic, length), drafts_after(short, length), atol=1e-4)
    assert not mx.allclose(drafts_after(elastic, 2), drafts_after(drafter_of(kind, target), 2), atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [1, 3])
def test_blocks_are_as_long_in_training(kind, drafts, target):
    drafter = drafter_of(kind, target, elastic_blocks=True)
    features, tokens = mx.random.normal((1, 20, 3 * HIDDEN), key=mx.random.key(5)), mx.arange(20)[None]
    hidden = draft_hidden(drafter, features, tokens, mx.array([[4, 11]]), drafts)
    for anchor, trained in zip([4, 11], hidden[0], strict=True):
        cache = drafter.make_cache()
        drafter.extend_context(features[:, :anchor], cache, tokens[:, :anchor])
        drafted = drafter.draft_hidden(mx.array([[anchor]]), drafts, cache)
        assert mx.allclose(trained[-drafts:], drafted[0], atol=1e-4)


def test_the_key_is_kept_in_files_and_absent_where_it_says_nothing(target, tmp_path):
    config = draft_config(elastic_blocks=True)
    assert config.to_dict()["dflash_config"]["elastic_blocks"] is True
    assert "elastic" not in str(draft_config().to_dict())
    assert DFlashConfig.from_dict(config.to_dict()) == config
    drafter = drafter_of("dflash", target)
    drafter.config = replace(drafter.config, elastic_blocks=True)
    save_drafter(drafter, tmp_path / "elastic", mx.float32)
    assert load_drafter(tmp_path / "elastic").config.elastic_blocks
