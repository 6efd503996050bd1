"""The loss of a batch: hidden states of all its blocks, what they should predict, and the mean, a chunk at a time.

Knows how forward, targets and objective fit together. Must not know any one target architecture, files, or how
a block is decoded.

Shapes: N sequences, S sequence length, A anchors a sequence, B block size, F feature size, E hidden size,
T predictions that count, C predictions of a chunk, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from dflash import DFlashDraftModel

from .attention import block_attention
from .forward import BlockAttention, draft_hidden
from .objectives import ObjectiveSettings, Predictions
from .targets import block_targets, flat_positions, position_weights

Head = Callable[[mx.array], mx.array]
"""The target's head: final hidden states ``[.., E]`` to logits ``[.., V]``."""


class Batch(NamedTuple):
    """What a drafter is trained on at once.

    ``tokens [N, S]``; ``loss_mask [N, S]``, true on responses; ``anchors [N, A]``; and what the frozen target made of
    the tokens: ``features [N, S, F]`` and, for objectives that need the target's logits, its final hidden states
    ``target_hidden [N, S, E]``.
    """

    tokens: mx.array
    loss_mask: mx.array
    anchors: mx.array
    features: mx.array
    target_hidden: mx.array | None = None


def drafter_loss(
    model: DFlashDraftModel,
    batch: Batch,
    objective: ObjectiveSettings,
    head: Head | None = None,
    *,
    dtype: mx.Dtype | None = None,
    attention: BlockAttention = block_attention,
    grad_checkpoint: bool = False,
) -> mx.array:
    """The scalar that training minimises: the mean of the objective over the batch's predictions.

    Position ``i`` of the block at anchor ``a`` predicts token ``a + i``. Objectives that compare with the target's
    distribution need ``head`` and ``batch.target_hidden``, and compare it with the one after token ``a + i - 1``.
    Predictions that do not count cost nothing. It is computed in ``dtype``, or in that of the weights;
    ``attention`` and ``grad_checkpoint`` are as in :func:`~dflash.training.drafters.forward.draft_hidden`.

    Raises ``ValueError`` for such an objective without what it needs.
    """
    blocks = _BlockPredictions.of(model, batch, objective, head, dtype, attention, grad_checkpoint)
    return mean_in_chunks(blocks.losses, blocks.hidden_TE, blocks.others, blocks.weights_T, objective.chunk)


@dataclass
class Scores:
    """Sums over heldout predictions; those of several batches add up.

    ``loss`` is the sum of losses times weights, ``weight`` that of the weights. Of ``predictions[i]`` at position
    ``i + 1`` of a block, ``right[i]`` were the target's token, whatever stood before them.
    """

    loss: float
    weight: float
    predictions: np.ndarray
    right: np.ndarray

    def __add__(self, other: "Scores") -> "Scores":
        return Scores(
            self.loss + other.loss,
            self.weight + other.weight,
            self.predictions + other.predictions,
            self.right + other.right,
        )

    def results(self) -> dict[str, float | list[float] | None]:
        """Plain data for logs; ``None`` and 0 where nothing was predicted."""
        return {
            "heldout_loss": self.loss / self.weight if self.weight else None,
            "heldout_accuracy": (self.right / np.maximum(self.predictions, 1)).tolist(),
        }


def score(
    model: DFlashDraftModel,
    batch: Batch,
    objective: ObjectiveSettings,
    head: Head | None = None,
    *,
    dtype: mx.Dtype | None = None,
) -> Scores:
    """Loss and accuracy by position of one batch, without gradients; as :func:`drafter_loss` otherwise."""
    own = tree_map(lambda weight: weight, model.trainable_parameters())
    blocks = _BlockPredictions.of(model, batch, objective, head, dtype)
    loss, (right, counts) = 0.0, np.zeros((2, model.block_size - 1), dtype=np.int64)
    for rows in blocks.chunks(objective.chunk):
        hidden_CE, weights_C, *others = rows
        predictions = blocks.predictions(hidden_CE, *others)
        losses = (objective.losses(predictions) * weights_C).sum()
        hit = mx.argmax(predictions.logits_TV, axis=-1) == predictions.tokens_T
        loss += cast(float, losses.item())
        positions = np.array(predictions.positions_T) - 1
        counts += np.bincount(positions, minlength=len(counts))
        right += np.bincount(positions[np.array(hit)], minlength=len(right))
    model.update(own)
    return Scores(loss, cast(float, blocks.weights_T.sum().item()), counts, right)


@dataclass(frozen=True)
class _BlockPredictions:
    """The predictions of a batch that count: their hidden states, weights, and what they should be.

    ``others`` are their tokens and positions ``[T]``, and the target's hidden states ``[T, E]`` where needed.
    """

    model: DFlashDraftModel
    objective: ObjectiveSettings
    head: Head | None
    hidden_TE: mx.array
    weights_T: mx.array
    others: list[mx.array]

    @classmethod
    def of(
        cls,
        model: DFlashDraftModel,
        batch: Batch,
        objective: ObjectiveSettings,
        head: Head | None,
        dtype: mx.Dtype | None,
        attention: BlockAttention = block_attention,
        grad_checkpoint: bool = False,
    ) -> "_BlockPredictions":
        if objective.needs_target_logits and (head is None or batch.target_hidden is None):
            missing = "head" if head is None else "final hidden states"
            raise ValueError(f"The objective {objective.kind!r} needs the target's {missing}.")
        features_NSF = mx.stop_gradient(batch.features)
        if dtype is not None:
            features_NSF = features_NSF.astype(dtype)
            model.update(tree_map(lambda weight: weight.astype(dtype), model.trainable_parameters()))
        size, tokens_NS, anchors_NA = model.block_size, batch.tokens, batch.anchors
        hidden = draft_hidden(model, features_NSF, tokens_NS, anchors_NA, attention, grad_checkpoint)
        hidden = hidden[:, :, 0 if model.config.sample_from_anchor else 1 :]  # one predicts each token after the anchor
        targets, inside = block_targets(tokens_NS, batch.loss_mask, anchors_NA, size)
        counted = mx.array(np.flatnonzero(np.array(inside)))

        def rows(values: mx.array) -> mx.array:
            return mx.broadcast_to(values, inside.shape).reshape(-1)[counted]

        others = [rows(targets), rows(mx.arange(1, size))]
        if objective.needs_target_logits and batch.target_hidden is not None:
            # The target's output after token a + i - 1 is its distribution of token a + i.
            before_T = flat_positions(anchors_NA, tokens_NS.shape[1], size).reshape(-1)[counted] - 1
            others.append(mx.stop_gradient(batch.target_hidden.flatten(0, 1)[before_T]))
        hidden_TE = hidden.reshape(-1, hidden.shape[-1])[counted]
        return cls(model, objective, head, hidden_TE, rows(inside * position_weights(size, objective.gamma)), others)

    def predictions(
        self, hidden_CE: mx.array, tokens_C: mx.array, positions_C: mx.array, before_CE: mx.array | None = None
    ) -> Predictions:
        logits_CV = self.model.head(hidden_CE).astype(mx.float32)
        target_logits_CV = None
        if before_CE is not None and self.head is not None:
            target_logits_CV = mx.stop_gradient(self.head(before_CE).astype(mx.float32))
        return Predictions(logits_CV, tokens_C, positions_C, target_logits_CV)

    def losses(self, hidden_CE: mx.array, *others: mx.array) -> mx.array:
        return self.objective.losses(self.predictions(hidden_CE, *others))

    def chunks(self, size: int) -> Iterator[list[mx.array]]:
        """Hidden states, weights and ``others`` of ``size`` predictions at a time."""
        for start in range(0, len(self.weights_T), size):
            yield [array[start : start + size] for array in (self.hidden_TE, self.weights_T, *self.others)]


def mean_in_chunks(
    losses: Callable[..., mx.array], hidden_TE: mx.array, others: Sequence[mx.array], weights_T: mx.array, chunk: int
) -> mx.array:
    """Mean, under ``weights_T``, of ``losses(hidden_CE, *others)``, called for ``chunk`` predictions at a time.

    ``others`` have a row for each prediction too. A head inside ``losses`` makes ``[C, V]`` logits: one chunk
    waits for the one before it, so those of a single chunk exist at once. Nothing but ``hidden_TE`` gets a
    gradient: a trainable head would not learn.
    """
    normalised_T = weights_T / weights_T.sum()

    # Autodiff of the plain loop would keep every chunk's logits, or their softmax, until the backward pass. The
    # result is a scalar, so its gradient can be taken at once, while a chunk's logits exist: dL/dhidden is an
    # output beside L. What arrives in the backward pass is one number, dTotal/dL, and by the chain rule
    # dTotal/dhidden = dTotal/dL * dL/dhidden. So the vjp only scales: nothing is computed twice.
    @mx.custom_function
    def total(hidden_TE: mx.array) -> tuple[mx.array, mx.array]:
        done: list[tuple[mx.array, mx.array]] = []
        for start in range(0, hidden_TE.shape[0], chunk):
            # All of it waits for all of the last chunk: what does not would be made, or kept, for every chunk.
            rows = [array[start : start + chunk] for array in (hidden_TE, normalised_T, *others)]
            hidden_CE, *rest = mx.depends(rows, list(done[-1])) if done else rows

            def of_chunk(hidden_CE: mx.array, weights_C: mx.array, *others: mx.array) -> mx.array:
                return (losses(hidden_CE, *others) * weights_C).sum()

            done.append(mx.value_and_grad(of_chunk)(hidden_CE, *rest))
        return mx.stack([value for value, _ in done]).sum(), mx.concatenate([gradient for _, gradient in done])

    @total.vjp
    def scaled(_: mx.array, cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]) -> mx.array:
        return (outputs[1] * cotangents[0]).astype(outputs[1].dtype)

    return cast("tuple[mx.array, mx.array]", total(hidden_TE))[0]
