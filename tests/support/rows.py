"""For batches: small targets whose layers keep every kind of cache, and a drafter with a script for each text."""

import random
from dataclasses import dataclass, field
from functools import lru_cache

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from dflash import LoadedTargetModel, Proposal
from dflash.adapters.conformance import small_models as small

from .models import ScriptedCache

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


@dataclass
class Script:
    """Drafts each text's own continuation, each token right with its text's chance."""

    texts: list[list[int]]
    chances: list[float]
    vocab_size: int
    block_size: int = 8
    target_layer_ids: tuple[int, ...] = (0,)
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    def bind(self, target) -> None: ...

    def make_cache(self) -> ScriptedCache:
        return ScriptedCache()

    def extend_context(self, features: mx.array, cache: ScriptedCache, tokens: mx.array) -> None:
        assert features.shape[:2] == tokens.shape
        assert features.shape[2] > 0
        cache.tokens += tokens[0].tolist()
        cache.features.append(features)

    def propose(self, anchor: mx.array, length: int, cache: ScriptedCache) -> Proposal:
        read = [*cache.tokens, anchor.item()]
        number = next(i for i, text in enumerate(self.texts) if text[: len(read)] == read)
        planned = self.texts[number][len(read) :][:length]
        right = [self.chance.random() < self.chances[number] for _ in planned]
        drafts = [t if ok else (t + 1) % self.vocab_size for t, ok in zip(planned, right, strict=True)]
        return Proposal(mx.array([drafts], mx.int32).reshape(1, len(drafts)))
