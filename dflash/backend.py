"""Device, dtype and BLAS choices, all in one place.

Knows what MLX runs on and what that device computes in fast. Must not know any model.

Importing this module must come before the first ``import mlx.core`` of the process: MLX's CPU wheel for
Linux bundles the reference BLAS, and a faster one takes its place only if its symbols are loaded first.
"""

import ctypes
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BackendError

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

_SYSTEM_BLAS = "libopenblas.so.0"


def _mkl_library() -> Path | None:
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
        return "MLX's own (mlx was imported before dflash, too late for a faster one)"
    for library in (_mkl_library(), _SYSTEM_BLAS):
        if library is not None:
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return str(library)
    return "MLX's own (slow; install dflash-research[cpu] for a faster one)"


def require_mlx() -> None:
    """Raise :class:`BackendError` unless MLX has a backend here (the bare ``mlx`` wheel on Linux has none)."""
    try:
        import mlx.core as mx
    except ImportError as error:
        raise BackendError(
            f"MLX has no backend on this machine ({error}). Install one: "
            "pip install 'dflash-research[cpu]' (Linux), 'dflash-research[cuda]' (NVIDIA), "
            "or plain dflash-research on Apple silicon."
        ) from error
    mx.default_device()


def compute_dtype(stored: "mx.Dtype") -> "mx.Dtype":
    """The dtype in which weights stored as ``stored`` are computed with on the default device.

    MLX's CPU matrix products are 30 times slower in half precision than in float32; GPUs keep the
    stored dtype.
    """
    import mlx.core as mx

    half = stored in (mx.float16, mx.bfloat16)
    return mx.float32 if half and mx.default_device() == mx.Device(mx.cpu) else stored


def to_compute_dtype(model: "nn.Module") -> None:
    """Cast the floating-point weights of ``model`` in place to :func:`compute_dtype`."""
    import mlx.core as mx

    model.apply(lambda w: w.astype(compute_dtype(w.dtype)) if mx.issubdtype(w.dtype, mx.floating) else w)


blas = preload_blas()
"""The BLAS in use on the CPU: a library's path, or a sentence."""
