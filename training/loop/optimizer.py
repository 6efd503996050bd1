"""Two optimisers: AdamW as published for DFlash, and Muon with AdamW for the rest.

Muon (Jordan et al. 2024) orthogonalises each momentum matrix by a few Newton-Schulz steps. The size of the update then
does not depend on the gradient's, so with small batches the learning rate alone sets how much noise the weights keep.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.optimizers as optim

from dflash.core.files import flat, nested

from ...core.settings import Checked, setting

Schedule = Callable[[mx.array], mx.array]
"""Maps the number of finished steps to the learning rate of the next one."""


def rise(peak: float, warmup_steps: int) -> Schedule:
    """Linear warm-up: ``peak / (warmup_steps + 1)`` at first, ``peak`` from step ``warmup_steps`` on."""
    climb = optim.linear_schedule(0.0, peak, warmup_steps + 1)
    return lambda step: climb(step + 1)


def warmup_cosine(peak: float, warmup_steps: int, steps: int) -> Schedule:
    """Linear warm-up, then a cosine that would reach 0 at ``steps``."""
    cosine = optim.cosine_decay(peak, max(1, steps - warmup_steps))
    return optim.join_schedules([rise(peak, warmup_steps), cosine], [warmup_steps])


def warmup_stable_decay(peak: float, warmup_steps: int, decay_steps: int, steps: int) -> Schedule:
    """The WSD schedule: linear warm-up, flat, and in the last ``decay_steps`` a line that would reach 0 at ``steps``.

    If the slopes overlap there is no flat part, and ``peak`` is never reached.
    """
    up, down = rise(peak, warmup_steps), optim.linear_schedule(0.0, peak, decay_steps + 1)
    return lambda step: mx.minimum(up(step), down(steps - step))


@dataclass(frozen=True, kw_only=True)
class AdamWSettings(Checked):
    """AdamW for everything; the defaults are those published for DFlash drafters."""

    kind: Literal["adamw"] = setting("adamw", "AdamW with a linear warm-up and a cosine to 0")
    learning_rate: float = setting(6e-4, "peak of the learning rate", above=0)
    weight_decay: float = setting(0.01, "decoupled weight decay", at_least=0)
    warmup: float = setting(0.04, "the part of all steps in which the learning rate rises", at_least=0, below=1)
    clip: float = setting(1.0, "gradients of a greater norm are scaled down to it", above=0)

    def build(self, steps: int) -> optim.Optimizer:
        """The optimiser with its schedule over ``steps``."""
        rate = warmup_cosine(self.learning_rate, math.ceil(self.warmup * steps), steps)
        return optim.AdamW(learning_rate=rate, weight_decay=self.weight_decay, bias_correction=True)

    def decay_begins(self, steps: int) -> int:
        """The step from which the schedule depends on ``steps``: the first."""
        return 0

    def warning(self, steps: int) -> str | None:
        """A likely mistake in these settings for a run of ``steps``: none."""
        return None


@dataclass(frozen=True, kw_only=True)
class MuonSettings(Checked):
    """Muon for the matrices inside the network, AdamW for everything else, both with a WSD schedule.

    After ``fast_steps`` (if set) both rates are multiplied by ``settled``: the peak rate makes fast progress at first,
    but its noise hides finer improvements. Thanks to the flat middle a run can be extended without repeating its start.
    """

    kind: Literal["muon"] = setting("muon", "Muon for inner matrices, AdamW for the rest; WSD schedule")
    matrix_learning_rate: float = setting(0.02, "peak of Muon's learning rate", above=0)
    learning_rate: float = setting(3e-3, "peak of AdamW's learning rate", above=0)
    weight_decay: float = setting(0.0, "decoupled weight decay of AdamW's part", at_least=0)
    warmup_steps: int = setting(20, "steps in which the learning rates rise", at_least=0)
    decay_steps: int = setting(200, "last steps, in which the learning rates fall to 0", at_least=0)
    fast_steps: int | None = setting(None, "steps after which both rates are multiplied by settled", at_least=0)
    settled: float = setting(1.0, "factor of both rates after fast_steps", above=0)
    clip: float = setting(1.0, "gradients of a greater norm are scaled down to it", above=0)

    def build(self, steps: int) -> optim.Optimizer:
        """Both optimisers with their schedules over ``steps``."""
        matrices = optim.Muon(
            learning_rate=self._schedule(self.matrix_learning_rate, steps), momentum=0.95, weight_decay=0.0
        )
        others = optim.AdamW(
            learning_rate=self._schedule(self.learning_rate, steps), betas=[0.9, 0.98], weight_decay=self.weight_decay
        )
        return optim.MultiOptimizer([matrices, others], [is_inner_matrix])

    def _schedule(self, peak: float, steps: int) -> Schedule:
        wsd = warmup_stable_decay(peak, self.warmup_steps, self.decay_steps, steps)
        if self.fast_steps is None:
            return wsd
        fast, settled = self.fast_steps, self.settled
        return lambda step: mx.where(step < fast, 1.0, settled) * wsd(step)

    def decay_begins(self, steps: int) -> int:
        """The step from which the schedule depends on ``steps``; until then a longer run makes the same steps."""
        return max(0, steps - self.decay_steps)

    def warning(self, steps: int) -> str | None:
        """A likely mistake in these settings for a run of ``steps``, if there is one."""
        if self.warmup_steps + self.decay_steps <= steps:
            return None
        return (
            f"optimizer.warmup_steps {self.warmup_steps} and optimizer.decay_steps {self.decay_steps} are more than "
            f"the {steps} steps of this run, so the learning rate never reaches its peak. Lower them, or train longer."
        )


OptimizerSettings = AdamWSettings | MuonSettings
"""In a recipe, ``kind`` says which."""


_TABLES = ("embed", "lm_head", "markov_w", "codebook", "confidence_head", "fusion_weights")


def is_inner_matrix(name: str, value: mx.array) -> bool:
    """Whether a parameter is a matrix inside the network, not a token table, a head or a norm."""
    return value.ndim == 2 and not any(part in name for part in _TABLES)


class Optimizer:
    """An optimiser over ``steps`` whose whole state is a flat dict of arrays."""

    def __init__(self, parameters: dict[str, Any], settings: OptimizerSettings, steps: int):
        self.settings = settings
        self.inner = settings.build(steps)
        self.inner.init(parameters)

    def update(self, parameters: dict[str, Any], gradients: dict[str, Any]) -> tuple[Any, mx.array]:
        """New parameters after one step, and the norm of the gradients before clipping."""
        clipped, norm = optim.clip_grad_norm(gradients, self.settings.clip)
        return self.inner.apply_gradients(clipped, parameters), norm

    def learning_rates(self) -> dict[str, float]:
        """The learning rates of the last step, by their names in the settings."""
        if isinstance(self.inner, optim.MultiOptimizer):
            matrices, others = self.inner.optimizers
            return {
                "learning_rate": float(others.learning_rate),
                "matrix_learning_rate": float(matrices.learning_rate),
            }
        return {"learning_rate": float(self.inner.learning_rate)}

    @property
    def state(self) -> dict[str, mx.array]:
        """Every array of the optimiser by a flat name."""
        return flat(self.inner.state)

    @state.setter
    def state(self, arrays: dict[str, mx.array]) -> None:
        self.inner.state = nested(arrays)
