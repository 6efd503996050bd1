"""The loss of a drafter, as a pure function.

Knows logits and weights. Must not know models or where the weights come from.

Shapes: T predictions, V vocabulary.
"""

import mlx.core as mx

from .fastmath import cross_entropy


def decayed_cross_entropy(logits_TV: mx.array, targets_T: mx.array, weights_T: mx.array) -> mx.array:
    """Mean cross-entropy under ``weights_T``; predictions of weight 0 count for nothing."""
    return (cross_entropy(logits_TV, targets_T) * weights_T).sum() / mx.maximum(weights_T.sum(), 1e-9)
