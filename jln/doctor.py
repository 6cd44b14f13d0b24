"""The command `python -m jln doctor`: what is installed, what operators run on, and how to mend what is missing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import jln
from jln._junction.linears.tiles import missing_fence
from jln._triton import cache, ptxas, target
from jln._triton.chip import CHIP_VARIABLE, Chip, platform_of
from jln.testing.report import align

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "jax-triton", "triton")
PACKAGES += ("numpy", "flax", "dm-haiku", "equinox")
DEVICE_FILES = pathlib.Path("/dev")


def run(local: list[Any]) -> int:
    """Print all of it for these devices; return 1 if something is broken, else 0: a missing GPU is no fault."""
    try:
        chip = target.target_chip()
    except ValueError as error:
        print(f"BROKEN: {CHIP_VARIABLE}: {error}")
        return 1
    versions, has_gpu = installed(), local[0].platform == "gpu"
    kinds = {device.device_kind: device for device in local}
    reasons = {kind: target.missing(platform_of(device)) for kind, device in kinds.items()}
    said = [f"{'BROKEN: ' * has_gpu}triton cannot run on {kind}: {why}." for kind, why in reasons.items() if why]
    said += _bad_imports(versions, has_gpu)
    said += [f"BROKEN: {fault}" for fault in (*_bad_pairs(versions), *_hidden_gpus(has_gpu))]
    lacking = {name: "-" for name in PACKAGES if f" {name} is not installed" in " ".join(said).replace("_", "-")}
    print_table([("package", "installed"), *(versions | lacking).items()])
    print_table([("device", "kind"), *((str(device), device.device_kind) for device in local)])
    kept = f"{len(cache.entries())} in {folder}" if (folder := cache.folder()) else "not kept"
    print(f"Compiled kernels: {kept}.", *(_facts(chip) if chip else ()), sep="\n")
    for kind, device in kinds.items():
        has_kernels = reasons[kind] is None and platform_of(device) in target.UNASKED
        print(f"{'Triton kernels run' if has_kernels else 'XLA runs'} every operator on {kind}.")
    is_broken = any(sentence.startswith("BROKEN") for sentence in said)
    print(*said, "something is broken" if is_broken else "nothing is broken", sep="\n")
    return int(is_broken)


def print_table(lines: list[tuple[str, ...]]) -> None:
    print(*align(lines, range(len(lines[0]))), "", sep="\n")


def installed() -> dict[str, str]:
    """The version of each package that is installed, by name."""
    found = {"python": platform.python_version(), "jln": jln.__version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _bad_pairs(versions: dict[str, str]) -> Iterator[str]:
    """Say which versions do not work together, what comes of it, and what mends it."""
    numbers = {name: [int(n) for n in re.findall(r"\d+", v)[:3]] for name, v in versions.items()}
    if numbers.get("triton", [9]) < [3, 9] and numbers["numpy"] >= [2, 4]:
        yield "Triton's interpreter fails with triton before 3.9 and numpy 2.4, a GPU does not: install triton>=3.9"
    if any(numbers[name] != numbers["jaxlib"] for name in numbers if name.endswith("-plugin")):
        yield "JAX's plugin for the GPU is of another version than jaxlib, and so unused: install both of one version"


def _bad_imports(versions: dict[str, str], has_gpu: bool) -> Iterator[str]:
    """Import what is installed, and say what raises. Without a GPU its packages may, as jax-triton 0.3.1 does."""
    for package in filter(versions.get, PACKAGES):
        try:
            import_module(package.removeprefix("dm-").replace("-", "_"))
        except Exception as error:
            said = f"the import of {package} {versions[package]} raises {type(error).__name__}: {error}".splitlines()[0]
            yield f"Without a GPU no fault: {said}" if package.startswith("jax-") and not has_gpu else f"BROKEN: {said}"


def _facts(chip: Chip) -> Iterator[str]:
    """Say what the kernels are compiled for and by, and what is left to XLA."""
    yield f"Kernels are for {chip.name}, {chip}, of {chip.cores} cores."
    if not chip.is_amd and (assembler := ptxas.find()) is not None:
        yield f"Their assembler: {ptxas.missing(chip) or assembler}."
    if (why := missing_fence(chip)) is not None:
        yield f"{why}."
    if chip.platform not in target.UNASKED:
        yield 'None stays XLA until a card has measured the kernels; implementation="triton" asks for them.'


def _hidden_gpus(has_gpu: bool) -> Iterator[str]:
    """Say which GPU is here that JAX does not see, if it sees none."""
    # A container has the number that its GPU has on the machine.
    for name, files in (("cuda", "nvidia[0-9]*"), ("rocm", "kfd")):
        if not has_gpu and any(DEVICE_FILES.glob(files)):
            platforms = os.environ.get("JAX_PLATFORMS", "")
            hidden = f"JAX_PLATFORMS={platforms} may hide it" if platforms else target.INSTALL[name]
            yield f"there is a GPU for {name}, and JAX does not see it: {hidden}"
