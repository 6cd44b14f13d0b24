"""One execution of a call: operands into buffers, the grid's programs run, results out."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx import listing
from ptx.call import Call
from ptx.machine import Machine
from ptx.memory import READABLE, WRITABLE, WRITTEN, Buffers
from ptx.operands import TYPES
from ptx.statistics import Stats
from ptx.violation import Violation

_THREADS = 1 << 14  # that run at once, about: more make numpy's arrays leave the processor's caches
_SCRATCH = 2  # null pointers that jaxlib's launcher adds: Triton's scratch memory, and its profiler's


def execute(
    call: Call,
    operands: list[np.ndarray],
    results: list[tuple[tuple[int, ...], np.dtype]],
    same: list[int],
    stats: Stats,
    **options: Any,
) -> list[np.ndarray]:
    """Execute a call and return what the kernel wrote, at the shapes and dtypes of `results`.

    Operands with one number in `same` are one buffer, but for those that a result takes the place of.
    """
    owners: list[Any] = []  # of each buffer

    def buffer(owner, *_):
        if owner not in owners:
            owners.append(owner)
        return owners.index(owner)

    inputs = [buffer(("in place", i) if i in call.aliases else ("value", same[i])) for i in range(len(operands))]
    taken = {result: inputs[operand] for operand, result in call.aliases.items()}
    outputs = [taken[i] if i in taken else buffer(("result", i)) for i in range(len(results))]
    nbytes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in results]
    sizes = dict(zip(inputs, (a.nbytes for a in operands), strict=True)) | dict(zip(outputs, nbytes, strict=True))
    stats.shapes |= dict(zip(inputs, (a.shape for a in operands), strict=True))
    stats.shapes |= dict(zip(outputs, (shape for shape, _ in results), strict=True))
    buffers = Buffers([sizes[i] for i in range(len(owners))])
    space = buffers.space
    for i, array in zip(inputs, operands, strict=True):
        span = buffers.span(i, array.nbytes)
        space.bytes[span] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        space.state[span] |= READABLE
    for i, size in zip(outputs, nbytes, strict=True):
        space.state[buffers.span(i, size)] |= WRITABLE

    kernel = listing.parse(call.ptx, call.entry)
    given = _given(call, kernel, [buffers.address(i) for i in inputs + outputs])
    if call.grid[1:] != (1, 1):
        raise NotImplementedError("a grid of more than one dimension")
    machine = Machine(call, kernel, buffers, given, stats, **options)
    at_once = max(1, _THREADS // kernel.threads)
    with np.errstate(all="ignore"):
        for first in range(0, call.grid[0], at_once):
            machine.run(first, min(at_once, call.grid[0] - first))
    stats.executions += 1

    written = []
    for number, (i, size, (shape, dtype)) in enumerate(zip(outputs, nbytes, results, strict=True)):
        span = buffers.span(i, size)
        if missing := int((space.state[span] & WRITTEN == 0).sum()):
            stats.unwritten.append((number, missing))
        written.append(space.bytes[span].view(dtype).reshape(shape).copy())
    if stats.unwritten:
        raise Violation(f"{call.name}: bytes that nobody wrote, as (result, how many): {stats.unwritten}")
    return written


def _given(call: Call, kernel: listing.Listing, addresses: list[int]) -> dict[str, np.ndarray]:
    """The kernel's parameters by name."""
    if kernel.threads != 32 * call.warps:
        raise Violation(f"{call.name}: compiled for {kernel.threads} threads, launched with {call.warps} warps")
    arrays = sum(p is None for p in call.parameters)
    if arrays != len(addresses):
        raise Violation(f"{call.name}: the launch has {arrays} pointers for {len(addresses)} operands and results")
    pointers = iter(addresses)
    values = [("u64", next(pointers)) if p is None else p for p in call.parameters] + [("u64", 0)] * _SCRATCH
    if len(values) != len(kernel.parameters):
        raise Violation(f"{call.name}: the kernel has {len(kernel.parameters)} parameters, the launch {len(values)}")
    given = {}
    for (name, size), (ptx_type, value) in zip(kernel.parameters, values, strict=True):
        if TYPES[ptx_type].itemsize != size:
            raise Violation(f"{call.name}: {name} has {size} bytes, the launch gives {ptx_type}")
        given[name] = np.array(value, TYPES[ptx_type])
    return given
