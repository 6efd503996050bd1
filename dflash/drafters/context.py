"""What a drafter's layers keep of the committed context: all of it, or the rows that their windows can still see.

Knows keys and values, and the positions that they belong to. Must not know how they are computed, masks, or targets.

Shapes: B batch, K key-value heads, S committed tokens, L block positions, D head size. A row is one token's keys and
values.
"""

from collections.abc import Sequence

import mlx.core as mx

SPARE = 256  # rows beside those that are kept: how often a buffer is moved, and the least room for a block


class LayerContext:
    """The newest rows of one layer's context, in the order of their positions, in a buffer that is filled in place.

    ``limit`` is how many rows are kept, ``None`` for all. A window's buffer moves its newest rows to the front of a
    new one when it is full, every :data:`SPARE` tokens or later, so that memory and time do not grow with the text.
    Rows always lie in time order, without gaps: the last one belongs to position ``offset - 1``.
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
        """Keys and values of the rows kept, each ``[B, K, held, D]``; nothing before the first."""
        if self.keys is None or self.values is None:
            return ()
        return self.keys[..., self._start : self._end, :], self.values[..., self._start : self._end, :]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, spare rows included."""
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    def newest_of(self, length: int) -> int:
        """How many of ``length`` new tokens will be kept: the newest."""
        return length if self.limit is None else min(length, self.limit)

    def append(self, keys_BKSD: mx.array, values_BKSD: mx.array) -> None:
        """Commit the next tokens' rows, at most ``limit`` of them."""
        new = keys_BKSD.shape[2]
        kept = self.held if self.limit is None else min(self.held, self.limit - new)
        self._write(keys_BKSD, values_BKSD, kept)
        self._end += new
        self._start = self._end - kept - new
        self.offset += new

    def skip(self, length: int) -> None:
        """Commit ``length`` tokens without rows. No older row is kept: between rows there may be no gap."""
        if length:
            self._start = self._end
            self.offset += length

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens. A window does not get back the rows that it had dropped for later ones."""
        self._end -= min(self.offset - length, self.held)
        self.offset = length

    def restore(self, keys_BKSD: mx.array, values_BKSD: mx.array, length: int) -> None:
        """Begin with ``length`` tokens, of which these are the newest rows; those past ``limit`` are left out."""
        kept = self.newest_of(keys_BKSD.shape[2])
        self.skip(length - kept)
        if kept:
            self.append(keys_BKSD[..., -kept:, :], values_BKSD[..., -kept:, :])

    def beside(self, keys_BKLD: mx.array, values_BKLD: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values of the context and, after them, of a block, each ``[B, K, held + L, D]``.

        The block borrows the spare rows, so that nothing is concatenated. It never becomes part of the context: the
        next block or committed tokens overwrite it.
        """
        self._write(keys_BKLD, values_BKLD, self.held)
        assert self.keys is not None
        assert self.values is not None
        rows = slice(self._start, self._end + keys_BKLD.shape[2])
        return self.keys[..., rows, :], self.values[..., rows, :]

    def _write(self, keys: mx.array, values: mx.array, kept: int) -> None:
        """Put rows after the last one, where needed in a new buffer that begins with the ``kept`` newest ones."""
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
        limits: Newest tokens that each layer keeps, ``None`` for all.
    """

    def __init__(self, limits: Sequence[int | None]):
        self.layers = [LayerContext(limit) for limit in limits]

    @property
    def offset(self) -> int:
        """Context tokens committed, which is the position of the anchor."""
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
        """How many of ``length`` new tokens some layer will keep: the newest. The others need not be computed."""
        return max(layer.newest_of(length) for layer in self.layers)

    def skip(self, length: int) -> None:
        """Commit ``length`` tokens of which nothing is known; later ones keep their positions."""
        for layer in self.layers:
            layer.skip(length)

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        for layer in self.layers:
            layer.rewind(length)


def _moved(buffer: mx.array | None, kept: slice, like: mx.array, spare: int) -> mx.array:
    """A new buffer: rows ``kept`` of the old one, then ``spare`` free ones."""
    batch, heads, _, size = like.shape
    free = mx.zeros((batch, heads, spare, size), like.dtype)
    return free if buffer is None else mx.concatenate([buffer[..., kept, :], free], axis=2)
