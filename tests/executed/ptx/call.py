"""One Triton call as it stands in a lowered program: jaxlib's protobuf `TritonAnyKernelCall`, read without protobuf.

The numbers of the fields are those of jaxlib's gpu/triton.proto.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import zlib
from typing import Any

import numpy as np

TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi")  # untyped and typed
ALIGNMENT = 16  # of an array's address, as far as jaxlib's launcher checks what a kernel was compiled for
SECTOR = 32  # bytes that a GPU moves at least
_SCALARS = {3: "s32", 5: "s64"}


class Violation(Exception):
    """A fault of a kernel or of its launch that a GPU would let pass, or punish at random."""


@dataclasses.dataclass
class Call:
    """A kernel and its launch. A test may change any field before the program runs."""

    name: str
    entry: str  # the kernel's name in `ptx`
    ptx: str
    warps: int
    shared: int  # bytes
    grid: int
    parameters: list[tuple[str, int] | None]  # (PTX type, value) of a scalar; None of an array
    aliases: dict[int, int] = dataclasses.field(default_factory=dict)  # {operand: result}


@dataclasses.dataclass
class Stats:
    """The counts of one call of a program, over all its executions."""

    name: str
    issued: int = 0  # instructions times warps, as a scheduler would count, but for branches
    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # {buffer: the shape of its array}
    # {("read" or "written", buffer, width in bytes): [bytes of sectors, bytes asked for]}
    accesses: dict[tuple[str, int, int], np.ndarray] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(lambda: np.zeros(2, np.int64))
    )

    def count(self, kind: str, buffer: int, addresses: np.ndarray, width: int) -> None:
        """Add the accesses of `width` bytes to a buffer at [warps, 32] addresses, -1 where a thread makes none."""
        ordered = np.sort(addresses, 1)
        sectors, places = (np.count_nonzero(np.diff(a, axis=1, prepend=-1)) for a in (ordered // SECTOR, ordered))
        self.accesses[kind, buffer, width] += (SECTOR * sectors, places * width)


def of_operation(operation: Any) -> Call:
    """Read the `Call` from a custom call to one of `TARGETS`."""
    attributes = operation.attributes
    if "mhlo.backend_config" in attributes:  # typed: a dictionary
        config = attributes["mhlo.backend_config"]["opaque"].value_bytes
    else:
        config = attributes["backend_config"].value_bytes
    aliases = str(attributes["output_operand_aliases"]) if "output_operand_aliases" in attributes else ""
    pairs = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", aliases)

    any_call = dict(_fields(zlib.decompress(config)))  # 1 kernel_call, 4 name
    fields = _fields(any_call[1])  # 1 kernel, 2 to 4 grid, 5 parameters
    call = dict(fields)
    kernel = dict(_fields(call[1]))  # 1 name, 2 warps, 3 shared memory, 4 PTX, 10 programs of a cluster
    if (kernel.get(10, 1), call.get(3, 1), call.get(4, 1)) != (1, 1, 1):
        raise NotImplementedError("clusters of programs, or a grid of more than one dimension")
    return Call(
        name=any_call[4].decode(),
        entry=kernel[1].decode(),
        ptx=kernel[4].decode(),
        warps=kernel[2],
        shared=kernel.get(3, 0),
        grid=call.get(2, 1),
        parameters=[_parameter(raw) for number, raw in fields if number == 5],
        aliases={int(operand): int(result or 0) for result, operand in pairs},
    )


def _parameter(data: bytes) -> tuple[str, int] | None:
    ((kind, value),) = _fields(data) or [(0, 0)]
    if kind == 1:  # an array: 1 bytes to fill with zeros first, 2 what its address must be a multiple of
        array = dict(_fields(value))
        if array.get(1) or array.get(2, 0) > ALIGNMENT:
            raise Violation(f"an array that is filled with zeros, or wanted at multiples of many bytes: {array}")
        return None
    return _SCALARS[kind], value


def _fields(data: bytes) -> list[tuple[int, Any]]:
    """The fields of a protobuf message as (number, integer or bytes), in its order."""
    found, at = [], 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key, value = varint(), varint()
        if key & 7:  # bytes, `value` of them
            at, value = at + value, data[at : at + value]
        found.append((key >> 3, value))
    return found
