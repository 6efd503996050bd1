"""Many blocks in one pass are each block alone, and a drafter of elastic blocks fills only what it is asked for."""

from dataclasses import replace

import mlx.core as mx
import pytest
from support.kinds import OPTIONS, random_drafter
from support.models import HIDDEN, draft_config, qwen3_model
from support.packagings import FULL, SLIDING

from dflash import LoadedTargetModel, load_drafter, save_drafter
from dflash.drafters.blocks import draft_hidden
from dflash.drafters.checkpoints.config import DFlashConfig

ROWS = {
    **{kind: {} for kind in OPTIONS},
    "dflash, windows": {"layer_types": (SLIDING, FULL), "sliding_window": 5, "is_causal": False},
    "dflash, anchor drafts": {"sample_from_anchor": True},
}


@pytest.fixture(scope="module")
def target() -> LoadedTargetModel:
    return LoadedTargetModel(qwen3_model(0))


def drafter_of(row: str, target: LoadedTargetModel, **changes):
    """Always the same weights."""
    drafter = random_drafter(row.partition(",")[0], 1, 32, **ROWS[row] | changes)
    drafter.bind(target)
    return drafter


def drafts_after(drafter, length: int) -> mx.array:
    """Logits of ``length`` drafts after some context."""
    mx.random.seed(3)
    features, cache = mx.random.normal((1, 9, 3 * HIDDEN)), drafter.make_cache()
    drafter.extend_context(features, cache, mx.arange(9)[None])
    return drafter.propose(mx.array([[4]]), length, cache).logits


@pytest.mark.parametrize("kind", ROWS)
def test_drafts_are_those_of_a_drafter_whose_blocks_are_as_short(kind, target):
    elastic = drafter_of(kind, target, elastic_blocks=True)
    for length in (1, 3, elastic.block_size - 1):
        short = drafter_of(kind, target, block_size=length + (not elastic.config.sample_from_anchor))
        assert mx.allclose(drafts_after(elastic, length), drafts_after(short, length), atol=1e-4)
    assert not mx.allclose(drafts_after(elastic, 2), drafts_after(drafter_of(kind, target), 2), atol=1e-2)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("drafts", [3, None])
def test_blocks_trained_together_are_the_blocks_drafted_one_by_one(kind, drafts, target):
    """With as many drafts as a block has, or fewer in elastic blocks."""
    drafter = drafter_of(kind, target, elastic_blocks=drafts is not None)
    drafts = drafts or drafter.block_size - 1
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
