"""What a drafter is trained for: functions from predictions to losses, by name.

Knows logits and tokens. Must not know models, batches or how losses are averaged.

Add one with :func:`register_objective`; recipes choose it as ``objective.kind`` and pass it ``objective.options``.

Shapes: T predictions, V vocabulary.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from dflash.cpu_math import cross_entropy, logsumexp, softmax
from dflash.drafters.trainable import Predictions as Predictions
from dflash.errors import did_you_mean
from dflash.registry import Registry

from ..settings import Checked, SettingsError, setting

CROSS_ENTROPY, KL, MIX = "cross_entropy", "kl", "mix"


Losses = Callable[..., mx.array]
"""``(predictions, **options) -> losses [T]``; differentiable in ``predictions.logits_TV``."""


@dataclass(frozen=True)
class Objective:
    """A registered objective; ``needs_target_logits`` makes training keep the target's final hidden states."""

    losses: Losses
    needs_target_logits: bool = False


OBJECTIVES: Registry[Objective] = Registry("objective", "dflash.objectives")


def register_objective(name: str, *, needs_target_logits: bool = False) -> Callable[[Losses], Losses]:
    """Decorator: recipes choose the decorated function as ``objective.kind: name``.

    The function takes :class:`Predictions` and, by keyword, what the recipe gives as ``objective.options``. It
    returns the loss ``[T]`` of each prediction; their mean under the position weights is what training minimises.
    """

    def register(losses: Losses) -> Losses:
        OBJECTIVES.register(name)(Objective(losses, needs_target_logits))
        return losses

    return register


@register_objective(CROSS_ENTROPY)
def token_cross_entropy(predictions: Predictions) -> mx.array:
    """Cross-entropy on the target's tokens, as published (DFlash, arXiv:2602.06036)."""
    return cross_entropy(predictions.logits_TV, predictions.tokens_T)


@register_objective(KL, needs_target_logits=True)
def forward_kl(predictions: Predictions) -> mx.array:
    """``KL(target || drafter)`` of each prediction."""
    logits_TV, target_logits_TV = predictions.logits_TV, predictions.target_logits_TV
    assert target_logits_TV is not None
    # sum p (log p - log q), where log p = z_p - logsumexp(z_p) and log q likewise, with the sums of p taken out.
    expected = (softmax(target_logits_TV) * (target_logits_TV - logits_TV)).sum(-1)
    return expected - logsumexp(target_logits_TV) + logsumexp(logits_TV)


@register_objective(MIX, needs_target_logits=True)
def mix(predictions: Predictions, kl_weight: float) -> mx.array:
    """``kl_weight`` of the KL divergence and the rest cross-entropy."""
    return kl_weight * forward_kl(predictions) + (1 - kl_weight) * token_cross_entropy(predictions)


@dataclass(frozen=True)
class ObjectiveSettings(Checked):
    """What each prediction is scored by, and how much it counts.

    ``kind`` is ``cross_entropy`` on the target's tokens (as published), ``kl`` (forward KL divergence from the
    target's distribution to the drafter's), ``mix`` (``kl_weight`` of KL and the rest cross-entropy), or the name
    of an objective that a plug-in registers; ``options`` are the plug-in's own. Position ``i`` of a block counts
    ``exp(-(i - 1) / gamma)``. Losses that the drafter's kind adds (:class:`~dflash.drafters.trainable.Trainable`)
    count ``auxiliary_weight``. The logits of ``chunk`` predictions exist at once, or those of one block.

    Raises :class:`~dflash.training.settings.SettingsError` when a value is impossible.
    """

    kind: str = setting(CROSS_ENTROPY, "cross_entropy, kl, mix, or what a plug-in registers")
    kl_weight: float = setting(0.5, "of mix: the weight of KL; cross-entropy has the rest", at_least=0, at_most=1)
    gamma: float = setting(7.0, "position i of a block counts exp(-(i - 1) / gamma)", above=0)
    auxiliary_weight: float = setting(1.0, "weight of the losses that the drafter's kind adds", at_least=0)
    chunk: int = setting(512, "predictions whose logits exist at once, in whole blocks", at_least=1)
    options: dict[str, Any] = setting(meaning="options of a plug-in's objective", factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        objective = OBJECTIVES.find(self.kind)
        if objective is None:
            raise SettingsError(f"kind is {self.kind!r}; {did_you_mean(self.kind, OBJECTIVES.all())}")
        try:
            inspect.signature(objective.losses).bind(None, **self._options)
        except TypeError as error:
            raise SettingsError(f"options do not fit the objective {self.kind!r}: {error}.") from error

    @property
    def _options(self) -> dict[str, Any]:
        return {"kl_weight": self.kl_weight} | self.options if self.kind == MIX else self.options

    @property
    def needs_target_logits(self) -> bool:
        """Whether the objective compares with the target's distribution, not only with its tokens."""
        return OBJECTIVES.get(self.kind).needs_target_logits

    @property
    def losses(self) -> Callable[[Predictions], mx.array]:
        """The loss ``[T]`` of each prediction, with the recipe's options."""
        return partial(OBJECTIVES.get(self.kind).losses, **self._options)
