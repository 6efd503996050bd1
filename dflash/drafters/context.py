"""The context cache of a drafter: keys and values of committed tokens, all or those that a window can still see.

Shapes: B batch, K key-value heads, S committed tokens, L block positions, D head size. A row is one token's keys and
values.
"""

from collections.abc import Sequence

import mlx.core as mx

from .layers import block_mask
from .rows import Ragged

SPARE = 256  # free rows of a new buffer: room for a block, and how often a window's buffer is moved


class LayerContext:
    """The newest rows of one layer's context, in the order of their positions, in a buffer that is filled in place.

    ``limit`` is how many rows are kept, ``None`` for all. A full buffer's newest rows move to the front of a new one,
    every :data:`SPARE` tokens or later, so that memory and time of a window do not grow with the context. Rows are in
    order of position, without gaps: the last one belongs to position ``offset - 1``.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.offset = 0  # committed tokens, kept or not; the position of the next one
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._start = self._end = 0  # the rows of the buffer that are kept

    @property
    def held(self) -> int:
        """Rows kept."""
        return self._end - self._start

    @property
    def state(self) -> tuple[mx.array, mx.array] | tuple[()]:
        """Keys and values of the rows kept, each ``[B, K, held, D]``; empty before the first."""
        if self.keys is None or self.values is None:
            return ()
        return self.keys[..., self._start : self._end, :], self.values[..., self._start : self._end, :]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, spare rows included."""
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    def newest_of(self, length: int) -> int:
        """How many of ``length`` new tokens will be kept (the newest)."""
        return length if self.limit is None else min(length, self.limit)

    def append(self, keys_BKSD: mx.array, values_BKSD: mx.array) -> None:
        """Commit the rows of the next tokens, at most ``limit`` of them."""
        new = keys_BKSD.shape[2]
        kept = self.held if self.limit is None else min(self.held, self.limit - new)
        self._write(keys_BKSD, values_BKSD, kept)
        self._end += new
        self._start = self._end - kept - new
        self.offset += new

    def skip(self, length: int) -> None:
        """Commit ``length`` tokens without rows. Older rows are dropped, since rows have no gaps."""
        if length:
            self._start = self._end
            self.offset += length

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens. A window does not regain rows that it dropped for later ones."""
        self._end -= min(self.offset - length, self.held)
        self.offset = length

    def restore(self, keys_BKSD: mx.array, values_BKSD: mx.array, length: int) -> None:
        """Fill an empty layer with ``length`` tokens whose newest rows these are; at most ``limit`` are kept."""
        kept = self.newest_of(keys_BKSD.shape[2])
        self.skip(length - kept)
        if kept:
            self.append(keys_BKSD[..., -kept:, :], values_BKSD[..., -kept:, :])

    def with_block(self, keys_BKLD: mx.array, values_BKLD: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values of the context followed by a block's, each ``[B, K, held + L, D]``.

        The block is written to spare rows, so that nothing is concatenated. It never becomes part of the context: the
        next block, or committed tokens, overwrite it.
        """
        self._write(keys_BKLD, values_BKLD, self.held)
        assert self.keys is not None
        assert self.values is not None
        rows = slice(self._start, self._end + keys_BKLD.shape[2])
        return self.keys[..., rows, :], self.values[..., rows, :]

    def block_mask(self, length: int, window: int | None, causal: bool) -> mx.array | None:
        """The mask of a block over :meth:`with_block`; it depends on distances only, so the oldest row counts as 0."""
        return block_mask(self.held, length, window, causal)

    @staticmethod
    def merge(contexts: Sequence["LayerContext"]) -> "BatchContext":
        """The contexts of several texts, as mlx-lm merges its caches."""
        merged, *others = (BatchContext(context) for context in contexts)
        for other in others:
            merged.extend(other)
        return merged

    def _write(self, keys: mx.array, values: mx.array, kept: int) -> None:
        """Write rows after the last one; a full buffer is replaced by one that starts with the ``kept`` newest rows."""
        new = keys.shape[2]
        if self.keys is None or self.values is None or self._end + new > self.keys.shape[2]:
            old = slice(self._end - kept, self._end)
            self.keys = _moved(self.keys, old, keys, new + SPARE)
            self.values = _moved(self.values, old, values, new + SPARE)
            self._start, self._end = 0, kept
        rows = slice(self._end, self._end + new)
        self.keys[..., rows, :] = keys
        self.values[..., rows, :] = values


class ContextCache:
    """The context of every layer of a drafter, computed once per committed token.

    Args:
        limits: How many of the newest tokens each layer keeps, ``None`` for all.
    """

    def __init__(self, limits: Sequence[int | None]):
        self.layers = [LayerContext(limit) for limit in limits]

    @property
    def offset(self) -> int:
        """Number of committed context tokens: the position of the anchor."""
        return self.layers[0].offset

    @property
    def state(self) -> list[tuple[mx.array, mx.array] | tuple[()]]:
        """The arrays held, for ``mx.eval``."""
        return [layer.state for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.nbytes for layer in self.layers)

    def newest_of(self, length: int) -> int:
        """How many of ``length`` new tokens (the newest) any layer will keep. The others need not be computed."""
        return max(layer.newest_of(length) for layer in self.layers)

    def skip(self, length: int) -> None:
        """Commit ``length`` tokens without rows, so that later tokens get the right positions."""
        for layer in self.layers:
            layer.skip(length)

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        for layer in self.layers:
            layer.rewind(length)


class BatchContext(Ragged):
    """The :class:`LayerContext` of several texts, one a batch row, with the methods of mlx-lm's batch caches.

    Every text has a place of its own in the buffer at which its next tokens are written, so that what one rejects moves
    nothing. A buffer that is full for one of them is replaced, and each text's kept rows move to its beginning.
    """

    def __init__(self, context: LayerContext):
        self.limit = context.limit
        self.keys, self.values = context.keys, context.values
        self.offsets = [context.offset]
        self._starts, self._ends = [context._start], [context._end]  # of the rows kept of each text

    @property
    def offset(self) -> mx.array:
        """Committed tokens of each text, ``[B]``."""
        return mx.array(self.offsets)

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for ``mx.eval``."""
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.state)

    def append(self, keys_BKSD: mx.array, values_BKSD: mx.array, counts: Sequence[int] | None = None) -> None:
        """Commit the first ``counts[i]`` new tokens of each text ``i``, by default what :meth:`counts` says."""
        counts = self.counts(len(self.offsets), keys_BKSD.shape[2]) if counts is None else counts
        self._write(keys_BKSD, values_BKSD)
        self.offsets = [offset + count for offset, count in zip(self.offsets, counts, strict=True)]
        self._ends = [end + count for end, count in zip(self._ends, counts, strict=True)]
        if self.limit is not None:
            limit = self.limit
            self._starts = [max(start, end - limit) for start, end in zip(self._starts, self._ends, strict=True)]

    def with_block(self, keys_BKLD: mx.array, values_BKLD: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values of contexts and blocks, each ``[B, K, S, D]``; :meth:`block_mask` hides the rest."""
        self._write(keys_BKLD, values_BKLD)
        assert self.keys is not None
        assert self.values is not None
        end = max(self._ends) + keys_BKLD.shape[2]
        return self.keys[..., :end, :], self.values[..., :end, :]

    def block_mask(self, length: int, window: int | None, causal: bool) -> mx.array:
        """The mask ``[B, 1, L or 1, S]`` over :meth:`with_block`: for each text that of its block alone."""
        starts, ends = (mx.array(places)[:, None, None, None] for places in (self._starts, self._ends))
        entries = mx.arange(max(self._ends) + length)
        queries = ends + mx.arange(length)[:, None]
        visible = (entries >= starts) & (entries < ends + length)
        if window is not None:
            visible = visible & ((entries >= ends) | (entries > queries - window))
        return visible & (entries <= queries) if causal else visible

    def filter(self, rows: Sequence[int]) -> None:
        """Keep these texts, and of the buffer what they use."""
        self.offsets, self._starts, self._ends = (
            [places[row] for row in rows] for places in (self.offsets, self._starts, self._ends)
        )
        if self.keys is not None and self.values is not None:
            kept, room = mx.array(list(rows)), max(self._ends, default=0) + SPARE
            self.keys, self.values = self.keys[:, :, :room][kept], self.values[:, :, :room][kept]

    def extend(self, other: "BatchContext") -> None:
        """Take in the texts of another batch."""
        mine, theirs = len(self.offsets), len(other.offsets)
        if self.keys is not None or other.keys is not None:
            self.keys = _stacked(self.keys, mine, other.keys, theirs)
            self.values = _stacked(self.values, mine, other.values, theirs)
        self.offsets = self.offsets + other.offsets
        self._starts, self._ends = self._starts + other._starts, self._ends + other._ends

    def extract(self, row: int) -> LayerContext:
        """One text's context."""
        context = LayerContext(self.limit)
        if self.keys is None or self.values is None:
            return context
        kept = slice(self._starts[row], self._ends[row])
        context.restore(self.keys[row : row + 1, :, kept], self.values[row : row + 1, :, kept], self.offsets[row])
        return context

    def _write(self, keys: mx.array, values: mx.array) -> None:
        """Write new rows after each text's last one, in a buffer that has room for them."""
        new = keys.shape[2]
        if self.keys is None or self.values is None or max(self._ends) + new > self.keys.shape[2]:
            held = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
            kept = mx.array(self._starts)[:, None] + mx.arange(max(held))
            self.keys = _gathered(self.keys, kept, keys, new + SPARE)
            self.values = _gathered(self.values, kept, values, new + SPARE)
            self._starts, self._ends = [0] * len(held), held
        places = (mx.array(self._ends)[:, None] + mx.arange(new))[:, None, :, None]
        self.keys = mx.put_along_axis(self.keys, mx.broadcast_to(places, keys.shape), keys, axis=2)
        self.values = mx.put_along_axis(self.values, mx.broadcast_to(places, values.shape), values, axis=2)


def _gathered(buffer: mx.array | None, kept_BS: mx.array, like: mx.array, spare: int) -> mx.array:
    """A new buffer: the rows ``kept_BS`` of each text, then ``spare`` free ones."""
    if buffer is not None:
        # A text with fewer rows than others gets what lies after them; no index may be outside.
        inside = mx.minimum(kept_BS, buffer.shape[2] - 1)[:, None, :, None]
        buffer = mx.take_along_axis(buffer, inside, axis=2)
    return _moved(buffer, slice(None), like, spare)


def _stacked(mine: mx.array | None, count: int, theirs: mx.array | None, others: int) -> mx.array:
    """Buffers of two batches as one, as long as the longer."""
    like = mine if mine is not None else theirs
    assert like is not None
    _, heads, _, size = like.shape
    parts = [
        mx.zeros((rows, heads, 0, size), like.dtype) if buffer is None else buffer
        for buffer, rows in ((mine, count), (theirs, others))
    ]
    longest = max(part.shape[2] for part in parts)
    return mx.concatenate([mx.pad(part, [(0, 0), (0, 0), (0, longest - part.shape[2]), (0, 0)]) for part in parts])


def _moved(buffer: mx.array | None, kept: slice, like: mx.array, spare: int) -> mx.array:
    """A new buffer: rows ``kept`` of the old one, then ``spare`` free ones."""
    batch, heads, _, size = like.shape
    free = mx.zeros((batch, heads, spare, size), like.dtype)
    return free if buffer is None else mx.concatenate([buffer[..., kept, :], free], axis=2)
