"""Training objectives: named functions from predictions to losses.

Add one with :func:`register_objective`; recipes choose it as ``objective.kind`` and pass it ``objective.options``.

Shapes: T predictions, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from dflash.core.cpu_math import cross_entropy, logsumexp, softmax
from dflash.core.errors import DFlashError
from dflash.core.parts import check_options
from dflash.core.registry import Registry
from dflash.drafters.trainable import Predictions as Predictions

from ...core.settings import Checked, SettingsError, setting

CROSS_ENTROPY, KL, MIX, D_PACE, L1 = "cross_entropy", "kl", "mix", "d-pace", "l1"
UNTIL_FAIL = "accept-until-fail"


Losses = Callable[..., mx.array]
"""``(predictions, **options) -> losses [T]``; differentiable in ``predictions.logits_TV``."""


@dataclass(frozen=True)
class Objective:
    """A registered objective.

    ``needs_target_logits`` makes training keep the target's final hidden states. An objective that ``weighs_positions``
    replaces the weights by ``gamma``.
    """

    losses: Losses
    needs_target_logits: bool = False
    weighs_positions: bool = False


OBJECTIVES: Registry[Objective] = Registry("objective", "dflash.objectives")


def register_objective(
    name: str, *, needs_target_logits: bool = False, weighs_positions: bool = False
) -> Callable[[Losses], Losses]:
    """Decorator: recipes choose the decorated function as ``objective.kind: name``.

    The function takes :class:`Predictions` and the recipe's ``objective.options`` as keywords, and returns the loss
    ``[T]`` of each prediction. Training minimises their mean under the position weights. With ``weighs_positions``
    these weights are 1, and the function weighs the positions of a block itself.
    """

    def register(losses: Losses) -> Losses:
        OBJECTIVES.register(name)(Objective(losses, needs_target_logits, weighs_positions))
        return losses

    return register


@register_objective(CROSS_ENTROPY)
def token_cross_entropy(predictions: Predictions) -> mx.array:
    """Cross-entropy on the target's tokens, as published (DFlash, arXiv:2602.06036)."""
    return cross_entropy(predictions.logits_TV, predictions.tokens_T)


@register_objective(KL, needs_target_logits=True)
def forward_kl(predictions: Predictions) -> mx.array:
    """``KL(target || drafter)`` of each prediction; over the tokens that the drafter knows (:class:`Predictions`)."""
    logits_TV, target_logits_TV = predictions.logits_TV, predictions.target_logits_TV
    assert target_logits_TV is not None
    # sum p (log p - log q), where log p = z_p - logsumexp(z_p) and log q likewise, with the sums of p taken out.
    expected = (softmax(target_logits_TV) * (target_logits_TV - logits_TV)).sum(-1)
    return expected - logsumexp(target_logits_TV) + logsumexp(logits_TV)


@register_objective(MIX, needs_target_logits=True)
def mix(predictions: Predictions, kl_weight: float) -> mx.array:
    """``kl_weight`` of the KL divergence and the rest cross-entropy."""
    return kl_weight * forward_kl(predictions) + (1 - kl_weight) * token_cross_entropy(predictions)


@register_objective(D_PACE, weighs_positions=True)
def d_pace(predictions: Predictions, alpha: float) -> mx.array:
    """Cross-entropy, each position weighted by the accepted length that depends on it (D-PACE, arXiv:2605.18810).

    With ``q`` the drafter's probability of the true token, softened to ``(1 - alpha) q + alpha``, a block's drafts are
    accepted up to position ``m`` with the product ``P_m`` of the first ``m``. Position ``j`` weighs ``P_j + P_{j+1} +
    ...``, the length that is lost if it alone is wrong. Weights are constants to the gradient, which with ``alpha`` 0
    is that of the expected accepted length.
    """
    losses_T = token_cross_entropy(predictions)
    q_T = mx.exp(-mx.stop_gradient(losses_T))
    if predictions.known_T is not None:
        q_T = q_T * predictions.known_T
    log_q_T = mx.log((1 - alpha) * q_T + alpha)
    # Predictions come as whole blocks, each from position 1 on, so a block is identified by its start.
    rows_T = mx.arange(losses_T.size)
    starts_T = rows_T - predictions.positions_T
    after_TT = (starts_T == starts_T[:, None]) & (rows_T >= rows_T[:, None])  # [j, m]: the same block, m not before j
    prefix_T = mx.exp(mx.where(after_TT, log_q_T[:, None], 0).sum(0))
    return mx.where(after_TT, prefix_T, 0).sum(1) * losses_T


@register_objective(UNTIL_FAIL)
def accept_until_fail(predictions: Predictions) -> mx.array:
    """Cross-entropy up to a block's first wrong draft, that one included, and 0 after it (arXiv:2607.01893).

    Decoding throws away what follows a wrong draft: one whose most likely token is not the target's. The truncation is
    constant to the gradient. What counts keeps its weight by ``gamma``, and the mean is still over all predictions, so
    that a block that fails early has the smaller part in a step.
    """
    right_T = mx.argmax(predictions.logits_TV, axis=-1) == predictions.tokens_T
    if predictions.known_T is not None:
        right_T = right_T & predictions.known_T
    wrong_T = mx.logical_not(right_T).astype(mx.int32)
    failures_T = mx.cumsum(wrong_T) - wrong_T  # before each prediction, those of earlier blocks included
    starts_T = mx.arange(wrong_T.size) - (predictions.positions_T - 1)
    return token_cross_entropy(predictions) * (failures_T == failures_T[starts_T])


@register_objective(L1, needs_target_logits=True)
def l1(predictions: Predictions, l1_weight: float) -> mx.array:
    """``l1_weight`` of ``sum(|p - q|)`` and the rest cross-entropy, as published with 0.9 (DSpark, arXiv:2607.05147).

    The sum is twice the total variation: a draft sampled from ``q`` is accepted with probability
    ``1 - sum(|p - q|) / 2``.
    """
    assert predictions.target_logits_TV is not None
    distance_T = mx.abs(softmax(predictions.target_logits_TV) - softmax(predictions.logits_TV)).sum(-1)
    return l1_weight * distance_T + (1 - l1_weight) * token_cross_entropy(predictions)


@dataclass(frozen=True)
class ObjectiveSettings(Checked):
    """The loss of each prediction and its weight.

    ``kind`` is ``cross_entropy`` on the target's tokens (as published), ``kl`` (forward KL divergence from the
    target's distribution to the drafter's), ``mix`` (``kl_weight`` of KL and the rest cross-entropy), ``l1``
    (``l1_weight`` of the distributions' L1 distance and the rest cross-entropy), ``d-pace`` (cross-entropy with weights
    from the drafter's own probabilities, softened by ``alpha``), ``accept-until-fail`` (cross-entropy up to the first
    wrong draft), or the name of an objective that a plug-in registers; ``options`` are the plug-in's own. Position
    ``i`` of a block counts ``exp(-(i - 1) / gamma)``, except with ``d-pace``. Losses that the drafter's kind adds
    (:class:`~dflash.drafters.trainable.Trainable`) count ``auxiliary_weight``. Where a kind corrects its logits by the
    tokens before, the share of the uncorrected ones in the loss falls from 1 to 0 in the first ``base_steps``: half of
    all in SpecForge's training of Domino. The logits of ``chunk`` predictions exist at once, or those of one block.

    Raises :class:`~dflash.core.settings.SettingsError` when a value is impossible.
    """

    kind: str = setting(CROSS_ENTROPY, "cross_entropy, kl, mix, d-pace, l1, accept-until-fail, or a plug-in's")
    kl_weight: float = setting(0.5, "of mix: the weight of KL; cross-entropy has the rest", at_least=0, at_most=1)
    gamma: float = setting(7.0, "position i of a block counts exp(-(i - 1) / gamma); not with d-pace", above=0)
    alpha: float = setting(0.5, "of d-pace: 0 takes probabilities as they are, 1 as certain", at_least=0, at_most=1)
    l1_weight: float = setting(0.9, "of l1: the weight of L1; cross-entropy has the rest", at_least=0, at_most=1)
    auxiliary_weight: float = setting(1.0, "weight of the losses that the drafter's kind adds", at_least=0)
    base_steps: int = setting(0, "steps in which the loss moves from uncorrected logits to corrected ones", at_least=0)
    chunk: int = setting(512, "predictions whose logits exist at once, in whole blocks", at_least=1)
    options: dict[str, Any] = setting(meaning="options of a plug-in's objective", factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        objective = OBJECTIVES.find(self.kind)
        if objective is None:
            raise SettingsError(f"kind is {self.kind!r}; {OBJECTIVES.advice(self.kind)}")
        try:
            check_options(f"objective {self.kind!r}", objective.losses, self._options, 1)
        except DFlashError as error:
            raise SettingsError(f"options: {error}") from error

    @property
    def _options(self) -> dict[str, Any]:
        own = {MIX: {"kl_weight": self.kl_weight}, D_PACE: {"alpha": self.alpha}, L1: {"l1_weight": self.l1_weight}}
        return own.get(self.kind, {}) | self.options

    @property
    def needs_target_logits(self) -> bool:
        """Whether the objective compares with the target's distribution, not only with its tokens."""
        return OBJECTIVES.get(self.kind).needs_target_logits

    @property
    def weighs_positions(self) -> bool:
        """Whether the objective weighs the positions of a block itself."""
        return OBJECTIVES.get(self.kind).weighs_positions

    @property
    def losses(self) -> Callable[[Predictions], mx.array]:
        """The loss ``[T]`` of each prediction, with the recipe's options."""
        return partial(OBJECTIVES.get(self.kind).losses, **self._options)
