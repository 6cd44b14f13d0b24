"""The machine that a measurement runs on: its device, and what is installed."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

import jln

HERE = str(pathlib.Path(__file__).parent)
PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "numpy", "flax", "dm-haiku", "tokamax", "torch", "liger-kernel")


def version(distribution: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), "jln": jln.__version__} | {name: version(name) for name in PACKAGES}


def environment() -> dict[str, Any]:
    """The first device, the machine's load, the commit and all versions."""
    device = jax.devices()[0]
    kind = device.device_kind
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # A copy of the files, without a repository, has no commit: then the caller must name it.
        "commit": os.environ.get("JLN_COMMIT")
        or _printed("git", "-C", HERE, "describe", "--always", "--dirty", "--exclude", "*"),
        "platform": device.platform,
        "chip": kind if kind != device.platform else _processor(),
        "driver": _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        or _printed("cat", "/sys/module/amdgpu/version"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "versions": versions(),
    }


def _printed(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
