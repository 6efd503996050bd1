"""The loss of a batch: hidden states of all blocks, their targets, and the mean loss, computed in chunks.

Shapes: N sequences, S sequence length, A anchors a sequence, B block size, F feature size, E hidden size,
T predictions that count, C predictions of a chunk, V vocabulary: the part that the drafter knows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from dflash import DFlashDraftModel
from dflash.core.errors import TrainingError
from dflash.core.files import flat, nested
from dflash.drafters.blocks import draft_hidden

from .objectives import ObjectiveSettings, Predictions
from .targets import block_targets, flat_positions, position_weights

Head = Callable[[mx.array], mx.array]
"""The target's head: final hidden states ``[.., E]`` to logits ``[.., V]`` of the tokens that the drafter knows."""


class Batch(NamedTuple):
    """A training batch.

    ``tokens [N, S]``; ``loss_mask [N, S]``, true on responses; ``anchors [N, A]``; the frozen target's
    ``features [N, S, F]`` and, for objectives that need the target's logits, its final hidden states
    ``target_hidden [N, S, E]``. A block has ``drafts`` predictions, by default as many as the drafter's blocks. Where a
    kind corrects its logits by the tokens before, ``base_weight`` of the loss is that of the uncorrected ones.
    """

    tokens: mx.array
    loss_mask: mx.array
    anchors: mx.array
    features: mx.array
    target_hidden: mx.array | None = None
    drafts: int | None = None
    base_weight: float = 0.0


def drafter_loss(
    model: DFlashDraftModel,
    batch: Batch,
    objective: ObjectiveSettings,
    head: Head | None = None,
    *,
    dtype: mx.Dtype | None = None,
    grad_checkpoint: bool = False,
) -> mx.array:
    """The scalar that training minimises: the mean over the batch's predictions of the objective and the kind's losses.

    Position ``i`` of the block at anchor ``a`` predicts token ``a + i``. Objectives and drafters that need the target's
    logits (:class:`~dflash.drafters.trainable.Trainable`) need ``head`` and ``batch.target_hidden``, and compare with
    the target's distribution after token ``a + i - 1``. Predictions outside responses are not computed. Predictions of
    tokens that the drafter does not know have weight 0, and the target's distribution is renormalised over the known
    tokens. The loss is computed in ``dtype``, by default the weights'; ``grad_checkpoint`` is as in
    :func:`~dflash.drafters.blocks.draft_hidden`.

    Raises ``ValueError`` if the target's logits are needed and missing, and ``TrainingError`` for an objective that
    does not return one loss per prediction.
    """
    blocks = _BlockPredictions.of(model, batch, objective, head, dtype, grad_checkpoint)
    trained = model.trainable_parameters()
    head_weights = {name: trained[name] for name in model.head_modules if name in trained}
    loss = mean_in_chunks(
        blocks.losses, head_weights, blocks.hidden_TE, blocks.others, blocks.weights_T, blocks.chunks()
    )
    model.update(head_weights)  # in place of the last chunk's tracers
    return loss


@dataclass
class Scores:
    """Sums over held-out predictions; those of several batches add up.

    ``loss`` is the sum of losses times weights, ``weight`` that of the weights. Of the ``predictions[i]`` at position
    ``i + 1`` of a block, ``hits["accuracy"][i]`` were the target's token, whatever came before; a kind of drafter may
    count more (:class:`~dflash.drafters.trainable.Trainable`).
    """

    loss: float
    weight: float
    predictions: np.ndarray
    hits: dict[str, np.ndarray]

    def __add__(self, other: "Scores") -> "Scores":
        return Scores(
            self.loss + other.loss,
            self.weight + other.weight,
            self.predictions + other.predictions,
            {name: count + other.hits[name] for name, count in self.hits.items()},
        )

    @classmethod
    def none(cls, model: DFlashDraftModel) -> "Scores":
        """Empty sums for ``model``."""
        nothing = np.zeros(model.block_size - 1, dtype=np.int64)
        return cls(0.0, 0.0, nothing, dict.fromkeys(model.measures, nothing))

    def results(self) -> dict[str, float | list[float] | None]:
        """Plain data for logs; ``None`` or 0 where there was no prediction."""
        predictions = np.maximum(self.predictions, 1)
        return {"heldout_loss": self.loss / self.weight if self.weight else None} | {
            f"heldout_{name}": (count / predictions).tolist() for name, count in self.hits.items()
        }


def score(
    model: DFlashDraftModel,
    batch: Batch,
    objective: ObjectiveSettings,
    head: Head | None = None,
    *,
    dtype: mx.Dtype | None = None,
) -> Scores:
    """Loss and accuracy by position of one batch, without gradients; otherwise as :func:`drafter_loss`."""
    own = tree_map(lambda weight: weight, model.trainable_parameters())
    blocks, scores = _BlockPredictions.of(model, batch, objective, head, dtype), Scores.none(model)
    for rows in blocks.chunks():
        hidden_CE, weights_C, *others = (array[rows] for array in (blocks.hidden_TE, blocks.weights_T, *blocks.others))
        predictions = blocks.predictions(hidden_CE, *others)
        loss = (blocks.scored(predictions, hidden_CE, *others) * weights_C).sum()
        positions = np.array(predictions.positions_T) - 1

        def by_position(counted_C: mx.array, positions: np.ndarray = positions) -> np.ndarray:
            return np.bincount(positions[np.array(counted_C)], minlength=model.block_size - 1)

        hits = model.hits(hidden_CE, others[0], predictions)
        counts = {name: by_position(hits[name]) for name in model.measures}
        everything = by_position(mx.ones(positions.shape, mx.bool_))
        scores += Scores(cast(float, loss.item()), cast(float, weights_C.sum().item()), everything, counts)
    model.update(own)
    return scores


@dataclass(frozen=True)
class _BlockPredictions:
    """The predictions of a batch that count: their hidden states, weights, and what they should be.

    ``others`` are the tokens before them, their tokens and positions ``[T]``, and the target's hidden states ``[T, E]``
    where needed. The weight of a token that the drafter does not know is 0. ``base_weight`` is the batch's.
    """

    model: DFlashDraftModel
    objective: ObjectiveSettings
    head: Head | None
    hidden_TE: mx.array
    weights_T: mx.array
    others: list[mx.array]
    base_weight: float = 0.0

    @classmethod
    def of(
        cls,
        model: DFlashDraftModel,
        batch: Batch,
        objective: ObjectiveSettings,
        head: Head | None,
        dtype: mx.Dtype | None,
        grad_checkpoint: bool = False,
    ) -> "_BlockPredictions":
        needs_target_logits = objective.needs_target_logits or model.needs_target_logits
        if needs_target_logits and (head is None or batch.target_hidden is None):
            asks = f"The objective {objective.kind!r}" if objective.needs_target_logits else type(model).__name__
            raise ValueError(f"{asks} needs the target's {'head' if head is None else 'final hidden states'}.")
        features_NSF = mx.stop_gradient(batch.features)
        if dtype is not None:
            features_NSF = features_NSF.astype(dtype)
            model.update(tree_map(lambda weight: weight.astype(dtype), model.trainable_parameters()))
        tokens_NS, anchors_NA, drafts = batch.tokens, batch.anchors, batch.drafts or model.block_size - 1
        size = drafts + 1
        hidden = draft_hidden(model, features_NSF, tokens_NS, anchors_NA, drafts, grad_checkpoint)
        hidden = hidden[:, :, 0 if model.config.sample_from_anchor else 1 :]  # the anchor may predict a token too
        targets, inside = block_targets(tokens_NS, batch.loss_mask, anchors_NA, size)
        counted = mx.array(np.flatnonzero(np.array(inside)))

        def rows(values: mx.array) -> mx.array:
            return mx.broadcast_to(values, inside.shape).reshape(-1)[counted]

        # The target's output after token a + i - 1 is its distribution of token a + i.
        before_T = rows(flat_positions(anchors_NA, tokens_NS.shape[1], size)) - 1
        others = [tokens_NS.reshape(-1)[before_T], rows(targets), rows(mx.arange(1, size))]
        if needs_target_logits and batch.target_hidden is not None:
            others.append(mx.stop_gradient(batch.target_hidden.flatten(0, 1)[before_T]))
        hidden_TE = hidden.reshape(-1, hidden.shape[-1])[counted]
        weights = mx.ones(size - 1) if objective.weighs_positions else position_weights(size, objective.gamma)
        weights_T = rows(inside * weights)
        if model.draft_ids is not None:
            weights_T = weights_T * (model.draft_ids[others[1]] >= 0)
        return cls(model, objective, head, hidden_TE, weights_T, others, batch.base_weight)

    def predictions(
        self,
        hidden_CE: mx.array,
        previous_C: mx.array,
        tokens_C: mx.array,
        positions_C: mx.array,
        before_CE: mx.array | None = None,
    ) -> Predictions:
        base_CV = self.model.head(hidden_CE)
        logits_CV = self.model.taught_logits(base_CV, hidden_CE, previous_C, positions_C)
        uncorrected_CV = None if logits_CV is base_CV else base_CV.astype(mx.float32)
        target_logits_CV = None
        if before_CE is not None and self.head is not None:
            target_logits_CV = mx.stop_gradient(self.head(before_CE).astype(mx.float32))
        known_C = None
        if self.model.draft_ids is not None:
            tokens_C = self.model.draft_ids[tokens_C]
            known_C = tokens_C >= 0
            tokens_C = mx.maximum(tokens_C, 0)
        logits_CV = logits_CV.astype(mx.float32)
        return Predictions(logits_CV, tokens_C, positions_C, target_logits_CV, known_C, uncorrected_CV)

    def scored(self, predictions: Predictions, hidden_CE: mx.array, previous_C: mx.array, *_: mx.array) -> mx.array:
        losses_C = self.objective.losses(predictions)
        if losses_C.shape != predictions.tokens_T.shape:
            raise TrainingError(
                f"The objective {self.objective.kind!r} returns an array of shape {list(losses_C.shape)}; expected one "
                f"loss for each prediction, {list(predictions.tokens_T.shape)}."
            )
        if self.base_weight and predictions.base_logits_TV is not None:
            uncorrected = replace(predictions, logits_TV=predictions.base_logits_TV)
            losses_C = (1 - self.base_weight) * losses_C + self.base_weight * self.objective.losses(uncorrected)
        added_C = self.model.auxiliary_losses(hidden_CE, previous_C, predictions)
        return losses_C if added_C is None else losses_C + self.objective.auxiliary_weight * added_C

    def losses(self, head_weights: Any, hidden_CE: mx.array, *others: mx.array) -> mx.array:
        self.model.update(head_weights)
        return self.scored(self.predictions(hidden_CE, *others), hidden_CE, *others)

    def chunks(self) -> list[slice]:
        """All predictions in chunks of whole blocks, at most ``objective.chunk`` each unless a block is longer."""
        starts = np.flatnonzero(np.array(self.others[2]) == 1)
        ends, bounds = [*starts[1:].tolist(), len(self.weights_T)], [0]
        for start, end in zip(starts.tolist(), ends, strict=True):
            if end - bounds[-1] > self.objective.chunk and start > bounds[-1]:
                bounds.append(start)
        return [slice(a, b) for a, b in zip(bounds, [*bounds[1:], len(self.weights_T)], strict=True)]


def mean_in_chunks(
    losses: Callable[..., mx.array],
    weights: Any,
    hidden_TE: mx.array,
    others: Sequence[mx.array],
    weights_T: mx.array,
    chunks: Sequence[slice],
) -> mx.array:
    """Mean, under ``weights_T``, of ``losses(weights, hidden_CE, *others)``, called for one of ``chunks`` at a time.

    ``others`` also have one row per prediction. A head inside ``losses`` makes ``[C, V]`` logits; each chunk waits for
    the one before it, so only one chunk's logits exist at a time. Only ``hidden_TE`` and the tree ``weights`` get
    gradients.
    """
    total_weight = weights_T.sum()
    normalised_T = weights_T / mx.where(total_weight > 0, total_weight, 1)  # 0 if the drafter knows none of the tokens
    arrays_by_name = flat(weights)

    # Autodiff of the plain loop would keep every chunk's logits, or their softmax, until the backward pass. L is a
    # scalar, so its gradient can be taken while a chunk's logits exist, and dL/dhidden becomes a second output. The
    # backward pass brings one number, dTotal/dL, and dTotal/dhidden = dTotal/dL * dL/dhidden: the vjp only scales.
    @mx.custom_function
    def total(hidden_TE: mx.array, *values: mx.array) -> tuple[mx.array, ...]:
        done: list[tuple[mx.array, mx.array]] = []
        learned = [mx.zeros(value.shape, mx.float32) for value in values]
        for rows in chunks:
            # Every input waits for the whole last chunk; otherwise it would be made, or kept, for every chunk.
            arrays = [array[rows] for array in (hidden_TE, normalised_T, *others)]
            hidden_CE, *rest = mx.depends(arrays, [*done[-1], *learned]) if done else arrays

            def of_chunk(values: list[mx.array], hidden_CE: mx.array, weights_C: mx.array, *others: mx.array) -> Any:
                own = nested(dict(zip(arrays_by_name, values, strict=True)))
                return (losses(own, hidden_CE, *others) * weights_C).sum()

            value, (own, of_hidden) = mx.value_and_grad(of_chunk, argnums=(0, 1))(list(values), hidden_CE, *rest)
            done.append((value, of_hidden))
            learned = [sum_ + gradient for sum_, gradient in zip(learned, own, strict=True)]
        return mx.stack([value for value, _ in done]).sum(), mx.concatenate([g for _, g in done]), *learned

    @total.vjp
    def scaled(_: object, cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]) -> Any:
        gradients = zip((hidden_TE, *arrays_by_name.values()), outputs[1:], strict=True)
        scaled = tuple((gradient * cotangents[0]).astype(array.dtype) for array, gradient in gradients)
        return scaled if arrays_by_name else scaled[0]

    return cast("tuple[mx.array, ...]", total(hidden_TE, *arrays_by_name.values()))[0]
