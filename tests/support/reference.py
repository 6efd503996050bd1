"""An independent DFlash from the formulas alone: dense, slow, float64.

It reads published weight names and shares no code with the package: no caches, no chunks, no batches. Every block
starts from token ids and computes everything again. Weights are NumPy arrays, or MLX's where gradients are wanted.

Shapes: L length, S context length, H query heads, K key-value heads, D head size, E hidden size,
F feature size, A blocks at once, N drafts of each, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

Weights = Mapping[str, Any]


def library(x: Any) -> Any:
    """What computes with ``x``; the functions used here have the same names in both."""
    return mx if isinstance(x, mx.array) else np


def rms_norm(x, weight, eps: float):
    return x / library(x).sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + library(x).exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    weights = library(x).exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping | None) -> np.ndarray:
    """Radians a position for each pair of a head: plain, ``linear`` or ``llama3`` as Meta published it."""
    inverse = np.array([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    kind = (scaling or {}).get("rope_type", "default")
    if kind == "linear":
        return inverse / scaling["factor"]
    if kind == "llama3":
        low, high, length = (
            scaling[n] for n in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        return np.array([_llama3(w, scaling["factor"], low, high, length) for w in inverse])
    assert kind == "default", kind
    return inverse


def _llama3(inverse: float, factor: float, low: float, high: float, length: int) -> float:
    wavelength = 2 * math.pi / inverse
    if wavelength < length / high:
        return inverse
    if wavelength > length / low:
        return inverse / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * inverse / factor + smooth * inverse


def rope(x_LD, positions: np.ndarray, inverse: np.ndarray):
    """Rotate the pairs ``(x[i], x[i + D/2])``, the layout of published checkpoints; heads may come before ``L``."""
    lib, angles = library(x_LD), positions[:, None] * inverse[None]
    cos, sin = (lib.array(turned, dtype=lib.float64) for turned in (np.cos(angles), np.sin(angles)))
    first, second = lib.split(x_LD, 2, axis=-1)
    return lib.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def attend(q_LD, k_SD, v_SD, visible_LS: np.ndarray):
    lib, scores = library(q_LD), q_LD @ k_SD.swapaxes(-1, -2) / math.sqrt(q_LD.shape[-1])
    return softmax(lib.where(lib.array(visible_LS), scores, -math.inf)) @ v_SD


class Layer:
    """One pre-norm layer by its published names under ``prefix``; ``config`` is its model's ``config.json``."""

    def __init__(self, weights: Weights, prefix: str, config: Mapping):
        self.weights, self.prefix, self.eps = weights, prefix, config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.inverse = inverse_frequencies(config["head_dim"], config["rope_theta"], config.get("rope_scaling"))

    def normed(self, name: str, x):
        return rms_norm(x, self.weights[f"{self.prefix}.{name}.weight"], self.eps)

    def linear(self, name: str, x_LE):
        name = f"{self.prefix}.{name}"
        return x_LE @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def project(self, name: str, x_LE, heads: int):
        """``[heads, L, D]``."""
        y = self.linear(f"self_attn.{name}", x_LE)
        return library(y).stack(library(y).split(y, heads, axis=-1))

    def keys_values(self, y_LE, positions: np.ndarray, suffix: str = ""):
        k = self.normed("self_attn.k_norm", self.project(f"k_proj{suffix}", y_LE, self.kv_heads))
        return rope(k, positions, self.inverse), self.project(f"v_proj{suffix}", y_LE, self.kv_heads)

    def attention(self, y_LE, positions: np.ndarray, k, v, visible_LS: np.ndarray):
        q = self.normed("self_attn.q_norm", self.project("q_proj", y_LE, self.heads))
        group = self.heads // self.kv_heads  # consecutive query heads share one key-value head
        k, v = (library(x).repeat(x, group, axis=0) for x in (k, v))
        out = attend(rope(q, positions, self.inverse), k, v, visible_LS)
        return self.linear("self_attn.o_proj", library(out).concatenate(list(out), axis=-1))

    def mlp(self, y):
        return self.linear("mlp.down_proj", silu(self.linear("mlp.gate_proj", y)) * self.linear("mlp.up_proj", y))


class DenseTarget:
    """A dense Qwen3 by its published weight names; ``config`` is its ``config.json`` as a dict."""

    def __init__(self, weights: Weights, config: Mapping):
        self.weights, self.config = weights, config
        self.layers = [Layer(weights, f"model.layers.{i}", config) for i in range(config["num_hidden_layers"])]

    def embed(self, tokens: Sequence[int]):
        return self.weights["model.embed_tokens.weight"][list(tokens)]

    def head(self, hidden):
        return hidden @ self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"]).T

    def __call__(self, tokens: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits ``[L, V]`` and the output ``[L, E]`` of every layer."""
        x, positions, outputs = self.embed(tokens), np.arange(len(tokens)), []
        visible = positions[None] <= positions[:, None]
        for layer in self.layers:
            y = layer.normed("input_layernorm", x)
            x = x + layer.attention(y, positions, *layer.keys_values(y, positions), visible)
            x = x + layer.mlp(layer.normed("post_attention_layernorm", x))
            outputs.append(x)
        return self.head(rms_norm(x, self.weights["model.norm.weight"], self.config["rms_norm_eps"])), outputs


@dataclass
class Block:
    """The drafts of a block.

    ``logits`` and, before the kind corrects them, ``base`` are rows ``[V]``. DFlash 2 has ``candidates`` with their
    ``scores``, DSpark ``confidence``.
    """

    tokens: list[int] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    base: list[Any] = field(default_factory=list)
    candidates: list[list[int]] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    confidence: list[Any] = field(default_factory=list)


class DenseDrafter:
    """A DFlash drafter; ``config`` is its published ``config.json`` as a flat dict.

    ``target`` has ``embed`` and ``head``. ``known`` are the target's ids of a reduced vocabulary, in the drafter's
    order.
    """

    def __init__(self, weights: Weights, config: Mapping, target: Any, known: list[int] | None = None):
        self.weights, self.config, self.target, self.known = weights, config, target, known
        self.lib = library(weights["norm.weight"])
        self.layers = [Layer(weights, f"layers.{i}", config) for i in range(config["num_hidden_layers"])]

    def normed(self, name: str, x):
        return rms_norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def visible(self, layer: int, context: int, anchors: Sequence[int]) -> np.ndarray:
        """``[A * L, S + A * L]`` for blocks at ``anchors``, spelled out one query and one key at a time."""
        config, size = self.config, self.config["block_size"]
        sliding = config["layer_types"][layer] == "sliding_attention"
        causal = sliding if config["is_causal"] is None else config["is_causal"]
        visible = np.zeros((len(anchors) * size, context + len(anchors) * size), bool)
        for number, anchor in enumerate(anchors):
            for i in range(size):
                row = number * size + i
                for s in range(anchor):
                    visible[row, s] = not sliding or s > anchor + i - config["sliding_window"]
                for j in range(size):
                    visible[row, context + number * size + j] = not causal or j <= i
        return visible

    def context(self, layer: int, features_SF):
        """Keys and values of the context in one layer."""
        hidden = self.normed("hidden_norm", features_SF @ self.weights["fc.weight"].T)
        return self.layers[layer].keys_values(hidden, np.arange(len(features_SF)))

    def mixed(self, sublayer: str, side: int, u_LE, x_LE):
        """``x_LE`` before (``side`` 0) or after a sublayer with the input ``u_LE``: DFlash 2 mixes rows here."""
        return x_LE

    def hidden(self, features_SF: np.ndarray, anchors: Sequence[int], tokens: Sequence[int]):
        """Final hidden states ``[A, L, E]`` of the blocks at the positions ``anchors``, which begin with ``tokens``."""
        config, size = self.config, self.config["block_size"]
        features_SF = self.lib.array(features_SF, dtype=self.lib.float64)
        positions = np.array([anchor + i for anchor in anchors for i in range(size)])
        inputs = [t for token in tokens for t in (token, *[config["mask_token_id"]] * (size - 1))]
        x = self.target.embed(inputs) * config["input_embedding_scale"]
        for i, layer in enumerate(self.layers):
            attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
            u = layer.normed("input_layernorm", x)
            y = self.mixed(attention, 0, u, u)
            both = zip(self.context(i, features_SF), layer.keys_values(y, positions), strict=True)
            k, v = (self.lib.concatenate(parts, axis=1) for parts in both)
            y = layer.attention(y, positions, k, v, self.visible(i, len(features_SF), anchors))
            x = x + self.mixed(attention, 1, u, y)
            u = layer.normed("post_attention_layernorm", x)
            x = x + self.mixed(mlp, 1, u, layer.mlp(self.mixed(mlp, 0, u, u)))
        return self.normed("norm", x).reshape(len(anchors), size, -1)

    def head(self, hidden_NE):
        """Logits ``[N, V]`` by the target's head or the drafter's own; minus infinity for unknown tokens."""
        own, cap = self.weights.get("lm_head.weight"), self.config["final_logit_softcapping"]
        logits = self.target.head(hidden_NE) if own is None else hidden_NE @ own.T
        if own is None and self.known is not None:
            logits = logits[:, self.known]
        logits = logits * self.config["output_multiplier"]
        return self.spread(logits if cap is None else cap * self.lib.tanh(logits / cap), -math.inf)

    def spread(self, values_K, other: float = 0.0, ids: list[int] | None = None):
        """``[.., V]``: the values ``[.., K]`` of ``ids``, by default the known tokens, and ``other`` for the rest."""
        ids = self.known if ids is None else ids
        if ids is None:
            return values_K
        row = self.lib.full((*values_K.shape[:-1], self.config["vocab_size"]), other, dtype=self.lib.float64)
        row[..., ids] = values_K
        return row

    def drafts(self, features_SF: np.ndarray, anchor: int, tokens: Sequence[int] | None = None) -> Block:
        """The block after all of ``features_SF``, which begins with the token ``anchor``, as :meth:`walk` has it."""
        return self.walk(self.hidden(features_SF, [len(features_SF)], [anchor])[0], anchor, tokens)

    def walk(self, hidden_LE, anchor: int, tokens: Sequence[int] | None = None) -> Block:
        """A block's drafts from left to right, each the best one, or with ``tokens`` in the place of these choices."""
        hidden_NE = hidden_LE[0 if self.config["sample_from_anchor"] else 1 :]
        block, before, state = Block(), anchor, None
        for hidden_E, base_V in zip(hidden_NE, self.head(hidden_NE), strict=True):
            block.base.append(base_V)
            logits_V, state = self.corrected(block, hidden_E, before, state)
            block.logits.append(logits_V)
            before = int(np.array(logits_V).argmax()) if tokens is None else tokens[len(block.tokens)]
            block.tokens.append(before)
        return block

    def corrected(self, block: Block, hidden_E, before: int, state: Any) -> tuple[Any, Any]:
        """The logits ``[V]`` of the draft after ``before`` by ``block.base[-1]``, and the state for the next one."""
        return block.base[-1], state

    def logits(self, features_SF: np.ndarray, anchor: int) -> np.ndarray:
        """Rows ``[N, V]`` of the best drafts."""
        return np.stack(self.drafts(features_SF, anchor).logits)


@dataclass
class Decoded:
    """The result of a decoding run; ``lead`` is the smallest lead of any choice over its runner-up."""

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    lead: float = math.inf

    def sample_target(self, logits_LV: np.ndarray) -> list[int]:
        best = np.sort(logits_LV, axis=-1)[:, -2:]
        self.lead = min(self.lead, float((best[:, 1] - best[:, 0]).min()))
        return logits_LV.argmax(axis=-1).tolist()


def decode(
    target: DenseTarget, drafter: DenseDrafter, prompt: Sequence[int], max_tokens: int, block_size: int
) -> Decoded:
    """Greedy speculative decoding that recomputes everything for every block; ``tokens`` exclude the prompt."""
    run = Decoded([])
    run.tokens += run.sample_target(target(prompt)[0][-1:])
    while len(run.tokens) < max_tokens:
        committed = [*prompt, *run.tokens]
        outputs = target(committed[:-1])[1]
        features = np.concatenate([outputs[i] for i in drafter.config["target_layer_ids"]], axis=-1)
        length = min(block_size, max_tokens - len(run.tokens)) - 1
        drafts = run.sample_target(drafter.logits(features, committed[-1])[:length]) if length else []
        target_tokens = run.sample_target(target(committed + drafts)[0][len(committed) - 1 :])
        n = 0
        while n < length and drafts[n] == target_tokens[n]:
            n += 1
        run.tokens += target_tokens[: n + 1]
        run.accepted.append(n + 1)
    return run
