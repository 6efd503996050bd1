"""What training asks of a drafter kind beyond its forward pass; the defaults are those of DFlash.

Knows arrays. Must not know models, batches or objectives.

Shapes: T predictions, E hidden size, V vocabulary: for a drafter that knows a part of the target's, that part.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx


@dataclass(frozen=True)
class Predictions:
    """``T`` predictions of whole blocks, in float32: those of a block stand in a row, from its first position on.

    ``logits_TV`` are the drafter's and ``tokens_T`` the tokens that the target wrote. ``positions_T`` is each
    prediction's position in its block, from 1 on. ``target_logits_TV``, the target's own logits for the same
    tokens, is there where an objective or a kind of drafter asks for it.

    For a drafter that knows a part of the vocabulary, ``V`` is that part, in its own ids: ``target_logits_TV`` are the
    target's logits of these tokens, whose softmax is the target's distribution restricted to them and renormalised.
    ``known_T`` is then whether the drafter knows the token that the target wrote. Where it does not, ``tokens_T`` is 0
    and means nothing: the prediction cannot be right, and its loss does not count.
    """

    logits_TV: mx.array
    tokens_T: mx.array
    positions_T: mx.array
    target_logits_TV: mx.array | None = None
    known_T: mx.array | None = None


class Trainable:
    """A base of drafter kinds; a kind overrides what differs for it.

    ``usual_options`` are the values of the kind's own keys in a new drafter whose recipe does not name them.
    ``added_modules`` are modules that DFlash does not have, by a part of their names. They start as their classes make
    them, in a new drafter and in one that starts from a DFlash checkpoint. ``head_modules``, by the names of the
    model's own attributes, are those that work on final hidden states, in the methods below: training calls these for
    a chunk of predictions at a time, and only there do the head modules get gradients. ``measures`` name what
    :meth:`hits` counts. Where a drafter knows a part of the vocabulary, logits have the columns that it knows, and
    ``previous_T`` are the target's ids all the same.
    """

    usual_options: ClassVar[dict[str, Any]] = {}
    added_modules: ClassVar[tuple[str, ...]] = ()
    head_modules: ClassVar[tuple[str, ...]] = ()
    measures: ClassVar[tuple[str, ...]] = ("accuracy",)

    @property
    def needs_target_logits(self) -> bool:
        """Whether the losses that this kind adds compare with the target's own logits."""
        return False

    def head(self, hidden_TE: mx.array) -> mx.array:
        """Logits ``[.., V]`` of final hidden states."""
        raise NotImplementedError

    def taught_logits(self, hidden_TE: mx.array, previous_T: mx.array, positions_T: mx.array) -> mx.array:
        """Logits ``[T, V]`` where the true token before each prediction is ``previous_T`` (the anchor, for the first).

        Predictions come as whole blocks, as in :class:`Predictions`.
        """
        return self.head(hidden_TE)

    def auxiliary_losses(self, hidden_TE: mx.array, previous_T: mx.array, predictions: Predictions) -> mx.array | None:
        """Losses ``[T]`` that this kind adds to the objective's; ``None``: it adds none."""
        return None

    def hits(self, hidden_TE: mx.array, previous_T: mx.array, predictions: Predictions) -> dict[str, mx.array]:
        """What evaluations count, by the names in ``measures``: booleans ``[T]``.

        ``accuracy`` is whether the token that would be drafted is the target's.
        """
        right_T = mx.argmax(predictions.logits_TV, axis=-1) == predictions.tokens_T
        return {"accuracy": right_T if predictions.known_T is None else right_T & predictions.known_T}
