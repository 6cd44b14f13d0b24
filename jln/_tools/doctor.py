"""The command `python -m jln doctor`: what is installed, what operators run on, and how to mend what is missing."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import re
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import typer

import jln
from jln._junction.linears.tiles import unfenced
from jln._tools import machine
from jln._tools.catalogue import OPERATORS
from jln._tools.console import Column, Note, Rows, progress, show
from jln._tools.machine import Device, complaints, described, devices, implementations
from jln._tools.workload import FORWARD, Workload
from jln._triton import cache, lowering, ptxas, target, tuning
from jln._triton.chip import CHIP_VARIABLE, Chip, platform_of

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

DEVICE_FILES = pathlib.Path("/dev")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin")

Versions = dict[str, tuple[int, ...]]


class BadPair(NamedTuple):
    """Two packages' versions that do not work together."""

    what: str
    effect: str
    fix: str
    here: Callable[[Versions], bool]


def _between(versions: Versions, package: str, least: tuple[int, ...], below: tuple[int, ...]) -> bool:
    return package in versions and least <= versions[package] < below


_EVER = (10**9,)
BAD_PAIRS = (
    BadPair(
        "triton before 3.9 with numpy 2.4",
        "Triton's interpreter fails; on a GPU nothing is amiss",
        'pip install "triton>=3.9"',
        lambda v: _between(v, "triton", (0,), (3, 9)) and _between(v, "numpy", (2, 4), _EVER),
    ),
    BadPair(
        "a CUDA or ROCm plugin of another version than jaxlib",
        "JAX leaves the plugin, and so the GPU, unused",
        "install both at one version: pip install -U jax[cuda13] (or [cuda12], [rocm7-local])",
        lambda v: any(v[plugin][:3] != v["jaxlib"][:3] for plugin in PLUGINS if plugin in v),
    ),
)


VERSIONS = {
    "package": Column(""),
    "installed": Column("installed", absent="-"),
    "to_have_it": Column("if you want it, in a clone of jln"),
}
DEVICES = {"device": Column(""), "kind": Column("kind"), "chip": Column("chip")}
KERNELS = {
    "operator": Column(""),
    "device": Column("on"),
    "runs": Column("runs"),
    "forward": Column("kernels forward", ", ".join, absent="-"),
    "backward": Column("backward", ", ".join, absent="-"),
}


def command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what is installed, what the operators will run on here, and how to mend what is missing.

    Exits with 1 if something is broken, and with 2 if there is no device; a missing GPU is no fault.
    """
    all_devices = devices()
    versions = installed()
    kinds = _one_of_each_kind(all_devices)
    with progress(len(kinds) * len(OPERATORS)) as begin:
        operators = [row for device in kinds for row in choices(device, begin)]
    bad = [pair for pair in BAD_PAIRS if pair.here({k: parsed(v) for k, v in versions.items() if v is not None})]
    faults = [f"{pair.what}: {pair.effect}. To mend it: {pair.fix}" for pair in bad]
    faults += _idle_gpu(all_devices)
    tiles, wrong_files = _tuning()
    faults += wrong_files
    kernels, untrusted = _compiled_kernels()
    faults += untrusted
    rows = [{"package": name, "installed": version} for name, version in versions.items()]
    for row in rows:
        use, how = PACKAGES.get(row["package"], ("", ""))
        row["to_have_it"] = None if row["installed"] else f"for {use}: {how}"
    facts = {
        "versions": versions,
        "tuning": tiles,
        "compiled_kernels": kernels,
        "assembler": _assembler(),
        "why_not_fused": _why_not_fused(),
        "why_not_unasked": _why_not_unasked(),
        "jax_says": complaints,
        "faults": faults,
    }
    notes = [f"{tiles}.", f"Compiled kernels: {kernels}."]
    notes += [f"{facts[n]}." for n in ("assembler", "why_not_fused", "why_not_unasked") if facts[n] is not None]
    notes += [f"Known bad pairs of versions: {len(bad)} of {len(BAD_PAIRS)} are here."]
    notes += [f"JAX says: {complaint}" for complaint in complaints]
    parts = [
        Rows(rows, "Versions", VERSIONS),
        Rows([_facts(device) for device in all_devices], "Devices", DEVICES, key="devices"),
        Rows(operators, "Operators", KERNELS, key="operators"),
        Rows(operators, "{why_not_the_other}"),
        *map(Note, notes),
        *(Note(f"BROKEN: {fault}", wrong=True) for fault in faults),
        Note("something is broken" if faults else "nothing is broken", wrong=bool(faults)),
    ]
    show(facts, parts, as_json)
    raise typer.Exit(1 if faults else 0)


RULES = "rules of row length, layout, dtype and chip"
MEASURE = "`python -m jln tune` on the card measures tiles"


def _tuning() -> tuple[str, list[str]]:
    """Return where the kernels' tiles are from, in words, and what is wrong with the files that were named."""
    try:
        chip = target.target_chip()
    except ValueError as error:  # of JLN_CHIP
        return f"Tiles of the kernels: by {RULES}", [f"{CHIP_VARIABLE}: {error}"]
    if chip is None:
        return f"Tiles of the kernels: no GPU is here to ask for; {CHIP_VARIABLE} names one that is not", []
    name, files = tuning.chip_name(chip), tuning.in_force(chip)
    faults = [f"{f['file']} is ignored in part: {fault}" for f in files for fault in f["ignored"][:3]]
    measured = "; else ".join(map(_measured, (f for f in files if f["choices"])))
    if measured:
        return f"Tiles of the kernels on {name}: {measured}; else by {RULES}. {MEASURE}", faults
    if os.environ.get(tuning.VARIABLE) == "":
        why = f"{tuning.VARIABLE} is set to nothing, so that no file is asked"
    elif files:
        others = (f"{f['file']} has " + (", ".join(f["other_chips"]) or "none at all") for f in files)
        why = f"no file has an entry for {name}: {'; '.join(others)}"
    else:
        why = f"the package has no {name}.json, and {tuning.VARIABLE} names no file"
    return f"Tiles of the kernels on {name}: none is measured, all are by {RULES}; {why}. {MEASURE}", faults


def _measured(file: dict[str, Any]) -> str:
    """The choices that a tuning file has for this chip, in words."""
    by = ", ".join(f"jln {version}" for version in file["versions"])
    said = f"{file['choices']} choices measured by {by}, in {file['file']}"
    if file["by_the_rule"]:
        said += f", of which in {file['by_the_rule']} nothing was faster than the rule"
    return said if file["versions"] == [jln.__version__] else f"{said} (this is jln {jln.__version__})"


def _compiled_kernels() -> tuple[str, list[str]]:
    """Return where compiled kernels are kept, and what is wrong with that folder."""
    folder, fault = cache.folder(), cache.fault()
    if folder is None:
        why = f"{cache.VARIABLE} says" if cache.VARIABLE in os.environ else "the user has no folder for such"
        return f"not kept, as {why}", []
    if fault is not None:
        return f"not kept in {folder}", [f"compiled kernels are not kept: {fault}"]
    return f"{len(cache.entries())} of at most {cache.LIMIT} in {folder}", []


def _chip() -> Chip | None:
    """The chip of this process; None without one, or with a fault in JLN_CHIP."""
    try:
        return target.target_chip()
    except ValueError:
        return None


def _assembler() -> str | None:
    """The ptxas that kernels are assembled by for this process's chip, and their PTX; None where there is no plugin."""
    if (chip := _chip()) is None or chip.is_amd or lowering.missing(chip.platform) is not None:
        return None
    said = ptxas.missing(chip)
    if (assembler := ptxas.found()) is not None and said is None:
        ptx = "Triton's PTX" if chip.ptx_version is None else f"PTX {chip.ptx_version / 10}"
        said = f"{assembler.path}, of CUDA {'.'.join(map(str, assembler.version))}, reads their {ptx}"
    return f"Assembler of the kernels for {chip.name}: {said}"


def _why_not_fused() -> str | None:
    """The reason why no Linear is fused with its norm on this process's chip; None where nothing forbids it."""
    return None if (chip := _chip()) is None else unfenced(chip)


def _why_not_unasked() -> str | None:
    """The reason why kernels must be asked for by name on this process's chip; None where they need not."""
    if (chip := _chip()) is None or chip.platform in target.UNASKED:
        return None
    reason = target.missing(chip.platform)
    asked = 'implementation="triton" asks for them' + ("" if reason is None else f" and cannot run here: {reason}")
    return f"On {chip.name} {STAYS_XLA}; {asked}"


def installed() -> dict[str, str | None]:
    """The version of each package by name; None where it is not installed."""
    of_python = {"python": platform.python_version(), "jln": jln.__version__}
    return of_python | {package: machine.version(package) for package in PACKAGES}


def parsed(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: 0.4.1.dev3 is (0, 4, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _one_of_each_kind(all_devices: list[Device]) -> list[Device]:
    return list({(d.platform, d.device_kind): d for d in reversed(all_devices)}.values())[::-1]


def _facts(device: Device) -> dict[str, str]:
    chip = "-"
    if device.platform == "gpu":
        known = target.target_chip()
        chip = f"{known}, {known.cores} cores" if known else "unknown"
    return {"device": described(device), "kind": device.device_kind, "chip": chip}


# Of a Linear both strategies: the kernels fused, and the norm's around XLA's products.
SIZES = {"": ((256, 1024), 1024), "few features": ((256, 1024), 64)}


def choices(device: Device, begin: Callable[[str], None] = lambda what: None) -> list[dict[str, Any]]:
    """The implementation of each operator on a device, found by lowering its gradient for the device's platform."""
    reasons = implementations(device)
    rows = []
    for operator in OPERATORS.values():
        begin(f"{operator.name} on {described(device)}")
        for label, (shape, features) in SIZES.items():
            if label and not operator.is_linear:
                continue
            both = Workload.sized(operator, shape, features, "bfloat16")
            forward, both = (_kernels(w, device) for w in (dataclasses.replace(both, directions=FORWARD), both))
            uses = "triton" if both else "xla"
            other = "xla" if uses == "triton" else "triton"
            why_not = reasons[other] or f'{_first(device)}; implementation="{other}" asks for it'
            rows.append(
                {
                    "operator": f"{operator.name}, {label}" if label else operator.name,
                    "device": described(device),
                    "runs": uses,
                    "forward": forward,
                    "backward": both[len(forward) :],
                    "why_not_the_other": f"Why not {other} on {described(device)}: {why_not}.",
                }
            )
    return rows


STAYS_XLA = "None stays XLA until a card has measured the kernels"


def _first(device: Device) -> str:
    """The implementation that `implementation=None` takes on a device where both can run, in words."""
    if platform_of(device) in target.UNASKED or device.platform == "cpu":
        return "triton goes first"
    return STAYS_XLA


def _kernels(workload: Workload, device: Device) -> list[str]:
    """The Triton kernels that the default implementation launches on a device; none where that is XLA."""
    with target.recording() as launches, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that XLA runs instead: the table says so, and the reason
        traced = jax.jit(workload.step(workload.function())).trace(*workload.step_arguments())
        traced.lower(lowering_platforms=(platform_of(device),))
    return [launched.kernel.fn.__name__ for launched in launches]


def _idle_gpu(all_devices: list[Device]) -> list[str]:
    """Sentences on a GPU that is here and that JAX, or Triton, does not use; none where all is used."""
    gpus = [device for device in all_devices if device.platform == "gpu"]
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
