"""What this machine, a target and a drafter would use: versions, device, BLAS, adapter, caches, what decoding costs."""

import platform
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..core import backend
from ..core.environment import PACKAGES, device_name, package_version
from ..decoding.block import Decoding
from ..decoding.loop import decode, prefill
from ..generate import DFlashSpeculativeDecoder
from ..policies.adaptive import LENGTHS
from ..policies.base import BlockRecord, Policy
from ..policies.threads import left_alone, threads_for
from ..target import LoadedTargetModel
from ..target.rewind import describe

_MATMUL_SIZE = 1024  # takes 0.3 s with the slowest BLAS seen (7 GFLOP/s), so five repeats stay bearable
_REPEATS = 5
_BLOCK_SIZE = 16  # tokens of a pass, as published drafters have them
_ROUNDS, _PLAIN_STEPS = 7, 4  # of each length; of plain steps in a round
_CONTEXT = 64  # tokens before the timed blocks
RATES = (0.3, 0.5, 0.7, 0.9)
"""Acceptance rates for which :func:`costs_report` gives speed-ups."""


def machine_report() -> dict[str, str]:
    """Versions, device and measured speed of this machine, in the order in which to show them."""
    report = {name: package_version(name) for name in PACKAGES}
    report["python"] = platform.python_version()
    report["platform"] = platform.platform()
    report["device"] = device_name()
    report["BLAS (CPU)"] = backend.blas
    report["BLAS threads"] = left_alone() or f"up to {backend.blas_threads()}; each decoder takes the quickest count"
    report["float32 product"] = f"{matmul_gflops():.0f} GFLOP/s at {_MATMUL_SIZE} x {_MATMUL_SIZE} on this device"
    return report


def target_report(target: LoadedTargetModel, name: str) -> dict[str, str]:
    """What ``target``, loaded from ``name``, is and would use.

    A cache without an exact rewind is reported, not raised.
    """
    caches = make_prompt_cache(target.model)
    threads = threads_for(target, min(_BLOCK_SIZE, target.max_length or _BLOCK_SIZE))
    return {
        "target": name,
        "adapter": type(target.adapter).__name__,
        "layers": str(target.num_layers),
        "hidden size": str(target.hidden_size),
        "vocabulary": str(target.vocab_size),
        "longest sequence": str(target.max_length or "not given"),
        "caches and rewind": describe_caches(caches),
        "compute dtype": _weight_dtypes(target),
        "BLAS threads": str(threads),
    }


def describe_caches(caches: list[Any]) -> str:
    """Cache kinds with their counts and rewind rules, such as ``28 KVCache (trim)``."""
    counts = Counter(describe(caches))
    kinds = [f"{n} {kind} ({rule or 'no exact rewind: cannot be decoded'})" for (kind, rule), n in counts.items()]
    return ", ".join(kinds)


def matmul_gflops(size: int = _MATMUL_SIZE) -> float:
    """Best rate of a few float32 matrix products ``[size, size] @ [size, size]`` in GFLOP/s."""
    a = mx.random.uniform(shape=(size, size), key=mx.random.key(0))
    mx.eval(a, a @ a)
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        mx.eval(a @ a)
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds) / 1e9


def _weight_dtypes(target: LoadedTargetModel) -> str:
    """Floating-point dtypes of the loaded weights, the most frequent first."""
    dtypes = [w.dtype for w in dict(tree_flatten(target.model.parameters())).values()]
    counts = Counter(str(d).removeprefix("mlx.core.") for d in dtypes if mx.issubdtype(d, mx.floating))
    return ", ".join(name for name, _ in counts.most_common())


class _EachLength(Policy):
    """Plain steps, then blocks of each length in turn, so that a load on the machine meets all of them."""

    def __init__(self, lengths: Sequence[int]):
        self.times: dict[int, list[float]] = {0: [], **{length: [] for length in lengths}}
        self._todo = [length for _ in range(_ROUNDS) for length in (*[0] * _PLAIN_STEPS, *lengths)]

    @property
    def done(self) -> bool:
        return not self._todo

    def sleep(self) -> int:
        # All of a round at once: a step alone could not begin while the one before it ends.
        return next((i for i, length in enumerate(self._todo) if length), len(self._todo))

    def draft_length(self, most: int) -> int:
        return min(self._todo[0] if self._todo else most, most)

    def observe(self, block: BlockRecord) -> None:
        length = 0 if block.asleep else block.verified
        if self._todo and self._todo[0] == length:
            self.times[self._todo.pop(0)].append(block.seconds)


def costs(decoder: DFlashSpeculativeDecoder, context: int = _CONTEXT) -> dict[int, float]:
    """Median seconds of a block by the number of tokens that it drafts and verifies, after ``context`` tokens.

    0 stands for a plain step. A drafter that proposes fewer tokens than it is asked for has no time for those lengths.
    """
    context = min(context, decoder.max_seq_length // 2)
    lengths = [k for k in LENGTHS if k < decoder.block_size]
    policy = _EachLength(lengths)
    run = Decoding(decoder.loaded_target, decoder.draft_model, policy=policy)
    with decoder.threads.in_use():
        state = prefill(run, [i % decoder.loaded_target.vocab_size for i in range(context)])
        room = min(decoder.max_seq_length - context, _ROUNDS * (_PLAIN_STEPS + sum(lengths) + len(lengths)))
        for _ in decode(run, state, room, decoder.block_size):
            if policy.done:
                break
    return {length: statistics.median(times) for length, times in policy.times.items() if times}


def costs_report(costs: dict[int, float]) -> list[tuple[str, ...]]:
    """Rows of text: each length with its time, the acceptance rate from which it beats plain decoding, and speed-ups.

    The rates hold for every draft whose predecessors were right, and so the speed-ups are what the default policy aims
    at. A line for plain decoding comes first.
    """
    plain = costs[0]

    def speedup(length: int, rate: float) -> float:
        return sum(rate**i for i in range(length + 1)) * plain / costs[length]

    best = {rate: max(costs, key=lambda length: speedup(length, rate)) for rate in RATES}
    rows = []
    for length, seconds in costs.items():
        pays = next((f"{rate / 100:.2f}" for rate in range(101) if speedup(length, rate / 100) >= 1), "never")
        gains = (f"{speedup(length, rate):.2f}{'*' if best[rate] == length else ''}" for rate in RATES)
        rows.append((str(length), f"{1000 * seconds:.2f}", f"{seconds / plain:.2f}", pays if length else "", *gains))
    return rows
