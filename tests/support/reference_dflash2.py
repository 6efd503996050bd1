"""An independent DFlash 2 from the formulas alone: dense, float64, NumPy only.

It reads published weight names and shares no code with the package; the layers are those of :mod:`.reference`.
Convolutions are spelled out one row, tap and channel group at a time, the selector's walk one candidate at a time.

Shapes: L block positions, S context length, E hidden size, F feature size, N drafts, K candidates, V vocabulary.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from .reference import DenseDrafter


@dataclass
class Path:
    """The chosen tokens, and for each position the candidates and their scores."""

    tokens: list[int] = field(default_factory=list)
    candidates: list[list[int]] = field(default_factory=list)
    scores: list[np.ndarray] = field(default_factory=list)


class DenseDFlash2(DenseDrafter):
    """A DFlash 2 drafter."""

    def mixed(self, sublayer: str, side: int, u_LE: np.ndarray, x_LE: np.ndarray) -> np.ndarray:
        base, taps = self.weights[f"{sublayer}_conv.base_kernel"], self.config["conv_kernel_size"]
        group = self.config["conv_group_size"]
        groups = x_LE.shape[1] // group
        projected = u_LE @ self.weights[f"{sublayer}_conv.kernel_projection.weight"].T
        out = np.zeros_like(x_LE)
        for i in range(len(x_LE)):
            for t in range(min(taps, i + 1)):
                for g in range(groups):
                    dynamic = projected[i, (side * taps + t) * groups + g]
                    channels = slice(g * group, (g + 1) * group)
                    out[i, channels] += (base[side, t, channels] + dynamic) * x_LE[i - t, channels]
        return out

    def walk(self, features_SF: np.ndarray, anchor: int, tokens: list[int] | None = None) -> Path:
        """The best path from left to right, or with ``tokens`` in the place of its choices."""
        config, path = self.config, Path()
        a, b, p = (
            self.weights[f"candidate_selector.{name}"]
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        )
        previous, hidden = anchor, self.hidden(features_SF, anchor)[1:]
        unary = self.head(hidden)
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

    def logits(self, features_SF: np.ndarray, anchor: int) -> np.ndarray:
        """``[N, V]``: scores along the best path, minus infinity for what is no candidate there."""
        path = self.walk(features_SF, anchor)
        logits = np.full((len(path.tokens), self.config["vocab_size"]), -np.inf)
        for row, candidates, scores in zip(logits, path.candidates, path.scores, strict=True):
            row[candidates] = scores
        return logits
