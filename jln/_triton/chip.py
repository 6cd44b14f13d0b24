"""The GPUs that kernels are launched on, by name."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Chip:
    """An NVIDIA GPU as the launchers see it.

    capability: compute capability as an integer, 90 for 9.0.
    sms: streaming multiprocessors, one `sm` running several programs at a time.
    """

    name: str
    capability: int
    sms: int


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("a100", 80, 108),
        Chip("l4", 89, 58),
        Chip("l40s", 89, 142),
        Chip("h100", 90, 132),
        Chip("h200", 90, 132),
        Chip("b200", 100, 148),
    )
}

# Bytes of shared memory one block may have, by compute capability (CUDA C++ programming guide, table of
# technical specifications).
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}

CHIP_VARIABLE = "JLN_CHIP"


def named_chip(name: str) -> Chip:
    try:
        return CHIPS[name]
    except KeyError:
        raise ValueError(f"unknown chip {name!r}; known are {', '.join(sorted(CHIPS))}") from None


def default_chip() -> Chip | None:
    """The chip that the environment variable JLN_CHIP names, else the first local GPU, else None."""
    name = os.environ.get(CHIP_VARIABLE)
    return named_chip(name) if name else _local_chip()


def _local_chip() -> Chip | None:
    import jax

    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # no CUDA backend in this process
        return None
    capability = int(str(device.compute_capability).replace(".", ""))
    return Chip(device.device_kind, capability, device.core_count)
