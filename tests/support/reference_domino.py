"""An independent Domino from the published formulas alone: dense, float64, NumPy only.

It reads published weight names and shares no code with the package; the layers are those of :mod:`.reference`.

Shapes: N drafts, E hidden size, R size of the state, V vocabulary.
"""

import numpy as np

from .reference import DenseDrafter, Weights, silu
from .reference_dspark import Drafted, sigmoid


def gru(w: Weights, x_E: np.ndarray, state_R: np.ndarray) -> np.ndarray:
    """The next state; each matrix holds the rows of the reset gate, the update gate and the new state."""
    x, s = w["prefix_gru.weight_ih_l0"] @ x_E, w["prefix_gru.weight_hh_l0"] @ state_R
    size = len(state_R)
    reset, update = sigmoid(x[:size] + s[:size]), sigmoid(x[size : 2 * size] + s[size : 2 * size])
    return (1 - update) * np.tanh(x[2 * size :] + reset * s[2 * size :]) + update * state_R


class DenseDomino(DenseDrafter):
    """A drafter whose logits a state of the block's tokens corrects."""

    def drafts(self, features_SF: np.ndarray, anchor: int, tokens: list[int] | None = None) -> Drafted:
        """The block's drafts, greedily, or with ``tokens`` in the place of its choices."""
        config, w = self.config, self.weights
        hidden = self.hidden(features_SF, anchor)
        first = 0 if config["sample_from_anchor"] else 1
        correct_from = config["pure_draft_prefix_len"] + first  # a place in the block
        run, block, state = Drafted(), [anchor], np.zeros(config["gru_hidden_dim"])
        for place in range(first, len(hidden)):
            logits = self.head(hidden[place][None])[0]
            state = gru(w, self.target.embed(block[-1:])[0] * config["input_embedding_scale"], state)
            if place >= correct_from:
                latent = silu(w["embed_proj.0.weight"] @ np.concatenate([hidden[place], state]))
                logits[slice(None) if self.known is None else self.known] += w["embed_proj.2.weight"] @ latent
            run.logits.append(logits)
            block.append(int(logits.argmax()) if tokens is None else tokens[place - first])
        run.tokens = block[1:]
        return run

    def logits(self, features_SF: np.ndarray, anchor: int) -> np.ndarray:
        """Rows ``[N, V]`` of the greedy walk: the best of each is its draft."""
        return np.stack(self.drafts(features_SF, anchor).logits)
