"""The devices of this machine, and which implementations run on them."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from typing import Any

import jax

from jln._tools.console import UserError
from jln._triton import target
from jln._triton.chip import platform_of

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
