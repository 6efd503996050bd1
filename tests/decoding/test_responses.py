"""How many answers are written at a time: as many as their caches have room for, whatever these hold."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from support.models import llama_model, qwen3_model

from dflash.adapters.conformance import small_models
from dflash.core.files import flat
from dflash.decoding import responses
from dflash.decoding.responses import rows_that_fit

MODELS = {
    "full": lambda: qwen3_model(1),
    "sliding": lambda: llama_model(1, window=6),
    "full and sliding": lambda: small_models.build("gemma3_text"),
    "recurrent and full": lambda: small_models.build("qwen3_5", num_experts=0),
}


@pytest.mark.parametrize("tokens", [40, 300])
@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_has_as_many_rows_as_a_quarter_of_the_free_memory_holds(kind, tokens, monkeypatch):
    model = MODELS[kind]()
    cache = make_prompt_cache(model)
    for part in (tokens - 1, 1):
        model(mx.zeros((1, part), mx.int32), cache=cache)
    row = sum(layer.nbytes for layer in cache)
    weights = sum(weight.nbytes for weight in flat(model.parameters()).values())
    for free, rows in ((4 * 3 * row, 3), (4 * 3 * row - 1, 2), (1, 1), (-weights, 1)):
        monkeypatch.setattr(responses, "machine_memory", lambda free=free: weights + free)
        assert rows_that_fit(model, tokens) == rows
