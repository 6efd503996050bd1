"""What this machine and a given target would use: versions, device, BLAS, adapter, caches, rewind.

Knows where to look. Must not know the command line or how decoding works.
"""

import platform
import time
from collections import Counter
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from .. import backend
from ..environment import PACKAGES, device_name, package_version
from ..policies.threads import left_alone, threads_for
from ..target import LoadedTargetModel
from ..target.rewind import describe

_MATMUL_SIZE = 1024  # takes 0.3 s with the slowest BLAS seen (7 GFLOP/s), so five repeats stay bearable
_REPEATS = 5
_BLOCK_SIZE = 16  # tokens of a pass, as published drafters have them


def machine_report() -> dict[str, str]:
    """Versions, device and measured speed of this machine, in the order in which to show them."""
    report = {name: package_version(name) for name in PACKAGES}
    report["python"] = platform.python_version()
    report["platform"] = platform.platform()
    report["device"] = device_name()
    report["BLAS (CPU)"] = backend.blas
    report["BLAS threads"] = left_alone() or f"up to {backend.blas_threads()}; each decoder measures how many are best"
    report["float32 product"] = f"{matmul_gflops():.0f} GFLOP/s at {_MATMUL_SIZE} x {_MATMUL_SIZE} on this device"
    return report


def target_report(target: LoadedTargetModel, name: str) -> dict[str, str]:
    """What ``target``, loaded from ``name``, is and would use.

    A cache without an exact rewind is reported, not raised.
    """
    caches = make_prompt_cache(target.model)
    threads = threads_for(target, min(_BLOCK_SIZE, target.max_length or _BLOCK_SIZE))
    threads.measure()
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
