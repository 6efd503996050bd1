"""What something was measured on: versions, device, BLAS, time, and the commit of a checkout."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import backend

PACKAGES = ("dflash-research", "mlx", "mlx-lm", "transformers")


def environment(threads: object | None = None) -> dict[str, Any]:
    """Plain data for JSON: what a reader needs to compare two results later.

    ``blas_threads`` is the text of ``threads`` (the choice made for decoding), by default the process's own number.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {name: package_version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "platform": platform.platform(),
        "device": device_name(),
        "blas": backend.blas,
        "blas_threads": str(threads or backend.blas_threads()),
    }


def commit() -> str | None:
    """The git commit of the checkout that this package runs from, ``+`` after it if files differ from that commit.

    ``None`` for an installed package.
    """
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(here), *command], capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+" if changes else "")


def device_name() -> str:
    """MLX's default device: ``cpu`` or ``gpu``, and the name of the chip where it is known."""
    device = mx.default_device()
    name = mx.device_info(device).get("device_name", "")
    return str(device.type).removeprefix("DeviceType.") + (f" ({name})" if name else "")


def package_version(package: str) -> str:
    """The installed version of a package, or that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
