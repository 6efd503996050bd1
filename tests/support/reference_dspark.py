"""An independent DSpark from the published formulas alone: dense, float64, NumPy only.

It reads published weight names and shares no code with the package; the layers are those of :mod:`.reference`.

Shapes: N drafts, E hidden size, R rank, V vocabulary.
"""

from dataclasses import dataclass, field

import numpy as np

from .reference import DenseDrafter


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@dataclass
class Drafted:
    """Tokens, their logits ``[N, V]`` with the bias, and confidences ``[N]``."""

    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)


class DenseDSpark(DenseDrafter):
    """A drafter with both heads."""

    def drafts(self, features_SF: np.ndarray, anchor: int, tokens: list[int] | None = None) -> Drafted:
        """The block's drafts, greedily, or with ``tokens`` in the place of its choices."""
        config, w = self.config, self.weights
        hidden = self.hidden(features_SF, anchor)[0 if config["sample_from_anchor"] else 1 :]
        run, before, state = Drafted(), anchor, np.zeros(config["markov_rank"])
        for k, h in enumerate(hidden):
            e = w["markov_head.markov_w1.weight"][before] if config["markov_rank"] else np.zeros(0)
            logits = self.head(h[None])[0]
            if config["markov_rank"]:
                latent, state = self.latent(h, e, state)
                ids = slice(None) if self.known is None else self.known
                logits[ids] += w["markov_head.markov_w2.weight"] @ latent
            run.logits.append(logits)
            if config["enable_confidence_head"]:
                read = np.concatenate([h, e]) if config["confidence_head_with_markov"] else h
                z = w["confidence_head.proj.weight"][0] @ read + w["confidence_head.proj.bias"][0]
                temperatures = config.get("confidence_temperatures") or np.ones(len(hidden))
                run.confidence.append(float(sigmoid(z / temperatures[k])))
            before = int(logits.argmax()) if tokens is None else tokens[k]
            run.tokens.append(before)
        return run

    def latent(self, h: np.ndarray, e: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kind = self.config["markov_head_type"]
        if kind == "vanilla":
            return e, s
        name = {"gated": "gate_proj", "rnn": "joint_proj"}[kind]
        matrix, bias = (self.weights[f"markov_head.{name}.{part}"] for part in ("weight", "bias"))
        if kind == "gated":
            return sigmoid(matrix @ np.concatenate([h, e]) + bias) * e, s
        gate, candidate, out = np.split(matrix @ np.concatenate([s, e, h]) + bias, 3)
        return np.tanh(out), sigmoid(gate) * s + (1 - sigmoid(gate)) * np.tanh(candidate)

    def logits(self, features_SF: np.ndarray, anchor: int) -> np.ndarray:
        """Rows ``[N, V]`` of the greedy walk: the best of each is its draft."""
        return np.stack(self.drafts(features_SF, anchor).logits)
