"""DFlash 2 once more, from the formulas alone: dense, float64, NumPy only.

Knows published weight names; shares no code with the package. Attention and norms are those of :mod:`.reference`.
Convolutions are spelled out one row, tap and channel group at a time, the selector's walk one candidate at a time.

Shapes: L block positions, S context length, E hidden size, F feature size, N drafts, K candidates, V vocabulary.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from .reference import DenseDrafter, Layer, rms_norm, silu


@dataclass
class Path:
    """What the walk chose: tokens, and of each position the candidates and their scores."""

    tokens: list[int] = field(default_factory=list)
    candidates: list[list[int]] = field(default_factory=list)
    scores: list[np.ndarray] = field(default_factory=list)


class DenseDFlash2(DenseDrafter):
    """A DFlash 2 drafter; ``known`` are the target's ids of a reduced vocabulary."""

    known: list[int] | None = None

    def convolve(self, name: str, side: int, u_LE: np.ndarray, x_LE: np.ndarray) -> np.ndarray:
        base, taps = self.weights[f"{name}.base_kernel"], self.config["conv_kernel_size"]
        group = self.config["conv_group_size"]
        groups = x_LE.shape[1] // group
        projected = u_LE @ self.weights[f"{name}.kernel_projection.weight"].T
        out = np.zeros_like(x_LE)
        for i in range(len(x_LE)):
            for t in range(min(taps, i + 1)):
                for g in range(groups):
                    dynamic = projected[i, (side * taps + t) * groups + g]
                    channels = slice(g * group, (g + 1) * group)
                    out[i, channels] += (base[side, t, channels] + dynamic) * x_LE[i - t, channels]
        return out

    def mlp(self, layer: Layer, u: np.ndarray) -> np.ndarray:
        gate, up = u @ layer.matrix("mlp.gate_proj").T, u @ layer.matrix("mlp.up_proj").T
        return (silu(gate) * up) @ layer.matrix("mlp.down_proj").T

    def hidden(self, features_SF: np.ndarray, anchor: int) -> np.ndarray:
        config, size, context = self.config, self.config["block_size"], len(features_SF)
        hidden = rms_norm(features_SF @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"], self.eps)
        before, positions = np.arange(context), np.arange(context, context + size)
        x = self.target.embed([anchor] + [config["mask_token_id"]] * (size - 1)) * config["input_embedding_scale"]
        for i, layer in enumerate(self.layers):
            attention_conv, mlp_conv = f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"
            u = layer.normed("input_layernorm", x)
            y = self.convolve(attention_conv, 0, u, u)
            context_k, context_v = layer.keys_values(hidden, before)
            block_k, block_v = layer.keys_values(y, positions)
            k, v = np.concatenate([context_k, block_k], axis=1), np.concatenate([context_v, block_v], axis=1)
            y = layer.attention(layer.queries(y, positions), k, v, self.visible(i, context))
            x = x + self.convolve(attention_conv, 1, u, y)
            u = layer.normed("post_attention_layernorm", x)
            x = x + self.convolve(mlp_conv, 1, u, self.mlp(layer, self.convolve(mlp_conv, 0, u, u)))
        return rms_norm(x, self.weights["norm.weight"], self.eps)

    def walk(self, features_SF: np.ndarray, anchor: int, tokens: list[int] | None = None) -> Path:
        """The best path from left to right, or with ``tokens`` in the place of its choices."""
        config, path = self.config, Path()
        unary = self.unary(features_SF, anchor)
        a, b, p = (
            self.weights[f"candidate_selector.{name}"]
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        )
        previous, hidden = anchor, self.hidden(features_SF, anchor)[1:]
        ids = range(config["vocab_size"]) if self.known is None else self.known
        ids = [c for c in ids if c < (config["selector_vocab_size"] or math.inf)]
        for k in range(len(hidden)):
            best = sorted(ids, key=lambda c, k=k: -unary[k, c])[: config["selector_top_k"]]
            scores = np.array([unary[k, c] + sum(a[previous] * (p @ hidden[k]) * b[c]) for c in best])
            previous = best[int(scores.argmax())] if tokens is None else tokens[k]
            path.tokens.append(previous)
            path.candidates.append(best)
            path.scores.append(scores)
        return path

    def unary(self, features_SF: np.ndarray, anchor: int) -> np.ndarray:
        """The head's logits ``[N, V]``, before the selector."""
        return super().logits(features_SF, anchor)

    def logits(self, features_SF: np.ndarray, anchor: int) -> np.ndarray:
        """``[N, V]``: scores along the best path, minus infinity for what is no candidate there."""
        path = self.walk(features_SF, anchor)
        logits = np.full((len(path.tokens), self.config["vocab_size"]), -np.inf)
        for row, candidates, scores in zip(logits, path.candidates, path.scores, strict=True):
            row[candidates] = scores
        return logits
