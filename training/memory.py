"""How much memory training takes, by arithmetic, and how much this machine has.

Knows sizes. Must not know how anything is trained. The arithmetic is that of the comments in ``configs/``; the factor
of a layer at work was measured on a small drafter.
"""

import os
from dataclasses import dataclass

import mlx.core as mx

from dflash import DFlashConfig

_LAYER_AT_WORK = 3.55
"""What a layer holds in the forward and backward pass, in units of its forward values."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one training run, part by part."""

    target: int
    drafter: int
    sum: int
    batch: int
    update: int

    @property
    def peak(self) -> int:
        """The greatest sum of what exists at once: a batch and the update come one after the other."""
        return self.target + self.drafter + self.sum + max(self.batch, self.update)


def training_memory(
    config: DFlashConfig,
    *,
    target_bytes: int,
    value_bytes: int,
    parameters: int,
    blocks: int,
    batch_tokens: int,
    chunk: int,
    several_batches: bool,
    grad_checkpoint: bool,
) -> Memory:
    """The memory of training a drafter of ``config`` with ``parameters`` weights.

    ``value_bytes`` is the size of a number in the type that the drafter computes in; weights, gradients and moments
    are float32.
    """
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    widths = 8 * config.hidden_size + 3 * heads + 4 * kv_heads + 4 * config.intermediate_size
    positions = blocks * config.block_size
    layer = int(_LAYER_AT_WORK * positions * widths * value_bytes)
    inputs = positions * config.hidden_size * config.num_hidden_layers * value_bytes
    layers = inputs + layer if grad_checkpoint else config.num_hidden_layers * layer
    logits = 3 * chunk * (config.draft_vocab_size or config.vocab_size) * 4
    features = batch_tokens * len(config.target_layer_ids) * config.hidden_size * value_bytes
    return Memory(
        target=target_bytes,
        drafter=16 * parameters,
        sum=4 * parameters if several_batches else 0,
        batch=layers + logits + features + (value_bytes * parameters if value_bytes < 4 else 0),
        update=12 * parameters,
    )


def machine_memory() -> int:
    """Bytes that MLX can use here: the GPU's where there is one, otherwise the machine's."""
    size = mx.device_info().get("memory_size") if mx.default_device() == mx.Device(mx.gpu) else None
    return int(size) if size else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
