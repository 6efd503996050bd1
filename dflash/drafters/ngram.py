"""Prompt lookup decoding (``--drafter ngram``): drafts what followed the latest tokens when they occurred before.

It needs no training. Output that repeats the prompt or itself (an edited file, a quotation, a table) is drafted by
copying. Three things go beyond the usual lookup:

- The occurrence with the longest match is copied, not the latest one.
- After an edit, copying resumes where it stopped.
- At most twice the length of the match is drafted, since a short match is weak evidence (SuffixDecoding,
  arXiv:2411.04975).
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from ..core.errors import GenerationError
from .kinds import register_drafter
from .protocol import Proposal

if TYPE_CHECKING:
    from ..target import LoadedTargetModel

NAME = "ngram"
"""The drafter's name in ``load_drafter`` and ``--drafter``."""

SIZES = (5, 2)
"""Lengths of the indexed n-grams, the anchor included; the longest that occurred before is looked up."""

COMPARED = 32  # occurrences of an n-gram that are compared
LONGEST = 32  # a longer match is cut off at this many tokens
RESUMING = 12  # a match of this many tokens ends a fallback to plain decoding


class NgramCache:
    """The tokens so far and an index: for each size, the positions where every n-gram ended.

    ``expected`` is where the last copy would continue. ``ahead`` counts indexed tokens that are not context yet, during
    a fallback to plain decoding.
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
        """Append committed tokens; those read ahead are indexed already."""
        known, self.ahead = self.ahead, 0
        self._index(tokens[known:])

    def read_ahead(self, text: Sequence[int]) -> None:
        """Index all of ``text`` but the anchor, its last token, before it becomes context."""
        new = list(text[len(self.tokens) : -1])
        self.ahead += len(new)
        self._index(new)

    def _index(self, tokens: list[int]) -> None:
        """Append tokens. An n-gram is indexed once a token follows it: before, there is nothing to copy."""
        text = self.tokens
        for token in tokens:
            end = len(text)
            for size, ends in zip(self.sizes, self.ends, strict=True):
                if size <= end:
                    ends[tuple(text[end - size :])].append(end)
            text.append(token)
        self.expected += len(tokens)

    def continuation(self, anchor: int, length: int) -> list[int]:
        """Up to ``length`` tokens (maybe none) that followed the best match of the text's end and ``anchor``."""
        return self.copy(*self.best_place(anchor), anchor, length)

    def copy(self, end: int, agreement: int, anchor: int, length: int) -> list[int]:
        """Up to ``length`` tokens from position ``end`` on, at most twice the match's length ``agreement``.

        A copy that reaches the end of the text continues with what it has copied, so that a repetition goes on.
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
        """The position after the longest match, and the match's length in tokens; ``(0, 0)`` if there is none.

        Of equally long matches, the nearest to where the last copy would continue.
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
        """At most ``COMPARED`` positions: those around where the last copy would continue, and the latest."""
        if len(positions) <= COMPARED:
            return positions
        near = bisect(positions, self.expected)
        return positions[max(near - COMPARED // 4, 0) : near + COMPARED // 4] + positions[-COMPARED // 2 :]

    def _agreement(self, end: int, known: int, anchor: int) -> int:
        """How many tokens before ``end`` equal the end of the text and ``anchor``; the last ``known`` are known to."""
        text, held = self.tokens, len(self.tokens)
        if not known and not (0 < end < held and text[end - 1] == anchor):
            return 0
        agrees, most = max(known, 1), min(end, LONGEST)
        while agrees < most and text[end - 1 - agrees] == text[held - agrees]:
            agrees += 1
        return agrees

    def _detour(self, end: int) -> int:
        """Distance in tokens between ``end`` and where the last copy would continue."""
        return abs(end - self.expected)


@register_drafter(NAME)
class NgramDrafter:
    """Drafts by copying from the text so far.

    Follows :class:`~dflash.drafters.protocol.WakingDrafter`.

    Args:
        block_size: Most positions per block, the anchor included.
        sizes: Lengths of the n-grams that are looked up, the anchor included; longer ones first.

    Raises ``GenerationError`` for sizes below 1.
    """

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, block_size: int = 16, sizes: tuple[int, ...] = SIZES):
        if not sizes or min(sizes) < 1:
            raise GenerationError(f"The sizes of n-grams must be at least 1, got {sizes}; the default is {SIZES}.")
        self.block_size, self.sizes = block_size, tuple(sizes)

    def bind(self, target: "LoadedTargetModel") -> None:
        """Nothing to check: tokens are copied from the target's own text."""

    def make_cache(self) -> NgramCache:
        """An empty index."""
        return NgramCache(self.sizes)

    def extend_context(self, features: mx.array, cache: NgramCache, tokens: mx.array) -> None:
        """Index newly committed ``tokens [1, S]``; ``features [1, S, 0]`` are not read."""
        cache.extend(cast(list[list[int]], tokens.tolist())[0])

    def wakes(self, text: Sequence[int], cache: NgramCache) -> bool:
        """Whether the match at the end of ``text`` is long enough to resume drafting."""
        cache.read_ahead(text)
        return cache.best_place(text[-1])[1] >= RESUMING

    def propose(self, anchor: mx.array, length: int, cache: NgramCache) -> Proposal:
        """At most ``length`` copied tokens; none without a match."""
        found = cache.continuation(cast(int, anchor.item()), length)
        return Proposal(mx.array([found], dtype=mx.int32).reshape(1, len(found)))
