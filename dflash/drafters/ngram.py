"""A drafter that needs no training: what followed the last tokens when they came before.

Prompt lookup decoding: text that repeats the prompt or itself (an edited file, a quotation, a table) is drafted by
copying; ``--drafter ngram`` chooses it. Three things beyond the usual lookup, with what they did to the acceptance
length when twelve files were written again with one name changed (single bytes as tokens; words in brackets):

- The place with the longest agreement is copied, not the latest one: 8.1 to 13.1 (11.0 to 13.1).
- Copying resumes where it was left for an edit: 13.1 to 14.9 (13.1 to 13.4), of at most 16.
- No more is drafted than twice what agrees, because a short agreement is weak evidence: the same acceptance for fewer
  drafts, where text repeats little a quarter fewer passes' worth of time (SuffixDecoding, arXiv:2411.04975).

Knows token ids. Must not know any model.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from ..core.errors import GenerationError
from .protocol import Proposal

if TYPE_CHECKING:
    from ..target import LoadedTargetModel

NAME = "ngram"
"""What ``load_drafter`` and ``--drafter`` call it."""

SIZES = (5, 2)
"""Tokens that must agree for a place to be looked at, the anchor included; the longest that occurred counts."""

COMPARED = 32  # of an n-gram that are compared
LONGEST = 32  # tokens of an agreement that are counted
WAKING = 12  # tokens that must agree before a policy that lets the drafter sleep is told to wake it


class NgramCache:
    """The tokens so far with, for each size, where every n-gram ended; a token costs one entry a size.

    ``expected`` is the position after the anchor's if the text still followed what was copied last. While the drafter
    sleeps, ``ahead`` counts the tokens that were read before they became context.
    """

    def __init__(self, sizes: tuple[int, ...] = SIZES):
        self.tokens: list[int] = []
        self.sizes = tuple(sorted(sizes, reverse=True))
        self.ends: list[dict[tuple[int, ...], list[int]]] = [defaultdict(list) for _ in self.sizes]
        self.expected, self.ahead = 0, 0

    @property
    def offset(self) -> int:
        """Tokens of context held."""
        return len(self.tokens) - self.ahead

    def extend(self, tokens: list[int]) -> None:
        """Append committed tokens, those that were read ahead once only."""
        known, self.ahead = self.ahead, 0
        self._index(tokens[known:])

    def read_ahead(self, text: Sequence[int]) -> None:
        """Index the committed tokens of the whole ``text``, whose last one is the anchor, before they are context."""
        new = list(text[len(self.tokens) : -1])
        self.ahead += len(new)
        self._index(new)

    def _index(self, tokens: list[int]) -> None:
        """An n-gram is indexed when a token follows it: before, there is nothing to copy."""
        text = self.tokens
        for token in tokens:
            end = len(text)
            for size, ends in zip(self.sizes, self.ends, strict=True):
                if size <= end:
                    ends[tuple(text[end - size :])].append(end)
            text.append(token)
        self.expected += len(tokens)

    def continuation(self, anchor: int, length: int) -> list[int]:
        """Up to ``length`` tokens that followed where the text best agrees with its end and ``anchor``; maybe none."""
        return self.copy(*self.best_place(anchor), anchor, length)

    def copy(self, end: int, agreement: int, anchor: int, length: int) -> list[int]:
        """Up to ``length`` tokens from ``end`` on, no more than twice what agrees there.

        A copy that reaches the end of the text goes on with what it has copied: a repetition stays one.
        """
        if not agreement:
            return []
        self.expected = end
        length = min(length, 2 * agreement)
        copied = self.tokens[end : end + length]
        if len(copied) < length:
            copied.append(anchor)
        return [copied[i % len(copied)] for i in range(length)]

    def best_place(self, anchor: int) -> tuple[int, int]:
        """The position after the earlier anchor with the longest agreement, and that in tokens; ``(0, 0)`` for none.

        Of positions that agree equally, the nearest to where the last copy would go on.
        """
        best, agreement = self.expected, self._agreement(self.expected, 0, anchor)
        if agreement < self.sizes[-1]:
            best, agreement = 0, 0
        for size, ends in zip(self.sizes, self.ends, strict=True):
            ngram = (*self.tokens[max(len(self.tokens) + 1 - size, 0) :], anchor)
            positions = ends.get(ngram, [])
            for end in self._nearest_and_latest(positions):
                if agreement >= LONGEST:
                    break
                agrees = self._agreement(end, size, anchor)
                if agrees > agreement or (agrees == agreement and self._detour(end) < self._detour(best)):
                    best, agreement = end, agrees
            if positions:
                break
        return best, agreement

    def _nearest_and_latest(self, positions: list[int]) -> list[int]:
        """Some of many positions: those around where the last copy would go on, and the latest."""
        if len(positions) <= COMPARED:
            return positions
        near = bisect(positions, self.expected)
        return positions[max(near - COMPARED // 4, 0) : near + COMPARED // 4] + positions[-COMPARED // 2 :]

    def _agreement(self, end: int, known: int, anchor: int) -> int:
        """Tokens before ``end`` that equal the end of the text and ``anchor``; of the last ``known`` this is known."""
        text, held = self.tokens, len(self.tokens)
        if not known and not (0 < end < held and text[end - 1] == anchor):
            return 0
        agrees, most = max(known, 1), min(end, LONGEST)
        while agrees < most and text[end - 1 - agrees] == text[held - agrees]:
            agrees += 1
        return agrees

    def _detour(self, end: int) -> int:
        """Tokens between ``end`` and where the last copy would go on."""
        return abs(end - self.expected)


class NgramDrafter:
    """Looks up what to copy from the text so far, in some microseconds a block.

    Follows :class:`~dflash.drafters.protocol.Drafter`.

    Args:
        block_size: Most positions per block, the anchor included.
        sizes: Tokens that must agree for a place to be looked at, the anchor included; longer ones are looked up first.

    Raises ``GenerationError`` for sizes below 1.
    """

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, block_size: int = 16, sizes: tuple[int, ...] = SIZES):
        if not sizes or min(sizes) < 1:
            raise GenerationError(f"The sizes of n-grams must be at least 1, got {sizes}; the default is {SIZES}.")
        self.block_size, self.sizes = block_size, tuple(sizes)

    def bind(self, target: "LoadedTargetModel") -> None:
        """Every target fits: tokens are copied from its own text."""

    def make_cache(self) -> NgramCache:
        """An empty index."""
        return NgramCache(self.sizes)

    def extend_context(self, features: mx.array, cache: NgramCache, tokens: mx.array) -> None:
        """Index newly committed ``tokens [1, S]``; ``features [1, S, 0]`` are not read."""
        cache.extend(cast(list[list[int]], tokens.tolist())[0])

    def wakes(self, text: Sequence[int], cache: NgramCache) -> bool:
        """Whether so much agrees with the end of ``text`` that a copy is worth an end of the drafter's sleep."""
        cache.read_ahead(text)
        return cache.best_place(text[-1])[1] >= WAKING

    def propose(self, anchor: mx.array, length: int, cache: NgramCache) -> Proposal:
        """At most ``length`` tokens, none where nothing agrees, so that the target writes plainly."""
        found = cache.continuation(cast(int, anchor.item()), length)
        return Proposal(mx.array([found], dtype=mx.int32).reshape(1, len(found)))
