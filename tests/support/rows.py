"""For batches: small targets whose layers keep every kind of cache, and a drafter with a script for each text."""

from functools import lru_cache

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from dflash import LoadedTargetModel, Proposal
from dflash.adapters.conformance import small_models as small

from .models import ScriptedCache, ScriptedDrafter

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


class Script(ScriptedDrafter):
    """Drafts each text's own continuation, no further than its end, each token right with its text's chance."""

    def __init__(self, texts: list[list[int]], chances: list[float], vocab_size: int, block_size: int = 8):
        super().__init__([], vocab_size, block_size=block_size, layer_ids=(0,), seed=7)
        self.texts, self.chances = texts, chances

    def propose(self, anchor: mx.array, length: int, cache: ScriptedCache) -> Proposal:
        read = [*cache.tokens, anchor.item()]
        number = next(i for i, text in enumerate(self.texts) if text[: len(read)] == read)
        self.text, self.p = self.texts[number], self.chances[number]
        length = min(length, len(self.text) - len(read))
        return super().propose(anchor, length, cache) if length else Proposal(mx.zeros((1, 0), mx.int32))
