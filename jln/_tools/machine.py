"""The machine that this runs on: its devices, which implementations run on them, and what is installed."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
import platform
import subprocess
from collections.abc import Iterator
from typing import Any

import jax

import jln
from jln._tools.console import UserError, known
from jln._tools.peers import PEERS
from jln._triton import target, tuning
from jln._triton.chip import CHIP_VARIABLE, CHIPS, platform_of

Device = Any  # a jax.Device, which type checkers take for a variable


def devices(wanted: str | None = None) -> list[Device]:
    """JAX's devices, and the CPU. `wanted`: "cpu", "gpu", or one device, as "gpu:1"."""
    try:
        with _listening():
            local = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # a JAX_PLATFORMS that is not here; the latter where it is cuda
        reasons = [*str(error).splitlines()[:1], *complaints, f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"]
        raise UserError(f"no device: {reasons[0]}") from None
    if local[0].platform == "cpu":
        local = local[:1]  # of --xla_force_host_platform_device_count, all on one piece of silicon
    else:
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS leaves it out
            local = [*local, jax.local_devices(backend="cpu")[0]]
    if wanted is None:
        return local
    names = {named(device): device for device in local}
    chosen = [d for name, d in names.items() if wanted in (name, name.split(":")[0])]
    if not chosen:
        raise UserError(f"no device {wanted!r}; there are {', '.join(names)}")
    return chosen


# What JAX logged, a traceback each, when it looked for devices: the last lines.
complaints: list[str] = []


@contextlib.contextmanager
def _listening() -> Iterator[None]:
    """Keep JAX's complaints from stderr, and collect them."""
    logger = logging.getLogger("jax._src.xla_bridge")
    before = logger.handlers, logger.propagate
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(handler.format(record).strip().splitlines()[-1])
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before


def named(device: Device) -> str:
    return f"{device.platform}:{device.id}"


def described(device: Device) -> str:
    """A device by its platform and number, with its model where that says more than the platform."""
    kind = device.device_kind
    return named(device) if kind == device.platform else f"{named(device)} ({kind})"


def known_chip_variable() -> None:
    """Raise UserError for a chip in JLN_CHIP that nobody knows."""
    if name := os.environ.get(CHIP_VARIABLE):
        known(CHIP_VARIABLE, [name], CHIPS)


def interpret_without_a_gpu() -> None:
    """Have Triton's interpreter run the kernels on the CPU where there is no GPU; call it before triton is imported."""
    if importlib.util.find_spec("triton") and not any(d.platform == "gpu" for d in devices()):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def implementations(device: Device) -> dict[str, str | None]:
    """The reason why each implementation cannot run on a device, by implementation; None for one that can."""
    if device.platform == "gpu":
        return {"triton": target.missing(platform_of(device)), "xla": None}
    if device.platform != "cpu":
        return {"triton": "the kernels are for NVIDIA and AMD GPUs", "xla": None}
    if importlib.util.find_spec("triton") is None:
        reason = f"triton is not installed; its interpreter would run the kernels: {target.INSTALL['interpreter']}"
    elif not target.interpreting():
        reason = "the kernels are for NVIDIA and AMD GPUs; TRITON_INTERPRET=1 has Triton's interpreter run them, slowly"
    else:
        reason = None
    return {"triton": reason, "xla": None}


def version(distribution: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


VERSIONED = ("jaxlib", "jax-triton", "triton", "numpy")


def environment(device: Any) -> dict[str, Any]:
    versions = {p.distribution: version(p.distribution) for p in PEERS.values()} | {"jln": jln.__version__}
    versions |= {name: version(name) for name in VERSIONED} | {"python": platform.python_version()}
    kind = device.device_kind
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # A copy of the files, without a repository, has no commit: then the caller must name it.
        "commit": os.environ.get("JLN_COMMIT")
        or _printed("git", "-C", str(pathlib.Path(jln.__file__).parent), "describe", "--always", "--dirty"),
        "platform": device.platform,
        "chip": kind if kind != device.platform else _processor(),
        "driver": _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        or _printed("cat", "/sys/module/amdgpu/version"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "versions": versions,
        "tuning": tuning.in_force(chip) if device.platform == "gpu" and (chip := target.target_chip()) else None,
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
