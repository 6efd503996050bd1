"""The training forward of many blocks is the drafting of each."""

import mlx.core as mx
import pytest
from support.models import HIDDEN, qwen3_model

from dflash import DFlashConfig, DFlashDraftModel, LoadedTargetModel
from dflash.drafters.blocks import draft_hidden


@pytest.mark.parametrize("layer_types", [(), ("sliding_attention", "full_attention")])
def test_blocks_trained_together_are_the_blocks_drafted_one_by_one(layer_types):
    mx.random.seed(1)
    config = DFlashConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_target_layers=4, vocab_size=32, mask_token_id=31, block_size=5, target_layer_ids=(1, 3),
        layer_types=layer_types, sliding_window=6 if layer_types else None,
    )  # fmt: skip
    model, target = DFlashDraftModel(config), LoadedTargetModel(qwen3_model(0))
    model.bind(target)
    tokens, features = mx.random.randint(0, 31, (2, 20)), mx.random.normal((2, 20, 2 * HIDDEN))
    anchors = mx.array([[3, 9, 15], [4, 4, 18]])
    logits = target.head(draft_hidden(model, features, tokens, anchors, model.block_size - 1)[:, :, 1:])
    for n in range(2):
        for a in range(3):
            anchor, cache = int(anchors[n, a]), model.make_cache()
            model.extend_context(features[n : n + 1, :anchor], cache, tokens[n : n + 1, :anchor])
            proposal = model.propose(tokens[n : n + 1, anchor : anchor + 1], 4, cache)
            assert mx.abs(proposal.logits[0] - logits[n, a]).max() < 1e-3
