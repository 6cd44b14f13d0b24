"""The command `python -m jln doctor`: what is installed, what operators run on, and how to mend what is missing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jln
from jln._junction.linears.tiles import missing_fence
from jln._triton import cache, ptxas, target, tuning
from jln._triton.chip import CHIP_VARIABLE, Chip, platform_of
from jln.testing.operators import FORMS, step
from jln.testing.report import align

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "jax-triton", "triton")
PACKAGES += ("numpy", "flax", "dm-haiku", "equinox")
DEVICE_FILES = pathlib.Path("/dev")
# Of a Linear both strategies: the norm's kernels around XLA's products, and the kernels fused.
FEATURES = {"": 1024, ", few features": 64}


def run(local: list[Any]) -> int:
    """Print all of it for these devices; return 1 if something is broken, else 0: a missing GPU is no fault."""
    try:
        chip = target.target_chip()
    except ValueError as error:
        print(f"BROKEN: {CHIP_VARIABLE}: {error}")
        return 1
    versions = installed()
    print_table([("package", "installed"), *((name, version or "-") for name, version in versions.items())])
    print_table([("device", "kind"), *((str(device), device.device_kind) for device in local)])
    for device in {(d.platform, d.device_kind): d for d in local}.values():
        print_table([("operator", "runs", "kernels forward", "backward"), *choices(device)])
        if (why := implementations(device)["triton"]) is not None:
            print(f"triton cannot run on {device.device_kind}: {why}.")
    kept = f"{len(cache.entries())} in {folder}" if (folder := cache.folder()) else "not kept"
    print(f"Compiled kernels: {kept}.", *(_facts(chip) if chip else ()), sep="\n")
    faults = [f"BROKEN: {fault}" for fault in (*_bad_pairs(versions), *_idle_gpu(local))]
    print(*faults, "something is broken" if faults else "nothing is broken", sep="\n")
    return int(bool(faults))


def print_table(lines: list[tuple[str, ...]]) -> None:
    print(*align(lines, range(len(lines[0]))), "", sep="\n")


def devices() -> list[Any]:
    """JAX's devices and the CPU. Raises RuntimeError, or AssertionError, where JAX_PLATFORMS names what is not here."""
    local = jax.local_devices()
    if local[0].platform == "cpu":
        return local[:1]  # of --xla_force_host_platform_device_count, all on one piece of silicon
    with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS leaves it out
        local = [*local, jax.local_devices(backend="cpu")[0]]
    return local


def implementations(device: Any) -> dict[str, str | None]:
    """The reason why each implementation cannot run on a device, by implementation; None for one that can."""
    return {"triton": target.missing(platform_of(device)), "xla": None}


def installed() -> dict[str, str | None]:
    """The version of each package by name; None where it is not installed."""
    found = {"python": platform.python_version(), "jln": jln.__version__, **dict.fromkeys(PACKAGES)}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _bad_pairs(versions: dict[str, str | None]) -> Iterator[str]:
    """Say which versions do not work together, what comes of it, and what mends it."""
    numbers = {name: [int(n) for n in re.findall(r"\d+", v)[:3]] for name, v in versions.items() if v}
    if numbers.get("triton", [9]) < [3, 9] and numbers["numpy"] >= [2, 4]:
        yield "Triton's interpreter fails with triton before 3.9 and numpy 2.4, a GPU does not: install triton>=3.9"
    if any(numbers[name] != numbers["jaxlib"] for name in numbers if name.endswith("-plugin")):
        yield "JAX's plugin for the GPU is of another version than jaxlib, and so unused: install both of one version"


def choices(device: Any) -> Iterator[tuple[str, str, str, str]]:
    """Find what each operator runs on a device, by lowering its gradient for the device's platform."""
    for form in (form for name, form in FORMS.items() if name == form.name):
        for label, features in FEATURES.items():
            if form.is_linear or not label:
                function, arrays = form.function(), form.draw((256, 1024), (features,), "bfloat16")
                forward = _kernels(function, arrays, device)
                both = _kernels(step(function, form.arrays), (arrays, jax.eval_shape(function, *arrays)), device)
                first, second = (", ".join(names) or "-" for names in (forward, both[len(forward) :]))
                yield form.name + label, "triton" if both else "xla", first, second


def _kernels(function: Callable[..., Any], arguments: Any, device: Any) -> list[str]:
    """The Triton kernels that the default implementation launches on a device; none where that is XLA."""
    with target.recording() as launches, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that XLA runs instead: the table says so, and the reason
        jax.jit(lambda *a: function(*a)).trace(*arguments).lower(lowering_platforms=(platform_of(device),))
    return [launched.kernel.fn.__name__ for launched in launches]


def _facts(chip: Chip) -> Iterator[str]:
    """Say what the kernels are compiled for and by, which tiles were measured, and what is left to XLA."""
    yield f"Kernels are for {chip.name}, {chip}, of {chip.cores} cores."
    if measured := tuning.entries(chip):
        yield f"{len(measured)} of their tiles are as measured, of {os.environ[tuning.VARIABLE]}."
    if not chip.is_amd and (assembler := ptxas.find()) is not None:
        yield f"Their assembler: {ptxas.missing(chip) or assembler}."
    if (why := missing_fence(chip)) is not None:
        yield f"{why}."
    if chip.platform not in target.UNASKED:
        yield 'None stays XLA until a card has measured the kernels; implementation="triton" asks for them.'


def _idle_gpu(local: list[Any]) -> Iterator[str]:
    """Say which GPU is here that JAX, or Triton, does not use."""
    if gpus := [device for device in local if device.platform == "gpu"]:
        if (why := implementations(gpus[0])["triton"]) is not None:
            yield f"the GPU runs jln without its Triton kernels: {why}"
        return
    # A container has the number that its GPU has on the machine.
    for name, files in (("cuda", "nvidia[0-9]*"), ("rocm", "kfd")):
        if any(DEVICE_FILES.glob(files)):
            platforms = os.environ.get("JAX_PLATFORMS", "")
            hidden = f"JAX_PLATFORMS={platforms} may hide it" if platforms else target.INSTALL[name]
            yield f"there is a GPU for {name}, and JAX does not see it: {hidden}"
