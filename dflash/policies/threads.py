"""The number of BLAS threads for decoding on a CPU, measured once when a decoder is made."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from ..core import backend

if TYPE_CHECKING:
    from ..target import LoadedTargetModel

ROUNDS = 3  # timed passes per count; the fastest one counts
WORTH = 0.85  # share of the time that more threads may take: they leave the host no core, which a pass alone hides

_in_use = threading.Lock()  # the count belongs to the process, so one use at a time sets it


class DecodeThreads:
    """The fewest threads with which one target's passes are about as fast: all, half or one, if the bits are equal.

    Args:
        run_pass: Runs a target pass over the given number of tokens and returns its evaluated logits.
        tokens: Length of the timed pass: a whole block.
        clock: Returns seconds.

    :attr:`count` is ``None`` if the process's own count is left alone. :attr:`seconds` holds the time of a pass by
    count.
    """

    def __init__(
        self, run_pass: Callable[[int], mx.array], tokens: int, clock: Callable[[], float] = time.perf_counter
    ):
        self.count: int | None = None
        self.seconds: dict[int, float] = {}
        self._tokens, self._reason = tokens, backend.why_blas_threads_stay()
        if self._reason is not None:
            return
        own = backend.blas_threads() or 1
        counts, logits = sorted({own, max(1, own // 2), 1}), {}
        for count in counts:
            with backend.using_blas_threads(count):
                logits[count] = [run_pass(1), run_pass(tokens)]
        same = partial(mx.array_equal, equal_nan=True)  # a damaged target is told of when it decodes
        equal = [n for n in counts if all(map(same, logits[n], logits[own]))]
        for count in equal * ROUNDS:
            with backend.using_blas_threads(count):
                began = clock()
                run_pass(tokens)
                took = clock() - began
            self.seconds[count] = min(took, self.seconds.get(count, took))
        self.count = min(n for n, took in self.seconds.items() if min(self.seconds.values()) >= WORTH * took)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the chosen count inside the ``with`` block, unless another decoder's block already sets the count."""
        if self.count is None or not _in_use.acquire(blocking=False):
            yield
            return
        try:
            with backend.using_blas_threads(self.count):
                yield
        finally:
            _in_use.release()

    def __str__(self) -> str:
        """The choice and its reason, in one phrase."""
        times = ", ".join(f"{1000 * s:.3g} ms with {n}" for n, s in sorted(self.seconds.items()))
        return self._reason or f"{self.count}: a pass of {self._tokens} tokens takes {times}"


def threads_for(target: "LoadedTargetModel", block_size: int) -> DecodeThreads:
    """The thread count for decoding with ``target`` in blocks of ``block_size`` tokens."""

    def run_pass(tokens: int) -> mx.array:
        ids = mx.arange(tokens)[None] % target.vocab_size
        logits, features = target.forward_with_hidden_states(ids, target.make_cache(), [0])
        mx.eval(logits, features)
        return logits

    return DecodeThreads(run_pass, block_size)
