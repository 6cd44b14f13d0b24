"""The GPUs that kernels are launched on, by name."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any


@functools.cache
def triton_version() -> tuple[int, ...]:
    """The version of the Triton that is installed; without one, of which nothing is wanted, a later one than any."""
    try:
        import triton
    except ImportError:
        return (99,)
    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU as the launchers see it.

    architecture: NVIDIA's compute capability as an integer, 90 for 9.0, or AMD's name, "gfx942".
    cores: NVIDIA's streaming multiprocessors or AMD's compute units, each of which runs several programs at a time.
    """

    name: str
    architecture: int | str
    cores: int

    @property
    def is_amd(self) -> bool:
        return isinstance(self.architecture, str)

    @property
    def platform(self) -> str:
        """The platform that JAX lowers programs for, "cuda" or "rocm"."""
        return "rocm" if self.is_amd else "cuda"

    @property
    def capability(self) -> int:
        """The compute capability of an NVIDIA GPU, 90 for 9.0."""
        assert isinstance(self.architecture, int)
        return self.architecture

    @property
    def has_wgmma(self) -> bool:
        """True where products read their operands from shared memory, by wgmma or its successor."""
        return not self.is_amd and self.capability >= 90

    @property
    def rounds_to_eight_bits(self) -> bool:
        """True where Triton converts float32 to float8_e4m3fn and float8_e5m2 by one instruction that rounds once.

        For sm_89 Triton before 3.9 cuts to 16 bits first. AMD's chips before gfx950 have no such instruction.
        """
        if self.is_amd:
            return self.architecture == "gfx950"
        return self.capability >= (89 if triton_version() >= (3, 9) else 90)

    @property
    def ptx_version(self) -> int | None:
        """The version of PTX that kernels for an NVIDIA GPU are in, 85 for 8.5; None where Triton chooses.

        Triton chooses that of its own ptxas, and jaxlib assembles by another: Triton 3.9's 9.4 is read from CUDA 13.4
        on. 8.5 is read by the oldest that JAX takes, CUDA 12.6's, and kernels have the same instructions.
        """
        return 85 if self.capability < 100 else LEAST_PTX.get(self.capability)

    @property
    def precision(self) -> str:
        """The precision of float32 products where nobody asks for more, as Triton names it and XLA chooses it.

        XLA multiplies with ten bits on NVIDIA's GPUs, and exactly on AMD's.
        """
        return "ieee" if self.is_amd else "tf32"

    @property
    def threads(self) -> int:
        """The threads of a warp, or of a wave."""
        return 64 if self.is_amd else 32

    @property
    def shared(self) -> int:
        """The bytes of shared memory that one program may have."""
        return MORE_SHARED.get(self.architecture, 65536 if self.is_amd else 101376)

    def __str__(self) -> str:
        return str(self.architecture) if self.is_amd else f"sm_{self.architecture}"


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("a100", 80, 108),
        Chip("l4", 89, 58),
        Chip("l40s", 89, 142),
        Chip("h100", 90, 132),
        Chip("h200", 90, 132),
        Chip("b200", 100, 148),
        # Of an MI250X each of its two dies is a device. AMD's data sheets.
        Chip("mi250x", "gfx90a", 110),
        Chip("mi300x", "gfx942", 304),
        Chip("mi325x", "gfx942", 304),
        Chip("mi350x", "gfx950", 256),
        Chip("mi355x", "gfx950", 256),
    )
}

# Bytes of shared memory one block may have, by compute capability (CUDA C++ programming guide, table of technical
# specifications), and of LDS one workgroup may have (AMD's guides to the instruction sets of CDNA 2, 3 and 4).
# Of others the least of their maker's is asked for.
MORE_SHARED: dict[int | str, int] = {80: 166912, 90: 232448, 100: 232448, "gfx950": 163840}

# The least version of PTX for a GPU of its compute capability, where that is more than 8.5 (PTX ISA, table of targets).
LEAST_PTX = {100: 86, 103: 88, 120: 87, 121: 88}

CHIP_VARIABLE = "JLN_CHIP"


def chip_by_name(name: str) -> Chip:
    try:
        return CHIPS[name]
    except KeyError:
        raise ValueError(f"unknown chip {name!r}; known are {', '.join(sorted(CHIPS))}") from None


def chip_name(chip: Chip) -> str:
    """The name of a chip in measurements: "h200" for "NVIDIA H200 NVL", "mi250x" for "AMD Instinct MI250X / MI250"."""
    words = re.findall(r"[a-z0-9]+", chip.name.lower())
    return next((word for word in words if word in CHIPS), "-".join(word for word in words if word != "nvidia"))


def platform_of(device: Any) -> str:
    """JAX's name of a device's platform for lowering: of a GPU "cuda" or "rocm", where the device says "gpu"."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def local_chip() -> Chip | None:
    import jax

    for platform in ("cuda", "rocm"):
        try:
            device = jax.local_devices(backend=platform)[0]
        except RuntimeError:  # no such backend in this process
            continue
        capability = str(device.compute_capability)
        architecture = capability.partition(":")[0] if platform == "rocm" else int(capability.replace(".", ""))
        return Chip(device.device_kind, architecture, device.core_count)
    return None
