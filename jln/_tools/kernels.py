"""`python -m jln report --kernels`: what Triton's compiler makes of each kernel that the workloads launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jln._tools.console import print_table
from jln._tools.parts import one_line
from jln._tools.peers import PEERS
from jln._tools.workloads import WORKLOADS
from jln._triton import compiler
from jln._triton.chip import CHIPS
from jln._triton.target import Recorder, using


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The compiled kernel of one launch of a workload.

    warps: of a program, on AMD's chips waves. registers: of a thread. spilled, shared: bytes, of a thread and of a
    program. widest_load: bytes that one instruction loads for a thread.
    """

    workload: str
    kernel: str
    rows: int
    columns: int
    warps: int
    registers: int
    spilled: int
    shared: int
    widest_load: int


def compiled(workload: str, chip: str) -> list[Kernel] | str:
    """The compiled kernels of the workload's launches on the chip, in order; or a sentence why there is none."""
    step = WORKLOADS[workload]
    try:
        with using(recorder := Recorder(CHIPS[chip])):
            traced = jax.jit(step.step(PEERS["jln"].function(step))).trace(*step.step_arguments())
            traced.lower(lowering_platforms=(CHIPS[chip].platform,))
        return [_kernel(workload, launch) for launch in recorder.launches]
    except Exception as error:  # said beside the others' numbers, and the command then fails
        return f"{workload} does not compile for {chip}: {one_line(error)}"


def _kernel(workload: str, launch: Any) -> Kernel:
    resources, tile = compiler.compile_launch(launch), launch.tile
    measured = resources.registers, resources.spilled, resources.shared, resources.widest_load
    return Kernel(workload, launch.kernel.fn.__name__, tile.rows, tile.columns, tile.warps_of(launch.chip), *measured)


def compile_all(workloads: Sequence[str], chip: str, begin: Callable[[str], None]) -> tuple[list[Kernel], list[str]]:
    """Compile the launches of all workloads. -> (the kernels, sentences on what does not compile)."""
    kernels, failures = [], []
    with compiler.workers() as pool:
        jobs = [(name, pool.submit(compiled, name, chip)) for name in workloads]
        for name, job in jobs:
            begin(f"{name} for {chip}")
            outcome = job.result()
            if isinstance(outcome, str):
                failures.append(outcome)
            else:
                kernels += outcome
    return kernels, failures


def print_kernels(kernels: Sequence[Kernel], chip: str) -> None:
    """Print a row for each kernel, and the most that any takes."""
    architecture = CHIPS[chip]
    rows = [
        (
            k.workload,
            k.kernel,
            f"{k.rows}x{k.columns}",
            str(k.warps),
            str(k.registers),
            str(k.spilled),
            f"{k.shared / 1e3:.1f}",
            str(k.widest_load),
        )
        for k in kernels
    ]
    most = [max((getattr(k, field) for k in kernels), default=0) for field in ("registers", "spilled", "shared")]
    rows.append(("the most of all", "", "", "", str(most[0]), str(most[1]), f"{most[2] / 1e3:.1f}", ""))
    title = f"Kernels for {chip} ({architecture}), {architecture.shared / 1e3:.1f} KB of shared memory a program"
    warps = "waves" if architecture.is_amd else "warps"
    header = ("workload", "kernel", "tile", warps, "registers", "spilled", "shared KB", "widest load")
    print_table(title, header, rows, left=(0, 1, 2))
