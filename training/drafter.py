"""Training a DFlash drafter: many blocks a sequence in one pass over the frozen target's features.

Knows the drafter model and how blocks, attention and loss fit together. Must not know any one target
architecture, or how a block is decoded.

Shapes: N sequences, S sequence length, A anchors a sequence, B block size, E hidden size, F feature size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from dflash import DFlashConfig, DFlashDraftModel, DFlashSpeculativeDecoder, LoadedTargetModel

from .arrays import flat
from .attention import block_attention
from .blocks import block_targets, draw_anchors, position_weights
from .data import Ints, Sequences, padded, plan_batches
from .fastmath import swiglu
from .fit import FitSettings
from .losses import decayed_cross_entropy

Features = Callable[[mx.array], mx.array]
"""Features ``[N, S, F]`` of ``tokens [N, S]`` from the frozen target."""


@dataclass(frozen=True)
class DrafterSettings:
    """Shape of the drafter and how it learns. ``anchors`` is per sequence, ``batch_tokens`` counts padding."""

    fit: FitSettings
    target_layer_ids: tuple[int, ...] = ()
    num_hidden_layers: int = 2
    intermediate_size: int = 512
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    gamma: float = 7.0
    anchors: int = 24
    batch_tokens: int = 2048
    seed: int = 0


def build_drafter(
    settings: DrafterSettings, target: LoadedTargetModel, mask_token_id: int, rope_theta: float
) -> DFlashDraftModel:
    """A new drafter bound to ``target``, its weights drawn from ``settings.seed``."""
    config = DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=settings.head_dim,
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        mask_token_id=mask_token_id,
        block_size=settings.block_size,
        target_layer_ids=settings.target_layer_ids,
        rope_theta=rope_theta,
        max_position_embeddings=target.max_length or 40960,
        input_embedding_scale=target.adapter.embedding_scale,
    )
    mx.random.seed(settings.seed)
    model = DFlashDraftModel(config)
    out_scale = (2 * settings.num_hidden_layers) ** -0.5

    def draw(name: str, value: mx.array) -> mx.array:
        if value.ndim < 2:
            return value
        feeds_residual = "o_proj" in name or "down_proj" in name
        return mx.random.normal(value.shape, scale=value.shape[-1] ** -0.5 * (out_scale if feeds_residual else 1.0))

    model.load_weights([(name, draw(name, value)) for name, value in flat(model.parameters()).items()])
    model.bind(target)
    mx.eval(model.parameters())
    return model


def draft_hidden(
    model: DFlashDraftModel, features_NSF: mx.array, tokens_NS: mx.array, anchors_NA: mx.array
) -> mx.array:
    """Final hidden states ``[N, A, B, E]`` of the blocks at ``anchors_NA``.

    The drafter's own forward, with the blocks of all sequences in one batch and the quick SwiGLU.
    """
    config, (n, a) = model.config, anchors_NA.shape
    context = model.context(features_NSF)
    anchor_tokens = mx.take_along_axis(tokens_NS, anchors_NA, axis=1).reshape(-1)
    x_BLE = model.block_inputs(anchor_tokens)
    offsets = anchors_NA.reshape(-1)
    for number, layer in enumerate(model.layers):
        context_keys, context_values = layer.self_attn.keys_values(context, 0)
        attend = partial(
            block_attention,
            context_keys=context_keys,
            context_values=context_values,
            anchors_NA=anchors_NA,
            window=config.window(number),
            causal=config.causal_in_block(number),
        )
        x_BLE = x_BLE + layer.self_attn(layer.input_layernorm(x_BLE), offsets, attend)
        y_BLE, mlp = layer.post_attention_layernorm(x_BLE), layer.mlp
        x_BLE = x_BLE + mlp.down_proj(swiglu(mlp.gate_proj(y_BLE), mlp.up_proj(y_BLE)))
    return model.norm(x_BLE).reshape(n, a, config.block_size, -1)


def drafter_loss(features: Features, gamma: float) -> Callable[..., mx.array]:
    """``loss(model, tokens, response, anchors)`` for :func:`~dflash.training.fit.fit`."""

    def loss(model: DFlashDraftModel, tokens_NS: mx.array, response_NS: mx.array, anchors_NA: mx.array) -> mx.array:
        size = model.config.block_size
        hidden = draft_hidden(model, mx.stop_gradient(features(tokens_NS)), tokens_NS, anchors_NA)
        targets, inside = block_targets(tokens_NS, response_NS, anchors_NA, size)
        weights = inside * position_weights(size, gamma)
        logits = model.head(hidden[:, :, 1:].reshape(-1, hidden.shape[-1]))
        return decayed_cross_entropy(logits, targets.reshape(-1), weights.reshape(-1))

    return loss


def drafter_batches(sequences: Sequences, settings: DrafterSettings) -> Callable[[int], tuple[mx.array, ...]]:
    """``batch(number)``: tokens, response mask and freshly drawn anchors."""
    starts, needed = sequences.starts, settings.fit.steps * settings.fit.batches_per_step
    plan: list[Ints] = []
    for epoch in range(needed):
        if len(plan) >= needed:
            break
        plan += plan_batches(sequences.lengths, settings.batch_tokens, settings.seed + epoch)

    def batch(number: int) -> tuple[mx.array, ...]:
        tokens, response = padded(sequences, plan[number], starts)
        anchors = draw_anchors(response, settings.anchors, np.random.default_rng([settings.seed, number]))
        return mx.array(tokens), mx.array(response), mx.array(anchors)

    return batch


def acceptance_length(
    model: DFlashDraftModel, target: LoadedTargetModel, prompts: Iterable[list[int]], max_tokens: int
) -> float:
    """Tokens committed per target pass when the two decode greedily."""
    decoder = DFlashSpeculativeDecoder(target, model)
    responses = (r for prompt in prompts for r in decoder.stream_generate(prompt, max_tokens))
    accepted = [r.accepted for r in responses if r.accepted]
    return sum(accepted) / max(1, len(accepted))
