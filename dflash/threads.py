"""How many threads a matrix product gets while decoding on a CPU: chosen by the time of the target's own passes.

Knows the BLAS's thread count and how long passes take. Must not know tokens, text or how a block is decoded.

The threads of a product wait for each other at its end. Where another process keeps a core busy, one of them waits
for its turn at every product, and a pass takes several times as long as on one thread; on a quiet machine one thread
takes up to 1.5 times as long as two. So the count is measured, and measured again while decoding goes on. A prompt is
read before, with the process's own count: its products are large enough for all threads, and plain decoding reads it
with that count too. How long threads spin before they sleep (``KMP_BLOCKTIME``) is left alone: on two cores and models
of 6 to 135 million weights, two threads that sleep at once lost to two that spin on the quiet machine, and to one
thread on a busy one; and ``kmp_set_blocktime`` holds for the thread that calls it, which is never the one on which MLX
computes.
"""

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import mlx.core as mx

from . import backend

if TYPE_CHECKING:
    from .block import Block
    from .target import LoadedTargetModel

VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""A user's own settings: where one of them is set, its count is kept."""

_GAIN = 0.87  # of the present time: what is not clearly quicker is not worth a change, nor noise a flapping
_ROUNDS, _PASSES = 2, 2  # of all counts in turns, as the machine changes meanwhile; timed passes a round
_LONG = 0.5  # seconds of a pass that is timed once
_PERIOD = 40  # decode this many times as long as a measurement took before the next: 2.5 % of the time
_PERIOD_IF_CHANGED = 10  # the same where passes have become slow, or twice as long or short as those timed
_SLOW, _SLOW_PASSES = 1.5, 4  # so many passes in a row, each so many times the usual time, are a change
_ENOUGH, _LAST = 8, 64  # passes from which their usual length is known, and the most that are looked at

_in_use = threading.Lock()  # the count is the process's, so one use at a time decides it

RunPass = Callable[[int], mx.array]
"""Computes the logits of a pass of so many tokens."""


class DecodeThreads:
    """The thread count that one decoder's passes run fastest with.

    A count whose logits differ in any bit from those of the process's own count is never chosen, so that the text
    does not depend on how busy the machine was.

    Args:
        run_pass: A target pass of its argument's number of tokens, evaluated; returns the logits.
        block_size: Tokens of the longest pass. It is timed first, and later one as long as most were.
        clock: Seconds.
    """

    def __init__(self, run_pass: RunPass, block_size: int, clock: Callable[[], float] = time.perf_counter):
        self.seconds: dict[int, float] = {}
        """Shortest time of a pass of ``timed`` tokens at each count, from the last measurement."""
        self.timed = block_size
        self.count: int | None = None
        """The chosen count; ``None`` before the first measurement and where the count is left alone."""
        self.measuring = 0.0
        """Seconds of all measurements so far."""
        self._run_pass, self._block_size, self._clock = run_pass, block_size, clock
        self._most: int | None = None
        self._other_bits: list[int] = []
        self._cost = self._spent = 0.0  # seconds of the last measurement, and of decoding since then
        self._usual: dict[int, float] = {}  # seconds of a block by its drafts
        self._slow = 0  # blocks in a row that took much longer
        self._lengths: deque[int] = deque(maxlen=_LAST)  # tokens of the last passes, since the last measurement

    @contextmanager
    def in_use(self) -> Iterator[bool]:
        """Set the count inside, measured first where that is due; the process has its own again afterwards.

        Yields whether this use decides the count: within another one, of whatever decoder, it does not.
        """
        if not _in_use.acquire(blocking=False):
            yield False
            return
        most = backend.blas_threads() or 1
        decides = left_alone() is None
        try:
            if decides:
                self._decide(most)
            yield decides
        finally:
            if decides:
                backend.set_blas_threads(most)
            _in_use.release()

    def watch(self, blocks: "Iterator[Block]", decides: bool = True) -> "Iterator[Block]":
        """The same blocks, each timed; between two of them the count may change, in a use that ``decides`` it."""
        while True:
            began = self._clock()
            block = next(blocks, None)
            if block is None:
                return
            self.observe(len(block.drafted), self._clock() - began)
            yield block
            if decides and self._due() and self._most is not None:
                self._decide(self._most)

    def observe(self, drafted: int, seconds: float) -> None:
        """Learn from a block of ``drafted`` tokens what decoding costs now."""
        self._spent += seconds
        self._lengths.append(drafted + 1)
        usual = self._usual.setdefault(drafted, seconds)
        if seconds > _SLOW * usual:
            self._slow += 1
        else:
            self._slow = 0
            self._usual[drafted] += 0.2 * (seconds - usual)

    def measure(self) -> None:
        """Measure now, whatever is due; nothing where the count is left alone."""
        self._spent = float("inf")
        with self.in_use():
            pass

    def __str__(self) -> str:
        """The choice and its reason, in one phrase."""
        if self.count is None:
            return left_alone() or "chosen by the target's passes when a text begins"
        times = ", ".join(f"{1000 * s:.3g} ms with {n}" for n, s in sorted(self.seconds.items()))
        others = f"; logits differ with {', '.join(map(str, self._other_bits))}" if self._other_bits else ""
        return f"{self.count} of {self._most}: a pass of {self.timed} tokens takes {times}{others}"

    def _due(self) -> bool:
        changed = self._slow >= _SLOW_PASSES or not self.timed / 2 < self._usual_length() < 2 * self.timed
        return self.count is None or self._spent >= (_PERIOD_IF_CHANGED if changed else _PERIOD) * self._cost

    def _usual_length(self) -> int:
        """Tokens of most of the last passes, two at least; as long as those are few, of what was timed."""
        return max(2, statistics.median_low(self._lengths)) if len(self._lengths) >= _ENOUGH else self.timed

    def _decide(self, most: int) -> None:
        if self._due() or most != self._most:
            began = self._clock()
            self._measure(most)
            self._cost, self._spent, self._slow, self._usual = self._clock() - began, 0.0, 0, {}
            self.measuring += self._cost
        backend.set_blas_threads(self.count or most)

    def _measure(self, most: int) -> None:
        self.timed = self._usual_length()
        self._lengths.clear()
        counts, seconds, logits = sorted(candidates(most)), {}, {}
        for count in counts:  # fewest first: threads that are not needed any more spin for a while
            backend.set_blas_threads(count)
            logits[count] = [self._run_pass(tokens) for tokens in sorted({1, self._block_size} - {self.timed})]
            seconds[count], last = self._time_pass()
            logits[count].append(last)
        if max(seconds.values()) < _LONG:  # or what the first pass of all pays, such as memory, hardly counts
            for count in counts * _ROUNDS:
                backend.set_blas_threads(count)
                seconds[count] = min(seconds[count], *(self._time_pass()[0] for _ in range(_PASSES)))
        self._other_bits = [n for n in sorted(logits) if not _same_bits(logits[n], logits[most])]
        usable = {n: s for n, s in seconds.items() if n not in self._other_bits} or {most: seconds[most]}
        now = self.count if self.count in usable else most
        self.seconds, self.count, self._most = seconds, best_count(usable, now), most

    def _time_pass(self) -> tuple[float, mx.array]:
        began = self._clock()
        logits = self._run_pass(self.timed)
        return self._clock() - began, logits


def left_alone() -> str | None:
    """Why decoding does not choose the thread count here; ``None`` where it does."""
    count = backend.blas_threads()
    if not backend.on_cpu():
        return "left alone: MLX does not compute on the CPU"
    if count is None:
        return "left alone: MLX's own BLAS has no such setting"
    if variable := next((name for name in VARIABLES if os.environ.get(name)), None):
        return f"{count}: {variable} is set"
    return "1: this process has no more" if count == 1 else None


def candidates(most: int) -> set[int]:
    """Counts worth a measurement: all, one fewer (another process has a core), half, and one."""
    return {most, max(1, most - 1), max(1, most // 2), 1}


def best_count(seconds: Mapping[int, float], now: int) -> int:
    """The count of the shortest time if that is clearly shorter than with the count ``now``.

    Otherwise the fewest threads, no more than now, that take no longer: the host builds the next part of the graph
    while these run, and a core that they leave to it is time gained.
    """
    best = min(seconds, key=lambda count: seconds[count])
    if seconds[best] < _GAIN * seconds[now]:
        return best
    return min(count for count in seconds if count <= now and seconds[count] <= seconds[now])


def threads_for(target: "LoadedTargetModel", block_size: int) -> DecodeThreads:
    """The choice for decoding with ``target``; nothing is measured before it is used."""

    def run_pass(tokens: int) -> mx.array:
        ids = mx.arange(tokens)[None] % target.vocab_size
        logits, features = target.forward_with_hidden_states(ids, target.make_cache(), [0])
        mx.eval(logits, features)
        return logits

    return DecodeThreads(run_pass, block_size)


def _same_bits(one: list[mx.array], other: list[mx.array]) -> bool:
    return all(mx.array_equal(a, b).item() for a, b in zip(one, other, strict=True))
