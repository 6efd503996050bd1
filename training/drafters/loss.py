"""What a drafter is trained for: losses of single predictions, and their mean, a chunk at a time.

Knows logits and weights. Must not know models or where the weights come from.

Shapes: T predictions, C predictions of a chunk, V vocabulary, E hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from dflash.cpu_math import cross_entropy, logsumexp, softmax

from ..settings import SettingsError

CROSS_ENTROPY, KL, MIX = "cross_entropy", "kl", "mix"


@dataclass(frozen=True)
class ObjectiveSettings:
    """What each prediction is scored by, and how much it counts.

    ``kind`` is ``cross_entropy`` on the target's tokens (as published), ``kl`` (forward KL divergence from the
    target's distribution to the drafter's) or ``mix``: ``kl_share`` of KL and the rest cross-entropy. Position
    ``i`` of a block counts ``exp(-(i - 1) / gamma)``. The logits of ``chunk`` predictions exist at once.

    Raises :class:`~dflash.training.settings.SettingsError` when a value is impossible.
    """

    kind: str = CROSS_ENTROPY
    kl_share: float = 0.5
    gamma: float = 7.0
    chunk: int = 512

    def __post_init__(self) -> None:
        if self.kind not in (CROSS_ENTROPY, KL, MIX):
            raise SettingsError(f"kind must be {CROSS_ENTROPY}, {KL} or {MIX}, got {self.kind!r}.")
        if not 0 <= self.kl_share <= 1:
            raise SettingsError(f"kl_share must be between 0 and 1, got {self.kl_share!r}.")
        if not self.gamma > 0:
            raise SettingsError(f"gamma must be above 0, got {self.gamma!r}.")
        if self.chunk < 1:
            raise SettingsError(f"chunk must be at least 1 prediction, got {self.chunk!r}.")

    @property
    def share_of_kl(self) -> float:
        """Weight of the KL divergence in the loss; cross-entropy has the rest."""
        return {CROSS_ENTROPY: 0.0, KL: 1.0, MIX: self.kl_share}[self.kind]


def forward_kl(target_logits_TV: mx.array, logits_TV: mx.array) -> mx.array:
    """``KL(softmax(target_logits) || softmax(logits))`` of each prediction, shape ``[T]``."""
    expected = (softmax(target_logits_TV) * (target_logits_TV - logits_TV)).sum(-1)
    return expected - logsumexp(target_logits_TV) + logsumexp(logits_TV)


def prediction_losses(
    logits_TV: mx.array, tokens_T: mx.array, target_logits_TV: mx.array | None, share_of_kl: float
) -> mx.array:
    """Loss of each prediction, shape ``[T]``, in float32; ``target_logits_TV`` is for KL only."""
    logits_TV = logits_TV.astype(mx.float32)
    if target_logits_TV is None:
        return cross_entropy(logits_TV, tokens_T)
    divergence = forward_kl(mx.stop_gradient(target_logits_TV.astype(mx.float32)), logits_TV)
    if share_of_kl == 1:
        return divergence
    return share_of_kl * divergence + (1 - share_of_kl) * cross_entropy(logits_TV, tokens_T)


def mean_in_chunks(
    losses: Callable[..., mx.array], hidden_TE: mx.array, others: Sequence[mx.array], weights_T: mx.array, chunk: int
) -> mx.array:
    """Mean, under ``weights_T``, of ``losses(hidden_CE, *others)``, called for ``chunk`` predictions at a time.

    ``others`` have a row for each prediction too. A head inside ``losses`` makes ``[C, V]`` logits: one chunk
    waits for the one before it, so those of a single chunk exist at once. Each chunk's gradient is taken
    together with its losses, so nothing is computed twice, and nothing but ``hidden_TE`` gets a gradient: a
    trainable head would not learn.
    """
    shares_T = weights_T / weights_T.sum()

    @mx.custom_function
    def total(hidden_TE: mx.array) -> tuple[mx.array, mx.array]:
        done: list[tuple[mx.array, mx.array]] = []
        for start in range(0, hidden_TE.shape[0], chunk):
            # All of it waits for all of the last chunk: what does not would be made, or kept, for every chunk.
            rows = [array[start : start + chunk] for array in (hidden_TE, shares_T, *others)]
            hidden_CE, *rest = mx.depends(rows, list(done[-1])) if done else rows

            def of_chunk(hidden_CE: mx.array, shares_C: mx.array, *others: mx.array) -> mx.array:
                return (losses(hidden_CE, *others) * shares_C).sum()

            done.append(mx.value_and_grad(of_chunk)(hidden_CE, *rest))
        return mx.stack([value for value, _ in done]).sum(), mx.concatenate([gradient for _, gradient in done])

    @total.vjp
    def scaled(_: mx.array, cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]) -> mx.array:
        return (outputs[1] * cotangents[0]).astype(outputs[1].dtype)

    return cast("tuple[mx.array, mx.array]", total(hidden_TE))[0]
