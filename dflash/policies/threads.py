"""How many threads a matrix product gets while decoding on a CPU: chosen by the time of the target's own passes.

Knows the BLAS's thread count and how long passes take. Must not know tokens, text or how a block is decoded, nor when
another count is worth a trial (``thread_trials.py``).

The threads of a product wait for each other at its end. Where another process keeps a core busy, one of them waits
for its turn at every product, and a pass takes several times as long as on one thread; on a quiet machine one thread
takes up to 1.5 times as long as two. So the counts are measured before the first text. After that no pass is run to
measure: now and then a block of a text is decoded with another count, and its time tells whether to change. A prompt
is read before, with the process's own count: its products are large enough for all threads, and plain decoding reads
it with that count too. How long threads spin before they sleep (``KMP_BLOCKTIME``) is left alone: on two cores and
models of 6 to 135 million weights, two threads that sleep at once lost to two that spin on the quiet machine, and to
one thread on a busy one; and ``kmp_set_blocktime`` holds for the thread that calls it, which is never the one on which
MLX computes.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import mlx.core as mx

from .. import backend
from .estimates import PLAIN
from .thread_trials import GAIN, Trials

if TYPE_CHECKING:
    from ..block import Block
    from ..target import LoadedTargetModel

VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""A user's own settings: where one of them is set, its count is kept."""

_ROUNDS = 2  # more timed passes of the counts in question, in turns, as the machine changes meanwhile
_CLEAR = 1.5  # times as long as the quickest: out of the question, as noise moves a pass by a third
_LONG = 0.5  # seconds of a pass that is timed once

_in_use = threading.Lock()  # the count is the process's, so one use at a time decides it

RunPass = Callable[[int], mx.array]
"""Computes the logits of a pass of so many tokens."""


class DecodeThreads:
    """The thread count that one decoder's passes run fastest with.

    A count whose logits differ in any bit from those of the process's own count, in a pass of one token or of a whole
    block, is never chosen. Lengths between them are not compared.

    Args:
        run_pass: A target pass of its argument's number of tokens, evaluated; returns the logits.
        block_size: Tokens of the longest pass, which is the one timed.
        clock: Seconds.
    """

    def __init__(self, run_pass: RunPass, block_size: int, clock: Callable[[], float] = time.perf_counter):
        self.seconds: dict[int, float] = {}
        """Shortest time of a pass of ``timed`` tokens at each count, from the last measurement."""
        self.timed = block_size
        self.count: int | None = None
        """The chosen count; ``None`` before the first measurement and where the count is left alone."""
        self.measuring = 0.0
        """Seconds of all measurements so far; blocks that try another count are none."""
        self._run_pass, self._clock = run_pass, clock
        self._most: int | None = None
        self._other_bits: list[int] = []
        self._trials = Trials({}, 1)
        self._changed = False  # since the last measurement

    @contextmanager
    def in_use(self) -> Iterator[bool]:
        """Set the count inside, measured first where none is known; the process has its own again afterwards.

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
        """The same blocks, each timed; some are decoded with another count, in a use that ``decides`` it."""
        while True:
            trial = self._trials.due() if decides else None
            if trial is not None:
                backend.set_blas_threads(trial)
            began = self._clock()
            block = next(blocks, None)
            seconds = self._clock() - began
            if trial is not None:
                backend.set_blas_threads(self._trials.count)
            if block is None:
                return
            length = PLAIN if block.asleep else len(block.drafted)
            if trial is not None:
                self._judge(trial, length, seconds)
            elif decides or backend.blas_threads() == self._trials.count:  # not another use's count
                self.observe(length, seconds)
            yield block

    def observe(self, drafted: int, seconds: float) -> None:
        """Learn from a block of ``drafted`` tokens, or a :data:`PLAIN` step, decoded with the present count."""
        self._trials.observe(drafted, seconds)

    def measure(self) -> None:
        """Measure now, whatever is known; nothing where the count is left alone."""
        self.count = None
        with self.in_use():
            pass

    def __str__(self) -> str:
        """The choice and its reason, in one phrase."""
        if self.count is None:
            return left_alone() or "chosen by the target's passes when a text begins"
        times = ", ".join(f"{1000 * s:.3g} ms with {n}" for n, s in sorted(self.seconds.items()))
        others = f"; logits differ with {', '.join(map(str, self._other_bits))}" if self._other_bits else ""
        said = f"a pass of {self.timed} tokens {'took' if self._changed else 'takes'} {times}{others}"
        if self._changed:
            said = f"blocks became quicker with it; before the first text {said}"
        return f"{self.count} of {self._most}: {said}"

    def _judge(self, trial: int, drafted: int, seconds: float) -> None:
        self._trials.judge(trial, drafted, seconds)
        if self._trials.count != self.count:
            self.count, self._changed = self._trials.count, True
            backend.set_blas_threads(self.count)

    def _decide(self, most: int) -> None:
        if self.count is None or most != self._most:
            began = self._clock()
            self._measure(most)
            self.measuring += self._clock() - began
        backend.set_blas_threads(self.count or most)

    def _measure(self, most: int) -> None:
        seconds, logits = {}, {}
        for count in sorted(candidates(most)):  # fewest first: threads that are not needed any more spin for a while
            backend.set_blas_threads(count)
            one = self._run_pass(1)
            seconds[count], block = self._time_pass()
            logits[count] = [one, block]
        self._other_bits = [n for n in logits if not _same_bits(logits[n], logits[most])]
        usable = {n: s for n, s in seconds.items() if n not in self._other_bits} or {most: seconds[most]}
        for _ in range(_ROUNDS):
            for count in _in_question(usable):
                backend.set_blas_threads(count)
                usable[count] = min(usable[count], self._time_pass()[0])
        self.seconds, self.count, self._most = seconds | usable, best_count(usable, most), most
        self._trials, self._changed = Trials(usable, self.count), False

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


def _in_question(seconds: Mapping[int, float]) -> list[int]:
    """Counts of which another timed pass can tell which is the quickest."""
    close = [count for count in seconds if seconds[count] < _CLEAR * min(seconds.values())]
    # What the first pass of all pays, such as memory, hardly counts in a long one.
    return close if len(close) > 1 and max(seconds[count] for count in close) < _LONG else []


def best_count(seconds: Mapping[int, float], now: int) -> int:
    """The count of the shortest time if that is clearly shorter than with the count ``now``.

    Otherwise the fewest threads, no more than now, that take no longer: the host builds the next part of the graph
    while these run, and a core that they leave to it is time gained.
    """
    best = min(seconds, key=lambda count: seconds[count])
    if seconds[best] < GAIN * seconds[now]:
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
