"""Device, dtype and BLAS choices, all in one place.

Importing this module must come before the first ``import mlx.core`` of the process: MLX's CPU wheel for
Linux bundles the reference BLAS, and a faster one takes its place only if its symbols are loaded first.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib.metadata
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BackendError, install_extra

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

logger = logging.getLogger(__name__)

BLAS_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables with which the user chooses the number of threads."""

_SYSTEM_BLAS = "libopenblas.so.0"
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # <malloc.h>


def mkl_library() -> Path | None:
    """The run-time library of the ``mkl`` wheel (the ``cpu`` extra installs it), if there is one."""
    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.name.startswith("libmkl_rt.so")), None)


def preload_blas() -> str:
    """Load MKL or OpenBLAS ahead of MLX on Linux; returns the library used, or why there is none."""
    if platform.system() != "Linux":
        return "MLX's own"
    if "mlx.core" in sys.modules:
        if on_cpu() and mkl_library() is not None:
            logger.warning("mlx was imported before dflash, too late for the fast BLAS: import dflash first.")
        return "MLX's own (mlx was imported before dflash, too late for a faster one)"
    for library in (mkl_library(), _SYSTEM_BLAS):
        if library is not None:
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return str(library)
    return f"MLX's own (slow; {install_extra('cpu')} for a faster one)"


def wait_for_this_thread() -> None:
    """Call this in a thread that will use MLX: the process then gives the thread time to end before it exits.

    Otherwise MLX 0.32 often aborts the process at its exit ("terminate called without an active exception"), because
    a thread's own state, such as that of random numbers, is destroyed after Python has joined the thread.
    """
    if threading.current_thread() is not threading.main_thread():
        atexit.unregister(_let_threads_end)
        atexit.register(_let_threads_end)


def _let_threads_end() -> None:
    time.sleep(0.1)


def require_mlx() -> None:
    """Raise :class:`BackendError` unless MLX has a backend here (the bare ``mlx`` wheel on Linux has none)."""
    try:
        import mlx.core as mx
    except ImportError as error:
        raise BackendError(
            f"MLX has no backend on this machine ({error}); {install_extra('cpu')} on Linux, "
            "'cuda' with NVIDIA's GPUs, none on Apple silicon."
        ) from error
    mx.default_device()


def on_cpu() -> bool:
    """Whether MLX computes on the CPU by default."""
    import mlx.core as mx

    return mx.default_device() == mx.Device(mx.cpu)


def machine_memory() -> int:
    """Bytes that MLX can use: the GPU's memory if there is a GPU, otherwise the machine's."""
    import mlx.core as mx

    size = None if on_cpu() else mx.device_info().get("memory_size")
    return int(size) if size else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def begins_early() -> bool:
    """Whether a graph goes to the device in parts while it is built: to a CPU, if BLAS leaves the host a core.

    A GPU takes a graph as a whole. On a CPU whose cores all multiply matrices, the host would only take one of them
    away.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return on_cpu() and (blas_threads() or 1) < cores


def begin(*arrays: Any) -> None:
    """Let the device compute ``arrays`` while the host builds the rest of the graph.

    Not inside ``mx.grad``, ``vmap`` or ``compile``: a graph that is transformed has no values yet, and MLX refuses.
    """
    import mlx.core as mx

    with contextlib.suppress(ValueError):
        mx.async_eval(*arrays)


def compute_dtype(stored: "mx.Dtype") -> "mx.Dtype":
    """The dtype in which weights stored as ``stored`` are computed with on the default device.

    MLX's CPU matrix products are far slower in half precision than in float32; GPUs keep the stored dtype.
    """
    import mlx.core as mx

    half = stored in (mx.float16, mx.bfloat16)
    return mx.float32 if half and on_cpu() else stored


def to_compute_dtype(model: "nn.Module") -> None:
    """Cast the floating-point weights of ``model`` in place to :func:`compute_dtype`."""
    import mlx.core as mx

    model.apply(lambda w: w.astype(compute_dtype(w.dtype)) if mx.issubdtype(w.dtype, mx.floating) else w)


def keep_freed_memory() -> bool:
    """Make malloc reuse large blocks instead of unmapping them; returns whether this system has the switch.

    glibc returns large freed blocks to the system, so every new array of some megabytes pays a page fault for each
    4 kB, which can cost more than an element-wise operation itself.
    """
    if platform.system() != "Linux":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        logger.info("No glibc here; training runs with the system's malloc as it is.")
        return False
    # One arena: MLX's worker threads free what the main thread allocated.
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1), mallopt(_ARENA_MAX, 1)])


def set_blas_threads(count: int) -> bool:
    """Threads of one matrix product, for MKL or OpenBLAS if either is loaded; returns whether it is.

    The setting is global to the process: MLX computes on its stream's thread, which follows at the next product.
    """
    function = _blas_function("MKL_Set_Num_Threads", "openblas_set_num_threads")
    if function is not None:
        function(count)
    return function is not None


def blas_threads() -> int | None:
    """The most threads of one matrix product; ``None`` where neither MKL nor OpenBLAS is loaded."""
    function = _blas_function("MKL_Get_Max_Threads", "openblas_get_num_threads")
    return None if function is None else int(function())


@contextlib.contextmanager
def using_blas_threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads inside the ``with`` block, and with as many as before after it."""
    before = blas_threads() or 1
    try:
        set_blas_threads(count)
        yield
    finally:
        set_blas_threads(before)


def why_blas_threads_stay() -> str | None:
    """Why the number of threads is not to be chosen here; ``None`` if it may be."""
    count = blas_threads()
    if not on_cpu():
        return "left alone: MLX does not compute on the CPU"
    if count is None:
        return "left alone: MLX's own BLAS has no such setting"
    if variable := next((name for name in BLAS_VARIABLES if os.environ.get(name)), None):
        return f"{count}: {variable} is set"
    return "1: only one thread is available" if count == 1 else None


@functools.cache
def _blas_function(in_mkl: str, in_openblas: str) -> Callable[..., int] | None:
    loaded = ctypes.CDLL(None)
    return next((getattr(loaded, name) for name in (in_mkl, in_openblas) if hasattr(loaded, name)), None)


blas = preload_blas()
"""The BLAS in use on the CPU: a library's path, or a sentence."""

# cuDNN plans its attention anew for each pair of query and key lengths, tens of milliseconds a time, and a block nearly
# always has a pair of its own. MLX reads this with its first attention.
os.environ.setdefault("MLX_CUDA_USE_CUDNN_SDPA", "0")
