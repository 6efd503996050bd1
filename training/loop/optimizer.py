"""Two ways to turn gradients into new weights: AdamW as published for DFlash, and Muon beside AdamW.

Knows parameters by their names and shapes, and how each way's learning rate runs over the steps. Must not
know losses or data.

Muon (Jordan et al. 2024) orthogonalises each momentum matrix by a few Newton-Schulz steps. The update then
has the same size whatever the gradient's, so with small batches the learning rate alone sets how much noise
stays in the weights: on batches of 4,000 tokens the target stopped improving at 0.02 and went on at 0.005.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.optimizers as optim

from dflash.files import flat, nested

from ..settings import require


@dataclass(frozen=True)
class AdamWSettings:
    """AdamW for everything; the defaults are those published for DFlash drafters.

    ``warmup`` is the share of all steps in which the learning rate rises to its peak; a cosine to 0 follows.
    """

    kind: Literal["adamw"] = "adamw"
    learning_rate: float = 6e-4
    weight_decay: float = 0.01
    warmup: float = 0.04
    clip: float = 1.0

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, f"learning_rate must be above 0, got {self.learning_rate}.")
        require(self.weight_decay >= 0, f"weight_decay must be at least 0, got {self.weight_decay}.")
        require(0 <= self.warmup < 1, f"warmup is a share of all steps, from 0 to below 1, got {self.warmup}.")
        require(self.clip > 0, f"clip must be above 0, got {self.clip}.")

    def lr_scale(self, step: int, steps: int) -> float:
        """Share of the peak learning rate at ``step`` of ``steps``."""
        warmup = math.ceil(self.warmup * steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    def build(self) -> optim.Optimizer:
        """The optimiser at its peak learning rate."""
        return optim.AdamW(self.learning_rate, weight_decay=self.weight_decay, bias_correction=True)

    def set_lr_scale(self, optimizer: Any, lr_scale: float) -> None:
        """Let the next update run at ``lr_scale`` of the peak learning rate."""
        optimizer.learning_rate = self.learning_rate * lr_scale


@dataclass(frozen=True)
class MuonSettings:
    """Muon for the matrices inside the network, AdamW for everything else.

    Learning rates are peaks: a linear warm-up of ``warmup_steps``, then flat, then ``decay_steps`` down to 0.
    After ``fast_steps`` (if any) the flat part goes on at ``settled`` of the peak: the peak learns the form of
    the answers quickly, but its noise hides what takes finer steps. A flat middle lets a run be made longer
    without doing its beginning again.
    """

    kind: Literal["muon"] = "muon"
    matrix_learning_rate: float = 0.02
    learning_rate: float = 3e-3
    weight_decay: float = 0.0
    warmup_steps: int = 20
    decay_steps: int = 200
    fast_steps: int | None = None
    settled: float = 1.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("matrix_learning_rate", "learning_rate", "settled", "clip"):
            require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}.")
        for name in ("weight_decay", "warmup_steps", "decay_steps"):
            require(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}.")

    def lr_scale(self, step: int, steps: int) -> float:
        """Share of the peak learning rates at ``step`` of ``steps``."""
        up = (step + 1) / (self.warmup_steps + 1)
        down = (steps - step) / (self.decay_steps + 1)
        fast = self.fast_steps is None or step < self.fast_steps
        return (1.0 if fast else self.settled) * min(1.0, up, down)

    def build(self) -> optim.Optimizer:
        """Both optimisers at their peak learning rates."""
        return optim.MultiOptimizer(
            [
                optim.Muon(self.matrix_learning_rate, momentum=0.95, weight_decay=0.0),
                optim.AdamW(self.learning_rate, betas=[0.9, 0.98], weight_decay=self.weight_decay),
            ],
            [is_inner_matrix],
        )

    def set_lr_scale(self, optimizer: Any, lr_scale: float) -> None:
        """Let the next update run at ``lr_scale`` of the peak learning rates."""
        peaks = (self.matrix_learning_rate, self.learning_rate)
        for part, peak in zip(optimizer.optimizers, peaks, strict=True):
            part.learning_rate = peak * lr_scale


OptimizerSettings = AdamWSettings | MuonSettings
"""In a recipe, ``kind`` says which."""


def is_inner_matrix(name: str, value: mx.array) -> bool:
    """Whether a parameter is a matrix inside the network (not an embedding, a head or a norm)."""
    return value.ndim == 2 and not any(part in name for part in ("embed", "lm_head"))


class Optimizer:
    """An optimiser whose whole state is a flat dict of arrays."""

    def __init__(self, parameters: dict[str, Any], settings: OptimizerSettings):
        self.settings = settings
        self.inner = settings.build()
        self.inner.init(parameters)

    def update(self, parameters: dict[str, Any], gradients: dict[str, Any], lr_scale: float) -> tuple[Any, mx.array]:
        """New parameters after one step at ``lr_scale`` of the peak rates, and the norm of the gradients."""
        self.settings.set_lr_scale(self.inner, lr_scale)
        clipped, norm = optim.clip_grad_norm(gradients, self.settings.clip)
        return self.inner.apply_gradients(clipped, parameters), norm

    @property
    def state(self) -> dict[str, mx.array]:
        """Every array of the optimiser by a flat name."""
        return flat(self.inner.state)

    @state.setter
    def state(self, arrays: dict[str, mx.array]) -> None:
        self.inner.state = nested(arrays)
