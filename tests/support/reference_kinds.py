"""The other kinds of drafters from their published formulas alone, on the layers of :mod:`.reference`.

Shapes: L block positions, S context length, E hidden size, F feature size, R rank or size of a state, K candidates,
V vocabulary.
"""

import math
from typing import Any

import numpy as np

from .reference import Block, DenseDrafter, rms_norm, sigmoid, silu, softmax


class DenseDFlash2(DenseDrafter):
    """Convolutions over the rows of a block, and a selector among the best tokens of each position."""

    def mixed(self, sublayer: str, side: int, u_LE, x_LE):
        """Spelled out one row and one tap at a time."""
        size, taps, group = (self.config[name] for name in ("block_size", "conv_kernel_size", "conv_group_size"))
        base = self.weights[f"{sublayer}_conv.base_kernel"][side]
        projected = u_LE @ self.weights[f"{sublayer}_conv.kernel_projection.weight"].T
        dynamic = projected.reshape(len(u_LE), 2, taps, -1)[:, side]
        rows = []
        for i in range(len(x_LE)):
            kernels = [base[t] + self.lib.repeat(dynamic[i, t], group, axis=0) for t in range(min(taps, i % size + 1))]
            rows.append(sum(kernel * x_LE[i - t] for t, kernel in enumerate(kernels)))
        return self.lib.stack(rows)

    def corrected(self, block: Block, hidden_E, before: int, state: Any) -> tuple[Any, Any]:
        a, b, p = (
            self.weights[f"candidate_selector.{name}"]
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        )
        unary, most = np.array(block.base[-1]), self.config["selector_vocab_size"] or math.inf
        ids = range(self.config["vocab_size"]) if self.known is None else self.known
        best = sorted((c for c in ids if c < most), key=lambda c: -unary[c])[: self.config["selector_top_k"]]
        factor_R = a[before] * (p @ hidden_E)
        scores_K = self.lib.stack([block.base[-1][c] + (factor_R * b[c]).sum() for c in best])
        block.candidates.append(best)
        block.scores.append(scores_K)
        return self.spread(scores_K, -math.inf, best), state


class DenseDSpark(DenseDrafter):
    """A bias from the token before, and the confidence in each draft."""

    def corrected(self, block: Block, hidden_E, before: int, state: Any) -> tuple[Any, Any]:
        config, w, logits_V, read = self.config, self.weights, block.base[-1], [hidden_E]
        if config["markov_rank"]:
            e = w["markov_head.markov_w1.weight"][before]
            latent, state = self.latent(hidden_E, e, 0 * e if state is None else state)
            logits_V = logits_V + self.spread(w["markov_head.markov_w2.weight"] @ latent)
            read += [e] * config["confidence_head_with_markov"]
        if config["enable_confidence_head"]:
            z = w["confidence_head.proj.weight"][0] @ self.lib.concatenate(read) + w["confidence_head.proj.bias"][0]
            temperatures = config["confidence_temperatures"]
            block.confidence.append(sigmoid(z / (temperatures[len(block.tokens)] if temperatures else 1.0)))
        return logits_V, state

    def latent(self, h, e, s) -> tuple[Any, Any]:
        kind = self.config["markov_head_type"]
        if kind == "vanilla":
            return e, s
        name = {"gated": "gate_proj", "rnn": "joint_proj"}[kind]
        matrix, bias = (self.weights[f"markov_head.{name}.{part}"] for part in ("weight", "bias"))
        if kind == "gated":
            return sigmoid(matrix @ self.lib.concatenate([h, e]) + bias) * e, s
        gate, candidate, out = self.lib.split(matrix @ self.lib.concatenate([s, e, h]) + bias, 3)
        return self.lib.tanh(out), sigmoid(gate) * s + (1 - sigmoid(gate)) * self.lib.tanh(candidate)


class DenseDomino(DenseDrafter):
    """A correction from a recurrent state, which reads the block's tokens."""

    def corrected(self, block: Block, hidden_E, before: int, state: Any) -> tuple[Any, Any]:
        config, w = self.config, self.weights
        state = np.zeros(config["gru_hidden_dim"]) if state is None else state
        x = w["prefix_gru.weight_ih_l0"] @ (self.target.embed([before])[0] * config["input_embedding_scale"])
        s = w["prefix_gru.weight_hh_l0"] @ self.lib.array(state, dtype=self.lib.float64)
        (x_reset, x_update, x_new), (s_reset, s_update, s_new) = (self.lib.split(y, 3) for y in (x, s))
        update = sigmoid(x_update + s_update)
        state = (1 - update) * self.lib.tanh(x_new + sigmoid(x_reset + s_reset) * s_new) + update * state
        if len(block.tokens) < config["pure_draft_prefix_len"]:
            return block.base[-1], state
        latent = silu(w["embed_proj.0.weight"] @ self.lib.concatenate([hidden_E, state]))
        return block.base[-1] + self.spread(w["embed_proj.2.weight"] @ latent), state


class DenseDFlare(DenseDrafter):
    """Every layer's context: its own mean of the taps, and its own projections."""

    def context(self, layer: int, features_SF):
        taps_STE = features_SF.reshape(len(features_SF), -1, self.config["hidden_size"])
        weights_T = softmax(self.weights["layer_fusion_weights"][layer])
        fused = sum(weights_T[t] * taps_STE[:, t] for t in range(taps_STE.shape[1]))
        hidden = rms_norm(fused, self.weights["hidden_norm.weight"], self.config["rms_norm_eps"])
        return self.layers[layer].keys_values(hidden, np.arange(len(features_SF)), "_target")


DENSE: dict[str, type[DenseDrafter]] = {
    "dflash": DenseDrafter,
    "dflash2": DenseDFlash2,
    "dspark": DenseDSpark,
    "domino": DenseDomino,
    "dflare": DenseDFlare,
}
