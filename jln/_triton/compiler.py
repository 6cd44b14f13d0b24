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
from jln._triton.lowering import source


@dataclasses.dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel.

    registers: a thread. spilled, shared: bytes, a thread and a block. ptx: text, of which the cubin was made.
    """

    registers: int
    spilled: int
    shared: int
    cubin: bytes = dataclasses.field(repr=False)
    ptx: str = dataclasses.field(repr=False)


def compile_launch(launch: Launch) -> Resources:
    """Compile a launch for its chip, to machine code.

    Raises RuntimeError where Triton is only interpreting (TRITON_INTERPRET=1).
    """
    import triton
    from triton.backends.compiler import GPUTarget

    if not isinstance(launch.kernel, triton.JITFunction):
        raise RuntimeError("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    target = GPUTarget("cuda", launch.chip.capability, 32)
    compiled = triton.compile(source(launch), target=target, options=launch.tile.options())
    return _resources(compiled.asm["cubin"], compiled.metadata.shared, compiled.asm["ptx"])


def _resources(cubin: bytes, dynamic_shared: int, ptx: str) -> Resources:
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", dump(cubin, "--dump-resource-usage"))
    assert usage is not None, "cuobjdump printed no resource usage"
    registers, stack, _ = map(int, usage.groups())
    return Resources(registers, stack, dynamic_shared, cubin, ptx)


def dump(cubin: bytes, option: str) -> str:
    """The output of the `cuobjdump` that comes with Triton, for a cubin."""
    import triton.backends.nvidia

    tool = pathlib.Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def workers(count: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Processes that compile, whatever this one does: without Triton's interpreter, and they leave the GPU alone.

    A task that nobody waits for any more, as after an interrupt, is not begun.
    """
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
