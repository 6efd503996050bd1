"""An independent DFlash from the formulas alone: dense, slow, float64, NumPy only.

It reads published weight names and shares no code with the package: no caches, no chunks, no MLX. Every block starts
from token ids and computes everything again.

Shapes: L length, S context length, H query heads, K key-value heads, D head size, E hidden size,
F feature size, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Weights = Mapping[str, np.ndarray]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
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


def rope(x_LD: np.ndarray, positions: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Rotate the pairs ``(x[i], x[i + D/2])``, the layout of published checkpoints."""
    angles = positions[:, None] * inverse[None]
    first, second = np.split(x_LD, 2, axis=-1)
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)], axis=-1
    )


def attend(q_LD: np.ndarray, k_SD: np.ndarray, v_SD: np.ndarray, visible_LS: np.ndarray) -> np.ndarray:
    scores = np.where(visible_LS, q_LD @ k_SD.T / math.sqrt(q_LD.shape[-1]), -np.inf)
    return softmax(scores) @ v_SD


@dataclass
class Layer:
    """One pre-norm layer by its published names under ``prefix``."""

    weights: Weights
    prefix: str
    heads: int
    kv_heads: int
    eps: float
    inverse: np.ndarray

    def matrix(self, name: str) -> np.ndarray:
        return self.weights[f"{self.prefix}.{name}.weight"]

    def bias(self, name: str) -> np.ndarray | float:
        return self.weights.get(f"{self.prefix}.self_attn.{name}_proj.bias", 0.0)

    def normed(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self.matrix(name), self.eps)

    def project(self, name: str, x_LE: np.ndarray, heads: int) -> np.ndarray:
        """``[heads, L, D]``."""
        y = x_LE @ self.matrix(f"self_attn.{name}_proj").T + self.bias(name)
        return np.stack(np.split(y, heads, axis=-1))

    def queries(self, y_LE: np.ndarray, positions: np.ndarray) -> np.ndarray:
        q = self.normed("self_attn.q_norm", self.project("q", y_LE, self.heads))
        return np.stack([rope(head, positions, self.inverse) for head in q])

    def keys_values(self, y_LE: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k = self.normed("self_attn.k_norm", self.project("k", y_LE, self.kv_heads))
        return np.stack([rope(head, positions, self.inverse) for head in k]), self.project("v", y_LE, self.kv_heads)

    def attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, visible_LS: np.ndarray) -> np.ndarray:
        group = self.heads // self.kv_heads  # consecutive query heads share one key-value head
        out = [attend(q[h], k[h // group], v[h // group], visible_LS) for h in range(self.heads)]
        return np.concatenate(out, axis=-1) @ self.matrix("self_attn.o_proj").T + self.bias("o")

    def mlp(self, y: np.ndarray) -> np.ndarray:
        gate, up = y @ self.matrix("mlp.gate_proj").T, y @ self.matrix("mlp.up_proj").T
        return (silu(gate) * up) @ self.matrix("mlp.down_proj").T


class DenseTarget:
    """A dense Qwen3 by its published weight names; ``config`` is its ``config.json`` as a dict."""

    def __init__(self, weights: Weights, config: Mapping):
        self.weights, self.config, self.eps = weights, config, config["rms_norm_eps"]
        inverse = inverse_frequencies(config["head_dim"], config["rope_theta"], config.get("rope_scaling"))
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.layers = [
            Layer(weights, f"model.layers.{i}", heads, kv_heads, self.eps, inverse)
            for i in range(config["num_hidden_layers"])
        ]

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        return self.weights["model.embed_tokens.weight"][list(tokens)]

    def head(self, hidden: np.ndarray) -> np.ndarray:
        return hidden @ self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"]).T

    def __call__(self, tokens: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits ``[L, V]`` and the output ``[L, E]`` of every layer."""
        x, positions, outputs = self.embed(tokens), np.arange(len(tokens)), []
        visible = positions[None] <= positions[:, None]
        for layer in self.layers:
            y = layer.normed("input_layernorm", x)
            x = x + layer.attention(layer.queries(y, positions), *layer.keys_values(y, positions), visible)
            x = x + layer.mlp(layer.normed("post_attention_layernorm", x))
            outputs.append(x)
        return self.head(rms_norm(x, self.weights["model.norm.weight"], self.eps)), outputs


class DenseDrafter:
    """A DFlash drafter; ``config`` is its published ``config.json`` as a flat dict.

    ``known`` are the target's ids of a reduced vocabulary, in the drafter's order.
    """

    known: list[int] | None = None

    def __init__(self, weights: Weights, config: Mapping, target: DenseTarget):
        self.weights, self.config, self.target, self.eps = weights, config, target, config["rms_norm_eps"]
        inverse = inverse_frequencies(config["head_dim"], config["rope_theta"], config.get("rope_scaling"))
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.layers = [
            Layer(weights, f"layers.{i}", heads, kv_heads, self.eps, inverse)
            for i in range(config["num_hidden_layers"])
        ]

    def visible(self, layer: int, context: int) -> np.ndarray:
        """``[block, context + block]``, spelled out one query and one key at a time."""
        config, size = self.config, self.config["block_size"]
        sliding = config["layer_types"][layer] == "sliding_attention"
        causal = sliding if config["is_causal"] is None else config["is_causal"]
        visible = np.zeros((size, context + size), bool)
        for i in range(size):
            t = context + i
            for s in range(context + size):
                if s < context:
                    visible[i, s] = not sliding or s > t - config["sliding_window"]
                else:
                    visible[i, s] = not causal or s <= t
        return visible

    def context(self, layer: int, features_SF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the context in one layer."""
        hidden = rms_norm(features_SF @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"], self.eps)
        return self.layers[layer].keys_values(hidden, np.arange(len(features_SF)))

    def mixed(self, sublayer: str, side: int, u_LE: np.ndarray, x_LE: np.ndarray) -> np.ndarray:
        """``x_LE`` before (``side`` 0) or after a sublayer with the input ``u_LE``: DFlash 2 mixes rows here."""
        return x_LE

    def hidden(self, features_SF: np.ndarray, anchor: int) -> np.ndarray:
        """Final hidden states ``[block_size, E]`` of the block at ``anchor``."""
        config, size, context = self.config, self.config["block_size"], len(features_SF)
        positions = np.arange(context, context + size)
        x = self.target.embed([anchor] + [config["mask_token_id"]] * (size - 1)) * config["input_embedding_scale"]
        for i, layer in enumerate(self.layers):
            attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
            u = layer.normed("input_layernorm", x)
            y = self.mixed(attention, 0, u, u)
            context_k, context_v = self.context(i, features_SF)
            block_k, block_v = layer.keys_values(y, positions)
            k, v = np.concatenate([context_k, block_k], axis=1), np.concatenate([context_v, block_v], axis=1)
            y = layer.attention(layer.queries(y, positions), k, v, self.visible(i, context))
            x = x + self.mixed(attention, 1, u, y)
            u = layer.normed("post_attention_layernorm", x)
            x = x + self.mixed(mlp, 1, u, layer.mlp(self.mixed(mlp, 0, u, u)))
        return rms_norm(x, self.weights["norm.weight"], self.eps)

    def head(self, hidden_NE: np.ndarray) -> np.ndarray:
        """Logits ``[N, V]`` by the target's head or the drafter's own; minus infinity for unknown tokens."""
        config = self.config
        ids = list(range(config["vocab_size"])) if self.known is None else self.known
        own = self.weights.get("lm_head.weight")
        known = self.target.head(hidden_NE)[:, ids] if own is None else hidden_NE @ own.T
        known, cap = known * config["output_multiplier"], config["final_logit_softcapping"]
        logits = np.full((len(hidden_NE), config["vocab_size"]), -np.inf)
        logits[:, ids] = known if cap is None else cap * np.tanh(known / cap)
        return logits

    def logits(self, features_SF: np.ndarray, anchor: int) -> np.ndarray:
        """``[block_size - 1, V]``: row ``i`` predicts the token ``i + 1`` places after the anchor."""
        return self.head(self.hidden(features_SF, anchor)[1:])


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
