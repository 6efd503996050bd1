"""Small targets whose layers keep every kind of cache that batches hold."""

from functools import lru_cache

from mlx_lm.models.cache import RotatingKVCache

from dflash import LoadedTargetModel
from dflash.adapters.conformance import small_models as small

WINDOW = 16

ROW_TARGETS = {
    "full": "qwen3",
    "sliding": "qwen3",
    "full and sliding": "gemma3_text",
    "gated delta net": "qwen3_5",
    "short convolution": "lfm2",
    "mamba 2": "mamba2",
    "sinks": "gpt_oss",
    "experts": "qwen3_moe",
    "recurrent and attention in a layer": "falcon_h1",
}


@lru_cache(maxsize=16)
def row_target(name: str) -> LoadedTargetModel:
    """The target; where a name says nothing else, windows are those of ``small_models``."""
    model = small.build(ROW_TARGETS[name])
    if name == "sliding":
        model.make_cache = lambda: [RotatingKVCache(max_size=WINDOW) for _ in model.layers]
    return LoadedTargetModel(model)
