"""From an instruction to the function that executes it: by its first word, in the tables of the files for each kind.

Those functions take the machine, and act for all of its threads at once; compiling looks at the text once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ptx import arithmetic, bits, moves, synchronization, tensor_cores

_TABLE = arithmetic.TABLE | bits.TABLE | moves.TABLE | synchronization.TABLE | tensor_cores.TABLE


def compile(instruction: Any) -> Callable[[Any], None]:
    head = instruction.op[0]
    if head not in _TABLE:
        raise NotImplementedError(f"line {instruction.line}: {instruction.text}")
    return _TABLE[head](instruction)
