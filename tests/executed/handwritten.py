"""Small kernels in PTX, written by hand, to try the executor on."""

from __future__ import annotations

import numpy as np

from ptx.call import Call
from ptx.launch import execute
from ptx.statistics import Stats

_REGISTER = {2: "%rs", 4: "%r", 8: "%rd"}


def kernel(body: str, arrays: int, threads: int = 32) -> str:
    """A kernel of this body. It finds its thread in %r0 and array i at %rd<i>; the registers behind them are free."""
    parameters = ",\n".join(f"\t.param .u64 .ptr .global .align 1 k_param_{i}" for i in range(arrays + 2))
    pointers = "\n".join(f"\tld.param.b64 \t%rd{i}, [k_param_{i}];" for i in range(arrays))
    return f""".version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(
{parameters}
)
.reqntid {threads}
{{
\tmov.u32 \t%r0, %tid.x;
{pointers}
{body}
\tret;
}}
"""


def run(body: str, *operands: np.ndarray, result: np.ndarray, threads: int = 32, shared: int = 256, grid: int = 1):
    """Run a body and return what it wrote to a result like `result`, and its Stats."""
    arrays, stats = len(operands) + 1, Stats("k")
    call = Call("k", "k", kernel(body, arrays, threads), threads // 32, shared, (grid, 1, 1), [None] * arrays)
    options = {"first_wins": False, "allow_contended": False}
    (written,) = execute(
        call, list(operands), [(result.shape, result.dtype)], list(range(len(operands))), stats, **options
    )
    return written, stats


def elementwise(instruction: str, *operands: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """One instruction in each thread: {d} is its result, {0}, {1}, ... its elements of the operands."""
    result = np.zeros(len(operands[0]), dtype)
    lines, names = [], []
    for i, array in enumerate((*operands, result)):
        size = array.dtype.itemsize
        names.append(f"{_REGISTER[size]}{50 + i}")
        lines += [f"mul.wide.u32 \t%rd30, %r0, {size};", f"add.s64 \t%rd{40 + i}, %rd{i}, %rd30;"]
        if array is not result:
            lines.append(f"ld.global.b{8 * size} \t{names[i]}, [%rd{40 + i}];")
    lines.append(instruction.format(*names, d=names[-1]))
    lines.append(f"st.global.b{8 * result.dtype.itemsize} \t[%rd{40 + len(operands)}], {names[-1]};")
    return run("\n".join(lines), *operands, result=result, threads=len(result))[0]
