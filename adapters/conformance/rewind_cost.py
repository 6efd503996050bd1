"""What a rewind costs: its time as a fraction of the block's own, for each kind of cache.

Knows models of about 50M parameters, large enough that a block's time is arithmetic and not call overhead.
Must not know how caches are rewound. Run it with ``dflash adapters bench``.
"""

import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from rich.table import Table
from rich.text import Text

from dflash.core.errors import DFlashError
from dflash.core.progress import progress
from dflash.target import LoadedTargetModel
from dflash.target.compare import named_arrays

from . import small_models as small

BLOCK, PROMPT = 16, 512  # tokens; the prompt wraps the sliding windows
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
}
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "full attention": ("qwen3", {"num_hidden_layers": 14}, 0.02),
    "sliding window": (
        "llama",
        {"num_hidden_layers": 14, "layer_types": [small.SLIDING] * 13 + [small.FULL], "sliding_window": 256},
        0.05,
    ),
    "gated delta net": (
        "qwen3_5",
        {
            "hidden_size": 1024,  # width of the smallest published Qwen3.5, with fewer layers
            "intermediate_size": 3584,
            "vocab_size": 2048,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 0,
        },
        0.15,
    ),
    "Mamba": (
        "mamba2",  # width of the published 370M model, with fewer layers
        {
            "hidden_size": 1024,
            "num_hidden_layers": 7,
            "num_heads": 32,
            "head_dim": 64,
            "state_size": 128,
            "vocab_size": 2048,
        },
        0.15,
    ),
}
"""Architecture, its size, and the largest fraction of a block's time that a rewind may take."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a block and of rewinding half of it, and the fraction of the block's time that is allowed."""

    kind: str
    architecture: str
    parameters: int
    block: float
    rewind: float
    allowed: float

    @property
    def fraction(self) -> float:
        """The rewind's time as a fraction of the block's."""
        return self.rewind / self.block


def measure(blocks: int = 40) -> list[Cost]:
    """Time ``blocks`` blocks of 16 tokens and, each evaluated at once, the rewinds of their last 8.

    The least of each is taken: other work on the machine only ever adds time.

    Raises ``DFlashError`` for fewer than one block.
    """
    if blocks < 1:
        raise DFlashError(f"blocks must be at least 1, got {blocks}.")
    costs = []
    for kind, (name, changes, allowed) in progress(MODELS.items(), "kinds of cache timed"):
        target = LoadedTargetModel(small.build(name, limit=100_000_000, **WIDE | changes))
        parameters = sum(w.size for _, w in named_arrays(target.model))
        block, rewind = (min(times) for times in _times(target, blocks))
        costs.append(Cost(kind, name, parameters, block, rewind, allowed))
    return costs


def _times(target: LoadedTargetModel, blocks: int) -> tuple[list[float], list[float]]:
    tokens = mx.random.randint(0, target.vocab_size, (1, PROMPT), key=mx.random.key(0))
    cache = target.make_cache()
    target.forward_hidden(tokens, cache, ())
    mx.eval([c.state for c in cache])
    block_times, rewind_times = [], []
    for _ in range(blocks):
        begin = time.perf_counter()
        logits, _ = target.forward_with_hidden_states(tokens[:, :BLOCK], cache, ())
        mx.eval(mx.argmax(logits, axis=-1), [c.state for c in cache])
        verified = time.perf_counter()
        cache.rewind(cache.offset - BLOCK // 2)
        mx.eval([c.state for c in cache])
        rewind_times.append(time.perf_counter() - verified)
        block_times.append(verified - begin)
    return block_times, rewind_times


def table(costs: list[Cost]) -> Table:
    """For a terminal."""
    shown = Table("cache", "architecture", "parameters", "block", "rewind", "of the block", "allowed")
    for c in costs:
        verdict = "green" if c.fraction <= c.allowed else "red"
        shown.add_row(
            c.kind,
            c.architecture,
            f"{c.parameters / 1e6:.0f}M",
            f"{1e3 * c.block:.1f} ms",
            f"{1e3 * c.rewind:.2f} ms",
            Text(f"{c.fraction:.1%}", style=verdict),
            f"{c.allowed:.0%}",
        )
    return shown
