"""Drafting for several texts at once: what any drafter needs in a batch, and what one does that has nothing for it.

Shapes: B texts, S tokens, F feature size, n drafts.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..core.errors import GenerationError
from ..target.ring import Ragged
from .checks import check_drafted, proposed_tokens
from .protocol import BatchDrafter, Drafter, Proposal

NO_DRAFT = -1
"""Stands where a text of a batch has fewer drafts than others."""

_OF_ONE_TEXT = (("propose", "propose_rows"), ("draft_hidden", "propose_rows"), ("extend_context", "extend_rows"))
"""What does for one text what another method does for several."""


class Contexts(Ragged):
    """The caches that a drafter made for several texts, as one layer of mlx-lm's list of caches."""

    def __init__(self, caches: list[Any]):
        self.caches = caches

    def __deepcopy__(self, _: Any) -> "Contexts":
        """The same caches: mlx-lm copies a batch to part its rows, and each row stays in one part."""
        return Contexts(list(self.caches))

    @staticmethod
    def merge(contexts: "Sequence[Contexts]") -> "Contexts":
        """Those of several batches."""
        return Contexts([cache for context in contexts for cache in context.caches])

    @property
    def state(self) -> list[Any]:
        """The arrays of the caches that say what they hold, for ``mx.eval``."""
        return [getattr(cache, "state", ()) for cache in self.caches]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches that say how many they are."""
        return sum(getattr(cache, "nbytes", 0) for cache in self.caches)

    def filter(self, rows: Sequence[int]) -> None:
        """Keep these texts."""
        self.caches = [self.caches[row] for row in rows]

    def extend(self, other: "Contexts") -> None:
        """Take in the texts of another batch."""
        self.caches = self.caches + other.caches

    def extract(self, row: int) -> "Contexts":
        """One text's cache."""
        return Contexts([self.caches[row]])


class TextByText:
    """A :class:`~dflash.drafters.protocol.BatchDrafter` made of any drafter: it drafts for one text after another."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.block_size, self.target_layer_ids = drafter.block_size, drafter.target_layer_ids

    def make_layers(self) -> list[Contexts]:
        """One, which holds the drafter's own cache."""
        return [Contexts([self.drafter.make_cache()])]

    def extend_rows(
        self, features_BSF: mx.array, layers: list[Contexts], tokens_BS: mx.array, counts: Sequence[int] | None = None
    ) -> None:
        """As in the protocol."""
        caches = layers[0].caches
        counts = layers[0].counts(len(caches), tokens_BS.shape[1]) if counts is None else counts
        for row, (cache, count) in enumerate(zip(caches, counts, strict=True)):
            if count:
                text = slice(row, row + 1), slice(count)
                self.drafter.extend_context(features_BSF[text], cache, tokens_BS[text])

    def propose_rows(self, anchors_B: mx.array, length: int, layers: list[Contexts]) -> Proposal:
        """As in the protocol."""
        anchors = mx.split(anchors_B[:, None], len(anchors_B))
        proposals = [self.drafter.propose(a, length, c) for a, c in zip(anchors, layers[0].caches, strict=True)]
        if any(proposal.parents is not None for proposal in proposals):
            raise GenerationError(f"{type(self.drafter).__name__} drafts trees; only texts decoded alone verify them.")
        tokens = [proposed_tokens(self.drafter, proposal, length) for proposal in proposals]
        longest = max(drafts.shape[1] for drafts in tokens)
        padded = [mx.pad(t, [(0, 0), (0, longest - t.shape[1])], constant_values=NO_DRAFT) for t in tokens]
        return Proposal(mx.concatenate(padded))


def for_batches(drafter: Drafter) -> BatchDrafter:
    """The drafter itself if it drafts for several texts in one pass, or else text by text.

    A subclass that drafts for one text in its own way, and says nothing of batches, drafts text by text too.
    """
    order = type(drafter).__mro__

    def newest(method: str) -> int:
        return next((i for i, owner in enumerate(order) if method in vars(owner)), len(order))

    if isinstance(drafter, BatchDrafter) and all(newest(rows) <= newest(one) for one, rows in _OF_ONE_TEXT):
        return drafter
    return TextByText(drafter)


def drafts_of_row(drafter: BatchDrafter, drafted: list[int], vocab_size: int) -> list[int]:
    """A text's drafts, without what stands for missing ones after them.

    Raises ``GenerationError`` if an id is outside the target's vocabulary.
    """
    count = len(drafted)
    while count and drafted[count - 1] == NO_DRAFT:
        count -= 1
    check_drafted(drafter.drafter if isinstance(drafter, TextByText) else drafter, drafted[:count], vocab_size)
    return drafted[:count]
