"""The context cache of a drafter: keys and values of committed tokens, all or those that a window can still see.

Shapes: B batch, K key-value heads, S committed tokens, L block positions, D head size. A row is one token's keys and
values.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..target.ring import Ring

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
        """The mask of a block over :meth:`with_block`: ``[L, held + L]``, or ``None`` if everything is visible.

        The query at position ``t`` sees context positions ``> t - window``, and in its own block all positions, or with
        ``causal`` only those up to itself. Only distances count, so the oldest row is at 0 here.
        """
        if not causal and (window is None or self.held + length <= window):
            return None
        positions = mx.arange(self.held + length)
        queries = positions[self.held :, None]
        visible_context = True if window is None else positions > queries - window
        visible_block = positions <= queries if causal else True
        return mx.where(positions >= self.held, visible_block, visible_context)

    @staticmethod
    def merge(contexts: Sequence["LayerContext"]) -> Ring:
        """The :class:`BatchContext` of several texts, as mlx-lm merges its caches."""
        return Ring.merge([BatchContext(context) for context in contexts])

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


class BatchContext(Ring):
    """The :class:`LayerContext` of several texts, one a batch row."""

    def __init__(self, context: LayerContext):
        super().__init__(context.limit, context.offset, *(context.state if context.held else (None, None)))

    def append(self, keys_BKSD: mx.array, values_BKSD: mx.array, counts: Sequence[int] | None = None) -> None:
        """Commit the first ``counts[i]`` new tokens of each text ``i``, by default what :meth:`counts` says."""
        self.write(keys_BKSD, values_BKSD)
        self.advance(self.counts(*keys_BKSD.shape[::2]) if counts is None else counts)

    def with_block(self, keys_BKLD: mx.array, values_BKLD: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values of contexts and blocks, each ``[B, K, R, D]``; :meth:`block_mask` hides the rest."""
        return self.write(keys_BKLD, values_BKLD)

    def block_mask(self, length: int, window: int | None, causal: bool) -> mx.array:
        """The mask ``[B, 1, L or 1, R]`` over :meth:`with_block`: for each text that of its block alone."""
        held, queries = self.positions(length)
        visible = held >= mx.array(self.oldest())[:, None, None, None]
        if window is not None:
            visible = visible & ((held >= queries[:, :, :1]) | (held > queries - window))
        return visible & (held <= queries) if causal else visible

    def extract(self, row: int) -> LayerContext:
        """One text's context."""
        context = LayerContext(self.limit)
        if entries := self.entries(row):
            context.restore(*entries, self.offsets[row])
        else:
            context.skip(self.offsets[row])
        return context


def _moved(buffer: mx.array | None, kept: slice, like: mx.array, spare: int) -> mx.array:
    """A new buffer: rows ``kept`` of the old one, then ``spare`` free ones."""
    batch, heads, _, size = like.shape
    free = mx.zeros((batch, heads, spare, size), like.dtype)
    return free if buffer is None else mx.concatenate([buffer[..., kept, :], free], axis=2)
