"""The cost of a rewind as a fraction of its block's time, by kind of cache (``dflash adapters bench``).

Models have about 50M parameters, large enough that arithmetic and not call overhead dominates a block's time.
"""

import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from rich.table import Table

from dflash.core.errors import DFlashError
from dflash.core.files import flat
from dflash.core.progress import progress
from dflash.target import LoadedTargetModel

from . import small_models as small

BLOCK, PROMPT = 16, 512  # tokens; the prompt wraps the sliding windows
ATTENTION: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "vocab_size": 8192, "num_hidden_layers": 14,
}  # fmt: skip
WINDOWS: dict[str, Any] = {"layer_types": [small.SLIDING] * 13 + [small.FULL], "sliding_window": 256}
DELTA_NET: dict[str, Any] = {  # as wide as the smallest published Qwen3.5, with fewer layers
    "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "vocab_size": 2048, "num_hidden_layers": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 0,
}  # fmt: skip
MAMBA: dict[str, Any] = {  # as wide as the published 370M model, with fewer layers
    "hidden_size": 1024, "intermediate_size": 1536, "num_hidden_layers": 7, "num_heads": 32, "head_dim": 64,
    "state_size": 128, "vocab_size": 2048,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention": ("qwen3", ATTENTION),
    "sliding window": ("llama", ATTENTION | WINDOWS),
    "gated delta net": ("qwen3_5", DELTA_NET),
    "Mamba": ("mamba2", MAMBA),
}
"""Architecture and config by kind of cache."""


@dataclass(frozen=True)
class Cost:
    """Seconds that a block takes, and rewinding half of it."""

    kind: str
    architecture: str
    parameters: int
    block: float
    rewind: float

    @property
    def fraction(self) -> float:
        """The rewind's time as a fraction of the block's."""
        return self.rewind / self.block


def measure(blocks: int = 40) -> list[Cost]:
    """Time ``blocks`` blocks of 16 tokens and the rewinds of their last 8; the minimum of each counts.

    Raises ``DFlashError`` for fewer than one block.
    """
    if blocks < 1:
        raise DFlashError(f"blocks must be at least 1, got {blocks}.")
    costs = []
    for kind, (name, config) in progress(MODELS.items(), "kinds of cache timed"):
        target = LoadedTargetModel(small.build(name, limit=100_000_000, **config))
        parameters = sum(w.size for w in flat(target.model.parameters()).values())
        block, rewind = (min(times) for times in zip(*_times(target, blocks), strict=True))
        costs.append(Cost(kind, name, parameters, block, rewind))
    return costs


def _times(target: LoadedTargetModel, blocks: int) -> list[tuple[float, float]]:
    """Seconds of each block and of its rewind."""
    tokens = mx.random.randint(0, target.vocab_size, (1, PROMPT), key=mx.random.key(0))
    cache = target.make_cache()
    target.forward_hidden(tokens, cache, ())
    mx.eval([c.state for c in cache])
    times = []
    for _ in range(blocks):
        start = time.perf_counter()
        logits, _ = target.forward_with_hidden_states(tokens[:, :BLOCK], cache, ())
        mx.eval(mx.argmax(logits, axis=-1), [c.state for c in cache])
        verified = time.perf_counter()
        cache.rewind(cache.offset - BLOCK // 2)
        mx.eval([c.state for c in cache])
        times.append((verified - start, time.perf_counter() - verified))
    return times


def table(costs: list[Cost]) -> Table:
    """The costs for a terminal."""
    shown = Table("cache", "architecture", "parameters", "block", "rewind", "of the block")
    for c in costs:
        times = f"{1e3 * c.block:.1f} ms", f"{1e3 * c.rewind:.2f} ms", f"{c.fraction:.1%}"
        shown.add_row(c.kind, c.architecture, f"{c.parameters / 1e6:.0f}M", *times)
    return shown
