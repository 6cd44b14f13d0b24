"""The table of instructions: by its first word, from an instruction to the function that executes it.

Those functions take the machine, and act for all of its threads at once; compiling looks at the text once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ptx import arithmetic, bits, moves, synchronization, tcgen05, tensor_cores

_TABLE = arithmetic.TABLE | bits.TABLE | moves.TABLE | synchronization.TABLE | tensor_cores.TABLE | tcgen05.TABLE


def compile(instruction: Any) -> Callable[[Any], None]:
    head = instruction.op[0]
    if head not in _TABLE:
        raise NotImplementedError(f"line {instruction.line}: {instruction.text}")
    return _TABLE[head](instruction)


_OF_A_WARP = {"shfl", "redux", "elect", "ldmatrix", "stmatrix", "mma"}


def together(op: list[str]) -> int:
    """The number of threads that must execute an instruction together; 0 for all threads of the program."""
    if op[0] == "wgmma":
        return 128
    if op[0] in _OF_A_WARP or op[:2] == ["bar", "warp"] or (op[0] == "tcgen05" and "sync" in op):
        return 32
    if op[0] in ("bar", "barrier", "fence") or op[:2] == ["mbarrier", "try_wait"]:
        return 0
    return 1
