"""Compilation of a launch to machine code, with no GPU: registers, spills, shared memory and the code itself."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator

from jln._triton.launch import Launch
from jln._triton.lowering import source, triton_target


@dataclasses.dataclass(frozen=True)
class Resources:
    """A compiled kernel and what it takes.

    registers: those of a thread. spilled, shared: bytes, of a thread and of a program. widest_load: bytes of global
    memory that one instruction loads for a thread. binary: a cubin or an AMD code object. assembly: what it was made
    of, PTX or AMD's.
    """

    registers: int
    spilled: int
    shared: int
    widest_load: int
    binary: bytes = dataclasses.field(repr=False)
    assembly: str = dataclasses.field(repr=False)


def compile_launch(launch: Launch) -> Resources:
    """Compile a launch for its chip, to machine code.

    Raises RuntimeError where Triton is only interpreting (TRITON_INTERPRET=1).
    """
    import triton

    if not isinstance(launch.kernel, triton.JITFunction):
        raise RuntimeError("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    chip = launch.chip
    target, options = triton_target(chip.architecture), launch.tile.options(chip)
    compiled = triton.compile(source(launch), target=target, options=options)
    if chip.is_amd:
        return _amd_resources(compiled.asm["hsaco"], compiled.metadata.shared, compiled.asm["amdgcn"])
    return _nvidia_resources(compiled.asm["cubin"], compiled.metadata.shared, compiled.asm["ptx"])


def _amd_resources(code: bytes, shared: int, assembly: str) -> Resources:
    """The resources that the assembler notes of a kernel for AMD.

    Registers are vector registers: scalar ones do not run out. Scratch is what a thread has beside its registers.
    """

    def noted(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])  # pyright: ignore[reportOptionalSubscript]

    sizes = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ushort": 2, "short": 2, "ubyte": 1}
    loads = re.findall(r"(?:global|buffer)_load_(?:lds_)?([a-w]+(?:x\d)?)", assembly)
    widest = max((sizes.get(load, 1) for load in loads), default=0)
    spilled = max(noted("private_segment_fixed_size"), 4 * (noted("vgpr_spill_count") + noted("sgpr_spill_count")))
    return Resources(noted("vgpr_count"), spilled, shared, widest, code, assembly)


def _nvidia_resources(cubin: bytes, dynamic_shared: int, ptx: str) -> Resources:
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", dump(cubin, "--dump-resource-usage"))
    assert usage is not None, "cuobjdump printed no resource usage"
    registers, stack, _ = map(int, usage.groups())
    loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+) ", ptx)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x\w+)", ptx)
    widest = max([0, *(int(n or 1) * int(bits) // 8 for n, bits in loads), *(int(size, 16) for size in copies)])
    return Resources(registers, stack, dynamic_shared, widest, cubin, ptx)


def dump(cubin: bytes, option: str) -> str:
    """The output of the `cuobjdump` that comes with Triton, for a cubin."""
    import triton.backends.nvidia

    tool = pathlib.Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def workers(count: int | None = None) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Processes that compile, whatever this one does: without Triton's interpreter, and they leave the GPU alone.

    A task that nobody waits for any more, as after an interrupt, is not begun. count: by default one for each core that
    this process may use, and at most 16.
    """
    if count is None:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = min(16, usable)
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(count, mp_context=context, initializer=_compile_only)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _compile_only() -> None:
    import jax

    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported
    jax.config.update("jax_platforms", "cpu")
