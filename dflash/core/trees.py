"""Trees of drafts: which continuations of the anchor one target pass should verify, and how they are connected.

A tree is a list of nodes, each after its parent: node ``j`` is a draft that follows node ``parents[j]``, or the anchor
where that is -1. A chain is the tree in which each follows the one before it. A pass over a tree has a row for the
anchor and, after it, one for each node.

A block's positions are drafted at once, so the probability of a path is the product of one probability per depth. The
tree that is expected to commit most consists of the likeliest paths, which a heap finds one by one (best-first; DDTree,
arXiv:2604.12989). So its first ``n`` nodes are the best tree of ``n`` nodes, and a policy can cut it anywhere.

Shapes: D depths, K candidates at each, N nodes, L = N + 1 rows of a pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

ANCHOR = -1


@dataclass(frozen=True)
class Tree:
    """Nodes in the order in which they were found: the likeliest path first.

    Args:
        tokens: The draft of each node.
        parents: The node that each follows.
        depths: From 0, so a node at depth ``d`` is the draft of position ``d`` of the block.
        chances: The probability of each node if its parent is right.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    chances: list[float]


def best_first(tokens_DK: np.ndarray, log_probabilities_DK: np.ndarray, budget: int) -> Tree:
    """The ``budget`` likeliest paths from the anchor, or all if there are fewer.

    Each row of ``log_probabilities_DK`` is in falling order; minus infinity marks what is impossible.
    """
    depth_count, width = log_probabilities_DK.shape
    rows = log_probabilities_DK.tolist()
    tree = Tree([], [], [], [])
    waiting: list[tuple[float, int, int, int, float]] = []  # minus the path's log-probability; the rest breaks ties

    def wait(before: float, parent: int, depth: int, rank: int) -> None:
        if depth < depth_count and rank < width and rows[depth][rank] > -np.inf:
            heappush(waiting, (before - rows[depth][rank], depth, rank, parent, before))

    wait(0.0, ANCHOR, 0, 0)
    while waiting and len(tree.tokens) < budget:
        path, depth, rank, parent, before = heappop(waiting)
        node = len(tree.tokens)
        tree.tokens.append(int(tokens_DK[depth, rank]))
        tree.parents.append(parent)
        tree.depths.append(depth)
        tree.chances.append(float(np.exp(rows[depth][rank])))
        wait(path, node, depth + 1, 0)
        wait(before, parent, depth, rank + 1)
    return tree


def chain(count: int) -> list[int]:
    """Parents of a chain of ``count`` nodes."""
    return list(range(ANCHOR, count - 1))


def depths_of_rows(parents: Sequence[int]) -> list[int]:
    """How many tokens after the anchor each row of a pass stands, ``[L]``."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return depths


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """Whether row ``i`` of a pass sees row ``j``: itself and what it follows, ``[L, L]``."""
    seen_LL = np.eye(len(parents) + 1, dtype=bool)
    for node, parent in enumerate(parents):
        seen_LL[node + 1] |= seen_LL[parent + 1]
    return seen_LL


def rows_before(parents: Sequence[int]) -> list[list[int]]:
    """For each row of a pass, the rows of its path, from the anchor's to its own."""
    rows = [[0]]
    for node, parent in enumerate(parents):
        rows.append([*rows[parent + 1], node + 1])
    return rows


def walk(tokens: Sequence[int], parents: Sequence[int], choose: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """Follow the target's tokens through the tree: the path of nodes, and those tokens, one more than there are nodes.

    ``choose`` gives the target's own token after a node, or after the anchor. It is called along the path only.
    """
    children: dict[tuple[int, int], int] = {}
    for node, child in enumerate(zip(parents, tokens, strict=True)):
        children.setdefault(child, node)
    node, path, chosen = ANCHOR, [], [choose(ANCHOR)]
    while (node, chosen[-1]) in children:
        node = children[node, chosen[-1]]
        path.append(node)
        chosen.append(choose(node))
    return path, chosen


def outcomes(tokens: Sequence[int], parents: Sequence[int], committed: Sequence[int]) -> dict[int, bool]:
    """Whether each node that follows a committed one is the next committed token; unknown ones are left out."""
    known: dict[int, bool] = {}
    reached = {ANCHOR: 0}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        depth = reached.get(parent, len(committed))
        if depth < len(committed):
            known[node] = token == committed[depth]
            if known[node]:
                reached[node] = depth + 1
    return known
