"""A drafter that proposes a tree in place of a chain: the likeliest paths through another drafter's block.

The option ``tree=N`` of a request. The other drafter fills its block as usual. From the likeliest tokens of each
position the best-first tree of ``N`` drafts is grown (``core/trees.py``) and verified in one pass of the target. A
drafter that chooses tokens from left to right, by a selector or a Markov head, gives probabilities along the path it
chose; branches use them too, which costs acceptance but not exactness. A drafter without logits, such as an n-gram
drafter, keeps its chain.

Shapes: D depths, K candidates at each, V vocabulary, N nodes.
"""

import logging
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.trees import best_first
from .protocol import Drafter, Proposal

logger = logging.getLogger(__name__)

WIDTH = 16
"""Most candidates at each depth."""

MOST = 512
"""Drafts of the largest tree: a pass over more takes gigabytes for logits, and none of them pays."""

SOURCE = "tree"


class TreeDrafter:
    """Wraps a drafter; follows :class:`~dflash.drafters.protocol.Drafter` by delegation.

    Args:
        drafter: The drafter that fills the blocks.
        nodes: Drafts of a tree, at least 1; a policy may verify fewer. More than 512 are lowered to that, with a
            warning.
    """

    def __init__(self, drafter: Drafter, nodes: int):
        if nodes > MOST:
            logger.warning("tree %d is more than %d drafts; %d are used.", nodes, MOST, MOST)
        self._drafter, self._nodes = drafter, min(nodes, MOST)

    def propose(self, anchor: mx.array, length: int, cache: Any) -> Proposal:
        """The best tree over the block's ``length`` positions. Synchronises once, for their likeliest tokens."""
        block = self._drafter.propose(anchor, length, cache)
        if not isinstance(block, Proposal) or block.logits is None or block.tokens.size == 0:
            return block
        ids_DK, log_probabilities_DK = likeliest(block, min(WIDTH, self._nodes))
        tree = best_first(ids_DK, log_probabilities_DK, self._nodes)
        depths_N = mx.array(tree.depths)
        return Proposal(
            mx.array([tree.tokens]),
            logits=block.logits[:, depths_N],  # lazy: only a trace reads them
            candidates=None if block.candidates is None else block.candidates[:, depths_N],
            confidence=mx.array([tree.chances]),
            source=f"{block.source}+{SOURCE}" if block.source else SOURCE,
            parents=tree.parents,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def likeliest(block: Proposal, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities ``[D, K]`` of the likeliest tokens of each position, best first, on the host."""
    assert block.logits is not None
    scores_DV = block.logits[0].astype(mx.float32)
    width = min(width, scores_DV.shape[-1])
    columns_DK = mx.argpartition(-scores_DV, width - 1, axis=-1)[:, :width]
    values_DK = mx.take_along_axis(scores_DV, columns_DK, axis=-1) - mx.logsumexp(scores_DV, axis=-1, keepdims=True)
    ids_DK = columns_DK if block.candidates is None else mx.take_along_axis(block.candidates[0], columns_DK, axis=-1)
    mx.eval(ids_DK, values_DK)
    ids, values = np.array(ids_DK).astype(np.int64), np.array(values_DK)
    order = np.argsort(-values, axis=-1, kind="stable")
    return np.take_along_axis(ids, order, axis=-1), np.take_along_axis(values, order, axis=-1)
