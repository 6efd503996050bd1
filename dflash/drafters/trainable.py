"""What training asks of a drafter kind beyond its forward pass; the defaults are those of DFlash.

Shapes: T predictions, E hidden size, R size of a recurrent state, V drafted vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx


@dataclass(frozen=True)
class Predictions:
    """``T`` predictions of whole blocks, in float32; a block's predictions are consecutive, from its first position.

    ``logits_TV`` are the drafter's and ``tokens_T`` the target's tokens. ``positions_T`` is each prediction's position
    in its block, starting at 1. ``target_logits_TV`` are the target's own logits, if an objective or a drafter kind
    needs them, and ``base_logits_TV`` the drafter's before its kind corrects them by the tokens before, if it does.

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
    base_logits_TV: mx.array | None = None


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

    def taught_logits(
        self, base_TV: mx.array, hidden_TE: mx.array, previous_T: mx.array, positions_T: mx.array
    ) -> mx.array:
        """Logits ``[T, V]`` given the true token before each prediction, ``previous_T`` (the anchor, for the first).

        ``base_TV`` are those of :meth:`head`. Predictions are whole blocks, as in :class:`Predictions`.
        """
        return base_TV

    def auxiliary_losses(self, hidden_TE: mx.array, previous_T: mx.array, predictions: Predictions) -> mx.array | None:
        """Losses ``[T]`` that this kind adds to the objective's, or ``None``."""
        return None

    def hits(self, hidden_TE: mx.array, previous_T: mx.array, predictions: Predictions) -> dict[str, mx.array]:
        """Booleans ``[T]`` by the names in ``measures``; ``accuracy``: whether the drafted token is the target's."""
        right_T = mx.argmax(predictions.logits_TV, axis=-1) == predictions.tokens_T
        return {"accuracy": right_T if predictions.known_T is None else right_T & predictions.known_T}


def states_of_blocks(
    step: Callable[[mx.array, mx.array], mx.array], zeros_TR: mx.array, positions_T: mx.array, most: int
) -> mx.array:
    """The states ``[T, R]`` after each row of whole blocks whose tokens are known.

    ``step(rows, states)`` gives the states after ``rows``, indices into ``T``, from those before them, which are zero
    at the start of a block. A block's rows are consecutive, with positions from 1 to at most ``most``.
    """
    # All blocks advance together: round k computes the rows at position k. A block that has one has k rows, so there
    # are at most T // k. Blocks of different lengths need no padding, and positions never go to the host.
    states_TR, count, begin = zeros_TR, positions_T.size, mx.array(0)
    order_T = mx.argsort(positions_T)
    places_T = mx.argsort(order_T)
    for k in range(1, min(most, count) + 1):
        size, here_T = count // k, positions_T == k
        rows = order_T[mx.minimum(begin + mx.arange(size), count - 1)]
        new = step(rows, states_TR[rows - 1] if k > 1 else zeros_TR[:size])
        states_TR = mx.where(here_T[:, None], new[mx.clip(places_T - begin, 0, size - 1)], states_TR)
        begin = begin + here_T.sum()
    return states_TR
