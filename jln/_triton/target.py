"""What a program's kernels are launched on: a GPU, Triton's interpreter, or a recorder that launches nothing."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jln._triton import chip as chips
from jln._triton.chip import Chip
from jln._triton.launch import INTERPRETED, Launch, Target  # noqa: F401  where targets are asked for

INSTALL = 'pip install "jln[cuda13]" (or "jln[cuda12]")'


class Gpu(Target):
    """Kernels compiled for the chip when the program is lowered."""

    def run(self, launch: Launch, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        from jln._triton import lowering

        return lowering.call(launch, arrays)


class Interpreter(Target):
    """Triton's interpreter, on the host."""

    def run(self, launch: Launch, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        def interpreted(*arrays: Any) -> Any:
            from jln._triton import interpreter

            return interpreter.run(launch, arrays)

        results = list(launch.results.values())
        return jax.pure_callback(interpreted, results, *arrays, vmap_method="sequential")


@dataclasses.dataclass(frozen=True)
class Recorder(Target):
    """Collects the launches that would be made, and makes none: their results are zeros."""

    launches: list[Launch] = dataclasses.field(default_factory=list)

    def run(self, launch: Launch, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        self.launches.append(launch)
        return [jnp.zeros(r.shape, r.dtype) for r in launch.results.values()]


_used: contextvars.ContextVar[Target | None] = contextvars.ContextVar("jln_target", default=None)


@contextlib.contextmanager
def using(target: Target) -> Iterator[Target]:
    """Lower kernels for `target` while the context is active, whatever GPU is present."""
    token = _used.set(target)
    try:
        yield target
    finally:
        _used.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """The launches that would be made while the context is active, none of them made."""
    with using(recorder := Recorder()):
        yield recorder.launches


def interpreting() -> bool:
    """Whether Triton's interpreter was asked for, by TRITON_INTERPRET=1."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def target_chip() -> Chip | None:
    """The chip that programs are lowered for: that of the target in use, else the default."""
    used = _used.get()
    return chips.default_chip() if used is None else used.chip


def missing() -> str | None:
    """Why a kernel cannot be lowered for CUDA in this process; None where it can."""
    if isinstance(_used.get(), Recorder):
        return None
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: {INSTALL}"
    if interpreting():
        return "TRITON_INTERPRET=1 is set, which leaves nothing to compile: unset it"
    from jln._triton import lowering

    if (reason := lowering.missing()) is not None:
        return f"{reason}: {INSTALL}"
    if target_chip() is None:
        return (
            "there is no GPU in this process and no chip was named: "
            f"set {chips.CHIP_VARIABLE} to one of {', '.join(sorted(chips.CHIPS))}"
        )
    return None


def on(platform: str | None, over_devices: bool) -> Target:
    """Where to launch what is lowered for `platform`, spread over devices by JAX or not.

    Raises RuntimeError or ValueError where kernels cannot run, with what to do.
    """
    used = _used.get()
    if isinstance(used, Recorder):
        return used
    if platform == "cuda":
        if (reason := missing()) is not None:
            raise RuntimeError(f"implementation='triton' cannot run: {reason}")
        chip = target_chip()
        assert chip is not None
        return used or Gpu(chip)
    if platform != "cpu":
        raise RuntimeError("implementation='triton' runs on NVIDIA GPUs; this program is for another platform")
    if not interpreting():
        raise RuntimeError(
            "implementation='triton' runs on NVIDIA GPUs. To run the kernels on the CPU, by Triton's interpreter "
            "(slowly), install triton and set the environment variable TRITON_INTERPRET=1 before Python starts"
        )
    if over_devices:
        raise ValueError(
            "implementation='triton' is interpreted on one CPU device at a time: use jax.shard_map on several"
        )
    return Interpreter()
