"""What training asks of a drafter kind beyond its forward pass; the defaults are those of DFlash.

Shapes: T predictions, E hidden size, V drafted vocabulary.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx


@dataclass(frozen=True)
class Predictions:
    """``T`` predictions of whole blocks, in float32; a block's predictions are consecutive, from its first position.

    ``logits_TV`` are the drafter's and ``tokens_T`` the target's tokens. ``positions_T`` is each prediction's position
    in its block, starting at 1. ``target_logits_TV`` are the target's own logits, if an objective or a drafter kind
    needs them.

    With a reduced vocabulary, ``V`` is the drafted part in the drafter's own ids, and the softmax of
    ``target_logits_TV`` is the target's distribution restricted to it and renormalised. ``known_T`` is then whether
    the drafter knows the target's token. If not, ``tokens_T`` is a meaningless 0: the prediction cannot be right, and
    its loss does not count.
    """

    logits_TV: mx.array
    tokens_T: mx.array
    positions_T: mx.array
    target_logits_TV: mx.array | None = None
    known_T: mx.array | None = None


class Trainable:
    """The base of trainable drafter kinds; a kind overrides what differs.

    ``usual_options`` are the kind's own keys in a new drafter, unless its recipe sets them. ``added_modules`` are parts
    of the names of modules that DFlash does not have; they keep their own initialisation, also in a drafter that
    starts from a DFlash checkpoint. ``head_modules`` are the attributes that work on final hidden states: training
    calls the methods below for a chunk of predictions at a time, and only there do these modules get gradients.
    ``measures`` names what :meth:`hits` counts. With a reduced vocabulary, logits have the drafted columns, but
    ``previous_T`` are still the target's ids.
    """

    usual_options: ClassVar[dict[str, Any]] = {}
    added_modules: ClassVar[tuple[str, ...]] = ()
    head_modules: ClassVar[tuple[str, ...]] = ()
    measures: ClassVar[tuple[str, ...]] = ("accuracy",)

    @property
    def needs_target_logits(self) -> bool:
        """Whether the auxiliary losses of this kind read the target's own logits."""
        return False

    def head(self, hidden_TE: mx.array) -> mx.array:
        """Logits ``[.., V]`` of final hidden states."""
        raise NotImplementedError

    def taught_logits(self, hidden_TE: mx.array, previous_T: mx.array, positions_T: mx.array) -> mx.array:
        """Logits ``[T, V]`` given the true token before each prediction, ``previous_T`` (the anchor, for the first).

        Predictions are whole blocks, as in :class:`Predictions`.
        """
        return self.head(hidden_TE)

    def auxiliary_losses(self, hidden_TE: mx.array, previous_T: mx.array, predictions: Predictions) -> mx.array | None:
        """Losses ``[T]`` that this kind adds to the objective's, or ``None``."""
        return None

    def hits(self, hidden_TE: mx.array, previous_T: mx.array, predictions: Predictions) -> dict[str, mx.array]:
        """Booleans ``[T]`` by the names in ``measures``; ``accuracy``: whether the drafted token is the target's."""
        right_T = mx.argmax(predictions.logits_TV, axis=-1) == predictions.tokens_T
        return {"accuracy": right_T if predictions.known_T is None else right_T & predictions.known_T}
