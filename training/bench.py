"""One training step of a drafter: this package's attention against one dense mask, in time and memory.

    python -m dflash.training.bench

Knows how to time two steps in turns. Must not know how either attention is used outside a step.

A step is the loss and its gradients on one sequence of random features; the target's pass and the optimiser,
which are the same for both, are left out. Both sides compute the loss in the same chunks, so that nothing
but the attention differs.

Shapes: N sequences, S context length, A anchors a sequence, B block size, X = A * B, H query heads,
K key-value heads, G query heads a key-value head, D head size.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from einops import rearrange
from rich.console import Console
from rich.table import Table

from dflash import DFlashConfig, DFlashDraftModel
from dflash.core.backend import keep_freed_memory, on_cpu, set_blas_threads
from dflash.core.cpu_math import softmax
from dflash.core.progress import progress

from .drafters.attention import block_attention
from .drafters.forward import BlockAttention
from .drafters.loss import Batch, drafter_loss
from .drafters.objectives import ObjectiveSettings
from .drafters.targets import select_anchors


def dense_mask(anchors_NA: mx.array, context: int, size: int, window: int | None, causal: bool) -> mx.array:
    """Added to scores ``[N, X, S + X]`` of all blocks against the context and all blocks."""
    anchors_NX = mx.repeat(anchors_NA, size, axis=1)[..., None]
    within_X = mx.arange(anchors_NA.shape[1] * size) % size
    positions, keys = anchors_NX + within_X[:, None], mx.arange(context)
    visible_context = keys < anchors_NX
    if window is not None:
        visible_context = visible_context & (keys > positions - window)
    block_X = mx.arange(within_X.size) // size
    visible_blocks = block_X[:, None] == block_X
    if causal:
        visible_blocks = visible_blocks & (within_X[:, None] >= within_X)
    visible_blocks = mx.broadcast_to(visible_blocks, (len(anchors_NA), *visible_blocks.shape))
    return mx.where(mx.concatenate([visible_context, visible_blocks], axis=-1), 0.0, -1e9)


class DenseAttention:
    """One masked attention of all blocks over ``[context, all blocks]``, in place of `block_attention`.

    Its masks, one for each kind of layer, are made once: an instance serves one batch.
    """

    def __init__(self) -> None:
        self.masks: dict[tuple[int | None, bool], mx.array] = {}

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        context_keys: mx.array,
        context_values: mx.array,
        anchors_NA: mx.array,
        window: int | None = None,
        causal: bool = False,
    ) -> mx.array:
        """As :func:`~dflash.training.drafters.attention.block_attention`."""
        (n, _), (heads, size, head_size) = anchors_NA.shape, queries.shape[1:]
        kind, groups = (window, causal), heads // keys.shape[1]
        if kind not in self.masks:
            self.masks[kind] = dense_mask(anchors_NA, context_keys.shape[2], size, window, causal)
        keys, values = (
            mx.concatenate([of_context, rearrange(of_blocks, "(N A) K B D -> N K (A B) D", N=n)], axis=2)[:, :, None]
            for of_context, of_blocks in ((context_keys, keys), (context_values, values))
        )
        queries = rearrange(queries * head_size**-0.5, "(N A) (K G) B D -> N K G (A B) D", N=n, G=groups)
        weights = softmax(queries @ keys.swapaxes(-1, -2) + self.masks[kind][:, None, None])
        return rearrange(weights @ values, "N K G (A B) D -> (N A) (K G) B D", B=size)


@dataclass(frozen=True)
class Shape:
    """The drafter that is trained: by default of a quarter of the width of Qwen3-4B's, which a CPU manages."""

    hidden_size: int = 640
    layers: int = 3
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    intermediate_size: int = 2432
    vocab_size: int = 8192
    block_size: int = 16


class _Target:
    """An embedding and a head: all that a drafter borrows."""

    num_layers, embedding_scale = 8, 1.0
    adapter = SimpleNamespace(config=None)

    def __init__(self, shape: Shape):
        self.hidden_size, self.vocab_size = shape.hidden_size, shape.vocab_size
        self.table = mx.random.normal((shape.vocab_size, shape.hidden_size))

    def embed(self, tokens: mx.array) -> mx.array:
        return self.table[tokens]

    def head(self, hidden: mx.array) -> mx.array:
        return hidden @ self.table.T * self.hidden_size**-0.5


def build(shape: Shape) -> DFlashDraftModel:
    """A drafter with random weights, bound to a random embedding and head."""
    mx.random.seed(0)
    config = DFlashConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_target_layers=_Target.num_layers,
        vocab_size=shape.vocab_size,
        mask_token_id=shape.vocab_size - 1,
        block_size=shape.block_size,
        target_layer_ids=(1, 3, 5, 7),
    )
    model = DFlashDraftModel(config)
    model.bind(_Target(shape))  # type: ignore[arg-type]
    mx.eval(model.parameters())
    return model


def step(model: DFlashDraftModel, context: int, anchors: int, chunk: int) -> Callable[[BlockAttention], mx.array]:
    """``run(attention)``: loss and gradients on one sequence; its response is all but the first eighth."""
    config, rng = model.config, np.random.default_rng(0)
    tokens = mx.array(rng.integers(0, config.vocab_size, (1, context)))
    loss_mask = np.arange(context)[None] >= context // 8
    features = mx.random.normal((1, context, len(config.target_layer_ids) * config.hidden_size))
    batch = Batch(tokens, mx.array(loss_mask), mx.array(select_anchors(loss_mask, anchors, rng)), features)
    mx.eval(batch)

    def run(attention: BlockAttention) -> mx.array:
        loss = partial(drafter_loss, objective=ObjectiveSettings(chunk=chunk), attention=attention)
        value, gradients = nn.value_and_grad(model, loss)(model, batch)
        mx.eval(value, gradients)
        return value

    return run


@dataclass(frozen=True)
class Measured:
    """One step's time in seconds, peak memory in bytes, and loss."""

    seconds: float
    peak: int
    loss: float


def measure(run: Callable[[BlockAttention], mx.array], attention: BlockAttention) -> Measured:
    """One step, from a clean peak."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    started = time.perf_counter()
    loss = run(attention)
    return Measured(time.perf_counter() - started, mx.get_peak_memory(), cast(float, loss.item()))


def in_turns(run: Callable[[BlockAttention], mx.array], repeats: int) -> Iterator[tuple[Measured, Measured]]:
    """Pairs of this scheme and the dense mask, the first to go changing; more than one come after a warm-up."""
    for i in range(-1 if repeats > 1 else 0, repeats):
        if i % 2:
            dense = measure(run, DenseAttention())
            ours = measure(run, block_attention)
        else:
            ours = measure(run, block_attention)
            dense = measure(run, DenseAttention())
        if i >= 0:
            yield ours, dense


def main() -> None:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(description="One training step: this attention against a dense mask.")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048], metavar="S")
    parser.add_argument("--anchors", type=int, nargs="+", default=[64, 128, 256], metavar="A")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--chunk", type=int, default=ObjectiveSettings.chunk, help="predictions whose logits exist at once"
    )
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = parser.parse_args()
    keep_freed_memory()
    if on_cpu():
        set_blas_threads(1)  # as in training, where each batch of a step has one core
    shape = Shape(**{name: getattr(options, name) for name in vars(Shape())})
    model = build(shape)

    table = Table(title=f"{shape}\nMedians of {options.repeats}; the ratios are dense / ours, by pairs.")
    for heading in ("S", "A", "ours s", "dense s", "ratio", "ours MB", "dense MB", "ratio", "losses differ"):
        table.add_column(heading, justify="right")
    sizes = [(context, anchors) for context in options.contexts for anchors in options.anchors]
    for context, anchors in progress(sizes, "step benchmark"):
        run = step(model, context, anchors, options.chunk)
        pairs = list(in_turns(run, options.repeats))
        ours, dense = zip(*pairs, strict=True)
        table.add_row(
            str(context),
            str(anchors),
            *(f"{statistics.median(m.seconds for m in side):.3f}" for side in (ours, dense)),
            f"{statistics.median(d.seconds / o.seconds for o, d in pairs):.2f}",
            *(f"{statistics.median(m.peak for m in side) / 1e6:.0f}" for side in (ours, dense)),
            f"{statistics.median(d.peak / o.peak for o, d in pairs):.2f}",
            f"{max(abs(d.loss - o.loss) for o, d in pairs):.0e}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
