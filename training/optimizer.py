"""The optimiser of both trainings: Muon for the matrices inside the network, AdamW for everything else.

Knows parameters by their names and shapes. Must not know losses or data.

Muon (Jordan et al. 2024) orthogonalises each momentum matrix by a few Newton-Schulz steps. The update then
has the same size whatever the gradient's, so with small batches the learning rate alone sets how much noise
stays in the weights: on batches of 4,000 tokens the target stopped improving at 0.02 and went on at 0.005.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from .arrays import flat, nested


@dataclass(frozen=True)
class OptimizerSettings:
    """Learning rates are peaks: a linear warm-up of ``warmup_steps``, then flat, then ``decay_steps`` down to 0.

    After ``fast_steps`` (if any) the flat part goes on at ``settled`` of the peak: the peak learns the form of
    the answers quickly, but its noise hides what takes finer steps. A flat middle lets a run be made longer
    without doing its beginning again.
    """

    matrix_learning_rate: float = 0.02
    learning_rate: float = 3e-3
    weight_decay: float = 0.0
    warmup_steps: int = 20
    decay_steps: int = 200
    fast_steps: int | None = None
    settled: float = 1.0
    clip: float = 1.0


def schedule(step: int, steps: int, settings: OptimizerSettings) -> float:
    """Share of the peak learning rate at ``step`` of ``steps``."""
    up = (step + 1) / (settings.warmup_steps + 1)
    down = (steps - step) / (settings.decay_steps + 1)
    fast = settings.fast_steps is None or step < settings.fast_steps
    return (1.0 if fast else settings.settled) * min(1.0, up, down)


def is_inner_matrix(name: str, value: mx.array) -> bool:
    """Whether a parameter is a matrix inside the network (not an embedding, a head or a norm)."""
    return value.ndim == 2 and not any(part in name for part in ("embed", "lm_head"))


class Optimizer:
    """Muon and AdamW side by side, their whole state a flat dict of arrays."""

    def __init__(self, parameters: dict[str, Any], settings: OptimizerSettings):
        self.settings = settings
        self.both = optim.MultiOptimizer(
            [
                optim.Muon(settings.matrix_learning_rate, momentum=0.95, weight_decay=0.0),
                optim.AdamW(settings.learning_rate, betas=[0.9, 0.98], weight_decay=settings.weight_decay),
            ],
            [is_inner_matrix],
        )
        self.both.init(parameters)

    def update(self, parameters: dict[str, Any], gradients: dict[str, Any], share: float) -> tuple[Any, mx.array]:
        """New parameters after one step at ``share`` of the peak rates, and the norm of the gradients."""
        peaks = (self.settings.matrix_learning_rate, self.settings.learning_rate)
        for optimizer, peak in zip(self.both.optimizers, peaks, strict=True):
            optimizer.learning_rate = peak * share
        clipped, norm = optim.clip_grad_norm(gradients, self.settings.clip)
        return self.both.apply_gradients(clipped, parameters), norm

    @property
    def state(self) -> dict[str, mx.array]:
        """Every array of both optimisers by a flat name."""
        return flat(self.both.state)

    @state.setter
    def state(self, arrays: dict[str, mx.array]) -> None:
        self.both.state = nested(arrays)
