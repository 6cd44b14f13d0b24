"""One Triton call as it stands in a lowered program: jaxlib's protobuf `TritonAnyKernelCall`, read without protobuf.

The numbers of the fields are those of jaxlib's gpu/triton.proto.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import zlib
from typing import Any

from ptx.violation import Violation

TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi")  # untyped and typed
ALIGNMENT = 16  # of an array's address, as far as jaxlib's launcher checks what a kernel was compiled for
_SCALARS = {2: "u8", 3: "s32", 4: "u32", 5: "s64", 6: "u64", 7: "f32", 8: "f64"}


@dataclasses.dataclass
class Call:
    """A kernel and its launch. A test may change any field before the program runs."""

    name: str
    entry: str  # the kernel's name in `ptx`
    ptx: str
    warps: int
    shared: int  # bytes
    grid: tuple[int, ...]
    parameters: list[tuple[str, int | float] | None]  # (PTX type, value) of a scalar; None of an array
    aliases: dict[int, int] = dataclasses.field(default_factory=dict)  # {operand: result}


def is_call(operation: Any) -> bool:
    """True for an operation of an MLIR module that launches a Triton kernel."""
    return operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value in TARGETS


def of_operation(operation: Any) -> Call:
    """Read the `Call` from a custom call to one of `TARGETS`."""
    attributes = operation.attributes
    if "mhlo.backend_config" in attributes:  # typed: a dictionary
        config = attributes["mhlo.backend_config"]["opaque"].value_bytes
    else:
        config = attributes["backend_config"].value_bytes
    aliases = str(attributes["output_operand_aliases"]) if "output_operand_aliases" in attributes else ""
    pairs = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", aliases)
    return _of_protobuf(zlib.decompress(config), {int(operand): int(result or 0) for result, operand in pairs})


def _of_protobuf(data: bytes, aliases: dict[int, int]) -> Call:
    any_call = dict(_fields(data))  # 1 kernel_call, 2 autotuned_kernel_call, 4 name
    if 1 not in any_call:
        raise NotImplementedError("an autotuned call")
    call = _fields(any_call[1])  # 1 kernel, 2 to 4 grid, 5 parameters
    once = dict(call)
    kernel = dict(_fields(once[1]))  # 1 name, 2 warps, 3 shared memory, 4 PTX, 10 programs of a cluster
    if kernel.get(10, 1) != 1:
        raise NotImplementedError("clusters of programs")
    return Call(
        name=any_call[4].decode(),
        entry=kernel[1].decode(),
        ptx=kernel[4].decode(),
        warps=kernel[2],
        shared=kernel.get(3, 0),
        grid=tuple(once.get(axis, 1) for axis in (2, 3, 4)),
        parameters=[_parameter(raw) for number, raw in call if number == 5],
        aliases=aliases,
    )


def _parameter(data: bytes) -> tuple[str, int | float] | None:
    ((kind, value),) = _fields(data) or [(0, 0)]
    if kind == 1:  # an array: 1 bytes to fill with zeros first, 2 what its address must be a multiple of
        array = dict(_fields(value))
        if array.get(1):
            raise NotImplementedError("a result that is filled with zeros first")
        if array.get(2, 0) > ALIGNMENT:
            raise Violation(f"an array's address is wanted at multiples of {array[2]} bytes")
        return None
    if isinstance(value, bytes):
        (value,) = struct.unpack("<f" if kind == 7 else "<d", value)
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
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
        else:
            length = {1: 8, 5: 4}.get(key & 7) or varint()
            found.append((key >> 3, data[at : at + length]))
            at += length
    return found
