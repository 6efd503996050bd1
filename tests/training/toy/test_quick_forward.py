"""The quick forward passes of small targets equal mlx-lm's own."""

import mlx.core as mx
import pytest
from mlx_lm.models import gemma3_text, qwen3
from support.models import randomize

from dflash.adapters import find_adapter
from dflash.training.toy.quick_forward import hidden_states

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 4, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "vocab_size": 40, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {
    "qwen3": (qwen3, {}),
    "gemma3_text": (gemma3_text, {"query_pre_attn_scalar": 4, "sliding_window": 6, "sliding_window_pattern": 2}),
}


@pytest.mark.parametrize("family", MODELS)
def test_the_forward_pass_equals_mlx_lms_with_and_without_windows(family):
    module, more = MODELS[family]
    model = randomize(module.Model(module.ModelArgs.from_dict(SIZES | more | {"model_type": family})), 1)
    tokens = mx.random.randint(0, 40, (3, 17), key=mx.random.key(0))
    expected = model.model(tokens)
    assert mx.abs(expected).max() > 1
    assert mx.abs(hidden_states(find_adapter(model), tokens) - expected).max() < 1e-4
