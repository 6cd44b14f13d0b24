"""Targets of a program's kernels: a GPU, Triton's interpreter, or a recorder that launches nothing."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jln._triton import chip as chips
from jln._triton.chip import Chip
from jln._triton.launch import INTERPRETED, Launch, Target  # noqa: F401  where targets are asked for

INSTALL = {
    "cuda": 'pip install -e ".[cuda13]" (or ".[cuda12]") in a clone of jln',
    "rocm": 'pip install -e ".[rocm7]" in a clone of jln',
    "cpu": 'pip install -e ".[test]" in a clone of jln, on Linux',
}

# JAX's platforms where `implementation=None` runs the kernels. On ROCm it is XLA until an AMD card has measured them.
UNASKED = ("cuda",)


class Gpu(Target):
    """A GPU, for whose chip kernels are compiled when the program is lowered."""

    def run(self, launch: Launch, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        from jln._triton import lowering

        return lowering.kernel_call.bind(*arrays, launch=launch)

    def made_of(self) -> Any:
        from jln._triton import lowering

        return self.chip, lowering.switches()


@dataclasses.dataclass(frozen=True)
class Interpreter(Target):
    """Triton's interpreter, on the host.

    of_program: the one function on the host of a program that JAX spreads over devices; None where JAX keeps callbacks
      itself.
    """

    of_program: OnHost | None = None

    def run(self, launch: Launch, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        results = list(launch.results.values())
        if self.of_program is not None:
            return self.of_program.call(launch, results, arrays)

        def interpret(*arrays: Any) -> Any:
            from jln._triton import interpreter

            return interpreter.run(launch, arrays)

        return jax.pure_callback(interpret, results, *arrays, vmap_method="sequential")


class OnHost:
    """The launches of a program that JAX spreads over CPU devices, as one function on the host.

    JAX lowers what each device does as a module of its own, and forgets the functions on the host that are called in
    it, so that `jax.pure_callback` ends the process there (seen in JAX 0.10.2, 0.11.2 and 0.12.0). This function
    belongs to the whole program, which keeps it, and is called by its number there. JAX's own call does the same.
    """

    def __init__(self, add: Callable[[Callable[..., Any]], int]):
        """Register the function with `add`, which makes a function one of the program's and returns its number."""
        self._launches: list[Launch] = []
        self._number = add(self._interpret)

    def call(self, launch: Launch, results: Sequence[Any], arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        self._launches.append(launch)
        which = np.int32(len(self._launches) - 1)
        function = jax.ffi.ffi_call("xla_ffi_python_cpu_callback", results)
        return function(which, *arrays, index=np.uint64(self._number))

    def _interpret(self, which: Any, *arrays: Any) -> Any:
        from jln._triton import interpreter

        return tuple(interpreter.run(self._launches[int(which)], arrays))


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
    """True where Triton's interpreter was asked for, by TRITON_INTERPRET=1."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def target_chip() -> Chip | None:
    """The chip that programs are lowered for: that of the target in use, that of JLN_CHIP, or the first local GPU."""
    if (used := _used.get()) is not None:
        return used.chip
    name = os.environ.get(chips.CHIP_VARIABLE)
    return chips.chip_by_name(name) if name else chips.local_chip()


def missing(platform: str | None) -> str | None:
    """The reason why kernels cannot run in a program that is lowered for `platform`; None where they can."""
    return None if isinstance(_used.get(), Recorder) else next(_faults(platform), None)


def _faults(platform: str | None) -> Iterator[str]:
    """Yield what kernels lack, each with what to do; what comes first must be mended for the next to be asked."""
    if platform not in INSTALL:
        yield "the kernels are for NVIDIA and AMD GPUs, and this program is for another platform"
        return
    for package in ("triton", "jax_triton") if platform == "cuda" else ("triton",):
        if importlib.util.find_spec(package) is None:
            yield f"{package} is not installed: {INSTALL[platform]}"
    if platform == "cpu":
        if not interpreting():
            yield (
                "the kernels are for NVIDIA and AMD GPUs. To run them on the CPU, by Triton's interpreter (slowly), "
                "set the environment variable TRITON_INTERPRET=1 before Python starts"
            )
        return
    if interpreting():
        yield "TRITON_INTERPRET=1 is set, which leaves nothing to compile: unset it"
    from jln._triton import lowering, ptxas

    if (reason := lowering.missing(platform)) is not None:
        yield f"{reason}: {INSTALL[platform]}"
    chip = target_chip()
    if chip is None or chip.platform != platform:
        names = sorted(name for name, chip in chips.CHIPS.items() if chip.platform == platform)
        there = "there is no GPU in this process and no chip was named" if chip is None else f"the chip is {chip.name}"
        yield f"{there}: set {chips.CHIP_VARIABLE} to one of {', '.join(names)}"
        return
    known = sorted({str(chip) for chip in chips.CHIPS.values() if chip.is_amd})
    if chip.is_amd and str(chip) not in known:
        yield f"the kernels are for {', '.join(known)}, whose waves have 64 threads, and {chip.name} is {chip}"
    is_here = (local := chips.local_chip()) is not None and local.platform == platform  # else nothing is launched here
    if platform == "cuda" and is_here and (reason := ptxas.missing(chip)) is not None:
        yield f"{reason}: {INSTALL[platform]}"


def on(platform: str | None, add: Callable[[Callable[..., Any]], int] | None) -> Target:
    """The target for kernels of a program that is lowered for `platform`.

    add: for a program that JAX spreads over devices, makes a function one that the program calls on the host, and
      returns its number.

    Raises RuntimeError where kernels cannot run, with what to do.
    """
    used = _used.get()
    if isinstance(used, Recorder):
        return used
    if not isinstance(used, Interpreter):
        if (reason := missing(platform)) is not None:
            raise RuntimeError(f"implementation='triton' cannot run: {reason}")
        if platform != "cpu":
            chip = target_chip()
            assert chip is not None
            return used or Gpu(chip)
        used = Interpreter()
    return dataclasses.replace(used, of_program=None if add is None else OnHost(add))


def kernels(launcher: Callable[[], Callable[..., Any]]) -> Callable[..., Callable[..., Any] | str]:
    """The kernels of an operation, as `jln._core.operation.Operation` takes them.

    launcher: returns `launch(operands, settings, dtypes, batch_dims, target)`. It is called where kernels can run, so
      that Triton is imported only then.
    """

    def on_platform(platform: str | None, asked: bool, add: Any) -> Callable[..., Any] | str:
        if not asked and platform not in UNASKED:
            return ""
        if not asked and (reason := missing(platform)) is not None:
            return reason
        chosen = on(platform, add)  # before the import of the kernels, which fails without Triton
        return functools.partial(launcher(), target=chosen)

    return on_platform
