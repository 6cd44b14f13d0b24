"""The devices of this machine, and which implementations run on them."""

from __future__ import annotations

import contextlib
import importlib.util
import os

import jax

from jln._cli.console import UserError
from jln._triton import launch


def devices(wanted: str | None = None) -> list[jax.Device]:
    """JAX's own, and the CPU. `wanted`: "cpu", "gpu", or one of them, as "gpu:1"."""
    try:
        found = jax.local_devices()
    except RuntimeError as error:  # such as a JAX_PLATFORMS that is not here
        raise UserError(f"no device: {str(error).splitlines()[0]}") from None
    if found[0].platform == "cpu":
        found = found[:1]  # of --xla_force_host_platform_device_count, all on one piece of silicon
    else:
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS leaves it out
            found = [*found, jax.local_devices(backend="cpu")[0]]
    if wanted is None:
        return found
    names = {named(device): device for device in found}
    chosen = [d for name, d in names.items() if wanted in (name, name.split(":")[0])]
    if not chosen:
        raise UserError(f"no device {wanted!r}; there are {', '.join(names)}")
    return chosen


def named(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def described(device: jax.Device) -> str:
    """With its model, where that says more than the platform."""
    kind = device.device_kind
    return named(device) if kind == device.platform else f"{named(device)} ({kind})"


def interpret_without_a_gpu() -> None:
    """Have Triton's interpreter run the kernels on the CPU where nothing else could. Before triton is imported."""
    if importlib.util.find_spec("triton") and not any(d.platform == "gpu" for d in devices()):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def implementations(device: jax.Device) -> dict[str, str | None]:
    """From each implementation to why it cannot run there; None where it can."""
    if device.platform == "gpu":
        return {"triton": launch.missing(), "xla": None}
    if device.platform != "cpu":
        return {"triton": "the kernels are for NVIDIA GPUs", "xla": None}
    if importlib.util.find_spec("triton") is None:
        reason = f"triton is not installed; its interpreter would run the kernels: {launch.INSTALL}"
    elif not launch.interpreting():
        reason = "the kernels are for NVIDIA GPUs; TRITON_INTERPRET=1 has Triton's interpreter run them, slowly"
    else:
        reason = None
    return {"triton": reason, "xla": None}
