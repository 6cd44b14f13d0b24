"""The command `python -m jln doctor`: what is installed, what operators run on, and how to mend what is missing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jln
from jln._junction.linears.tiles import unfenced
from jln._triton import cache, lowering, ptxas, target, tuning
from jln._triton.chip import CHIP_VARIABLE, Chip, platform_of
from jln.testing.operators import FORMS, step
from jln.testing.report import align

# Distribution -> what it is for here, and how it comes; extras in a clone of jln.
PACKAGES = {
    "jax": ("everything", "pip install jax"),
    "jaxlib": ("everything", "pip install jaxlib"),
    "numpy": ("everything", "pip install numpy"),
    "jax-cuda13-plugin": ("NVIDIA GPUs, CUDA 13", 'pip install -e ".[cuda13]"'),
    "jax-cuda12-plugin": ("NVIDIA GPUs, CUDA 12", 'pip install -e ".[cuda12]"'),
    "jax-rocm7-plugin": ("AMD GPUs, ROCm 7", 'pip install -e ".[rocm7]"'),
    "jax-triton": ("Triton kernels on NVIDIA GPUs", target.INSTALL["cuda"]),
    "triton": ("Triton kernels, their interpreter", target.INSTALL["cuda"]),
    "flax": ("Flax modules", 'pip install -e ".[flax]"'),
    "dm-haiku": ("Haiku modules", 'pip install -e ".[haiku]"'),
    "equinox": ("Equinox modules", 'pip install -e ".[equinox]"'),
}
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin")
DEVICE_FILES = pathlib.Path("/dev")
# Of a Linear both strategies: the kernels fused, and the norm's around XLA's products.
FEATURES = {"": 1024, "few features": 64}


def run() -> int:
    """Print all of it; return 1 if something is broken, 2 if there is no device, else 0: a missing GPU is no fault."""
    local, complaints = devices()
    if not local:
        print(f"jln: no device: {'; '.join(complaints)}, JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}")
        return 2
    versions = installed()
    faults = [*_bad_pairs({name: parsed(v) for name, v in versions.items() if v is not None}), *_idle_gpu(local)]
    chip = _chip(faults)
    with warnings.catch_warnings(record=True) as warned:  # of what is wrong in a tuning file
        warnings.simplefilter("always")
        tiles = _tiles(chip)
    faults += [str(warning.message) for warning in warned]
    kinds = {(d.platform, d.device_kind): d for d in reversed(local)}
    packages = [(n, v or "-", "" if v else "for {}: {}".format(*PACKAGES[n])) for n, v in versions.items()]
    print_table([("package", "installed", "if you want it, in a clone of jln"), *packages])
    print_table([("device", "kind", "chip"), *(_facts(device) for device in local)])
    for device in reversed(kinds.values()):
        reasons = implementations(device)
        print_table([("operator", "runs", "kernels forward", "backward"), *choices(device)])
        for name in (name for name, why in reasons.items() if why):
            print(f"{name} cannot run on {device.device_kind}: {reasons[name]}.")
    said = [f"JAX says: {complaint}" for complaint in complaints] + [f"BROKEN: {fault}" for fault in faults]
    said.append("something is broken" if faults else "nothing is broken")
    print(tiles, _compiled_kernels(), *_of_chip(chip), *said, sep="\n")
    return int(bool(faults))


def print_table(lines: list[tuple[str, ...]]) -> None:
    print("\n".join([*align(lines, range(len(lines[0]))), ""]))


def devices() -> tuple[list[Any], list[str]]:
    """JAX's devices and the CPU, and what JAX complained of when it looked for them, a line each."""
    complaints: list[str] = []
    with _listening(complaints):
        try:
            local = jax.local_devices()
        except (RuntimeError, AssertionError) as error:  # a JAX_PLATFORMS that is not here; the latter where it is cuda
            return [], [*str(error).splitlines()[:1], *complaints]
    if local[0].platform == "cpu":
        return local[:1], complaints  # of --xla_force_host_platform_device_count, all on one piece of silicon
    with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS leaves it out
        local = [*local, jax.local_devices(backend="cpu")[0]]
    return local, complaints


@contextlib.contextmanager
def _listening(complaints: list[str]) -> Iterator[None]:
    logger = logging.getLogger("jax._src.xla_bridge")
    before = logger.handlers, logger.propagate
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(handler.format(record).strip().splitlines()[-1])
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before


def implementations(device: Any) -> dict[str, str | None]:
    """The reason why each implementation cannot run on a device, by implementation; None for one that can."""
    if device.platform == "gpu":
        return {"triton": target.missing(platform_of(device)), "xla": None}
    reason = None
    if device.platform != "cpu":
        reason = "the kernels are for NVIDIA and AMD GPUs"
    elif importlib.util.find_spec("triton") is None:
        reason = f"triton is not installed; its interpreter would run the kernels: {target.INSTALL['interpreter']}"
    elif not target.interpreting():
        reason = "the kernels are for NVIDIA and AMD GPUs; TRITON_INTERPRET=1 has Triton's interpreter run them, slowly"
    return {"triton": reason, "xla": None}


def installed() -> dict[str, str | None]:
    """The version of each package by name; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "jln": jln.__version__}
    for package in PACKAGES:
        found[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def parsed(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: 0.4.1.dev3 is (0, 4, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _bad_pairs(versions: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Say which versions do not work together, what comes of it, and what mends it."""
    if versions.get("triton", (9,)) < (3, 9) and versions.get("numpy", (0,)) >= (2, 4):
        yield "Triton's interpreter fails with triton before 3.9 and numpy 2.4, a GPU does not: install triton>=3.9"
    if any(versions[plugin][:3] != versions["jaxlib"][:3] for plugin in PLUGINS if plugin in versions):
        yield "JAX's plugin for the GPU is of another version than jaxlib, and so unused: install both of one version"


def _facts(device: Any) -> tuple[str, str, str]:
    chip = target.target_chip() if device.platform == "gpu" else None
    return str(device), device.device_kind, f"{chip}, {chip.cores} cores" if chip else "-"


def choices(device: Any) -> Iterator[tuple[str, str, str, str]]:
    """Find what each operator runs on a device, by lowering its gradient for the device's platform."""
    for form in (form for name, form in FORMS.items() if name == form.name):
        for label, features in FEATURES.items():
            if form.is_linear or not label:
                arrays = form.draw((256, 1024), (features,), "bfloat16")
                forward = _kernels(form.function(), arrays, device)
                results = jax.eval_shape(form.function(), *arrays)
                both = _kernels(step(form.function(), form.arrays), (arrays, results), device)
                name = f"{form.name}, {label}" if label else form.name
                backward = ", ".join(both[len(forward) :])
                yield name, "triton" if both else "xla", ", ".join(forward) or "-", backward or "-"


def _kernels(function: Callable[..., Any], arguments: Any, device: Any) -> list[str]:
    """The Triton kernels that the default implementation launches on a device; none where that is XLA."""
    with target.recording() as launches, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that XLA runs instead: the table says so, and the reason
        jax.jit(lambda *a: function(*a)).trace(*arguments).lower(lowering_platforms=(platform_of(device),))
    return [launched.kernel.fn.__name__ for launched in launches]


def _chip(faults: list[str]) -> Chip | None:
    """The chip of this process; None without one, or with a fault in JLN_CHIP."""
    try:
        return target.target_chip()
    except ValueError as error:
        faults.append(f"{CHIP_VARIABLE}: {error}")
        return None


def _tiles(chip: Chip | None) -> str:
    """Say where the kernels' tiles are from."""
    measured = ""
    if chip is not None and (path := tuning.file(chip)) is not None:
        measured = f"{len(tuning.entries(chip))} as measured, of {path}; others "
    return f"Tiles of the kernels: {measured}by rules of row length, layout, dtype and chip."


def _compiled_kernels() -> str:
    """Say where compiled kernels are kept."""
    if (folder := cache.folder()) is not None:
        return f"Compiled kernels: {len(cache.entries())} of at most {cache.LIMIT} in {folder}."
    why = f"{cache.VARIABLE} says" if cache.VARIABLE in os.environ else "the user has no folder for such"
    return f"Compiled kernels are not kept, as {why}."


def _of_chip(chip: Chip | None) -> Iterator[str]:
    """Say of a chip the assembler, why no Linear is fused, and why kernels must be asked for."""
    if chip is None:
        return
    if not chip.is_amd and lowering.missing(chip.platform) is None:
        said = ptxas.missing(chip)
        if (assembler := ptxas.found()) is not None and said is None:
            ptx = "Triton's PTX" if chip.ptx_version is None else f"PTX {chip.ptx_version / 10}"
            said = f"{assembler.path}, of CUDA {'.'.join(map(str, assembler.version))}, reads their {ptx}"
        yield f"Assembler of the kernels for {chip.name}: {said}."
    if (why := unfenced(chip)) is not None:
        yield f"{why}."
    if chip.platform not in target.UNASKED:
        reason = target.missing(chip.platform)
        asked = 'implementation="triton" asks for them' + ("" if reason is None else f" and cannot run here: {reason}")
        yield f"On {chip.name} None stays XLA until a card has measured the kernels; {asked}."


def _idle_gpu(local: list[Any]) -> list[str]:
    """Sentences on a GPU that is here and that JAX, or Triton, does not use; none where all is used."""
    gpus = [device for device in local if device.platform == "gpu"]
    if gpus:
        why = target.missing(platform_of(gpus[0]))
        return [] if why is None else [f"the GPU runs jln without its Triton kernels: {why}"]
    # A container has the number that its GPU has on the machine.
    for name, maker, files in (("cuda", "NVIDIA", "nvidia[0-9]*"), ("rocm", "AMD", "kfd")):
        if not any(DEVICE_FILES.glob(files)):
            continue
        if name not in (platforms := os.environ.get("JAX_PLATFORMS", name)) and "gpu" not in platforms:
            return [f"there is an {maker} GPU, and JAX_PLATFORMS={platforms} hides it: unset it"]
        return [f"there is an {maker} GPU, and JAX does not see it: {target.INSTALL[name]}"]
    return []
