"""The tensor cores of sm_100, for one program: tcgen05's alloc, ld, st, mma, commit; and their mbarriers.

Of the shapes those that Triton makes of our kernels: products of 64 rows, loads and stores of 16 lanes in two halves.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ptx.operands import group, operand
from ptx.tensor_cores import matrix_places, numbers

_ROWS = 64
# Row r of a product of 64 is in lane r % 16 of those that belong to warp r // 16.
_LANES = 32 * (np.arange(_ROWS) // 16) + np.arange(_ROWS) % 16
_TYPES = {("kind::f16", 0): "f16", ("kind::f16", 1): "bf16", ("kind::tf32", 2): "tf32"}


def _tcgen05(i: Any):
    known = {"alloc": _alloc, "dealloc": _dealloc, "ld": _move, "st": _move, "mma": _mma, "commit": _commit}
    if i.op[1] in known:
        return known[i.op[1]](i)
    if i.op[1] == "wait::ld":
        return lambda m: m.tensor_memory.wait_loads()
    if i.op[1] == "wait::st":
        return lambda m: m.tensor_memory.wait_stores()
    if i.op[1] == "relinquish_alloc_permit":
        return lambda m: m.whole_warps(m.lanes())
    raise NotImplementedError(i.text)


def _alloc(i):
    columns = int(i.args[1], 0)

    def run(m):
        lanes = m.lanes()
        m.whole_warps(lanes)
        address = np.full(len(lanes), m.tensor_memory.allocate(columns, lanes), np.uint32)
        at = m.in_shared(m.address(i.args[0], np.int64)[lanes], lanes, 4, "a write")
        m.store_shared(at[::32], lanes[::32], address[::32, None].view(np.uint8), "a write")

    return run


def _dealloc(i):
    get, columns = operand(i.args[0], "b32"), int(i.args[1], 0)

    def run(m):
        lanes = m.lanes()
        m.whole_warps(lanes)
        m.tensor_memory.free(m.spread(get(m))[lanes], columns)

    return run


def _move(i):
    """The instructions ld and st.

    Half of a warp has 16 lanes, a column for each register; the other half the same, `split` further.
    """
    loads = i.op[1] == "ld"
    address, split = i.args[1:] if loads else i.args[:2]
    registers = group(i.args[0] if loads else i.args[2])
    if i.op[4] != "16x32bx2":
        raise NotImplementedError(i.text)
    get = None if loads else [operand(r, "b32") for r in registers]

    def run(m):
        lanes = m.lanes()
        if not len(lanes):
            return
        m.whole_warps(lanes)
        at = m.address(address, np.int64)[lanes]
        lane, column = at >> 16, at & 0xFFFF
        first = lane - m.thread[lanes] // 32 % 4 * 32  # of the 32 that belong to this warp
        if (at.reshape(-1, 32) != at[::32, None]).any() or ((first != 0) & (first != 16)).any():
            m.fail("not the lanes of tensor memory that belong to this warp", lanes)
        half, own = np.arange(len(lanes)) % 32 // 16, np.arange(len(lanes)) % 16
        columns = (column + half * int(split, 0))[:, None] + np.arange(len(registers))
        cells = m.tensor_memory.cells(m.local[lanes, None], (lane + own)[:, None], columns)
        if loads:
            values = m.tensor_memory.load(cells, lanes)
            for k, register in enumerate(registers):
                whole = np.zeros(m.n, np.uint32)
                whole[lanes] = values[:, k]
                m.write_bits(register, whole)
        else:
            m.tensor_memory.store(cells, lanes, np.stack([m.spread(g(m))[lanes] for g in get], 1))

    return run


def _mma(i):
    """The product D [64, n] = A [64, k] times B [k, n] (+ D), by one thread.

    D is in tensor memory, A too or in shared memory.
    """
    if i.op[2] != "cta_group::1" or len(i.args) != 5:
        raise NotImplementedError(i.text)
    kind = i.op[3]
    a = None if i.args[1][0] == "[" else operand(i.args[1], "u64")
    b, description, add = operand(i.args[2], "u64"), operand(i.args[3], "u32"), operand(i.args[4], "pred")

    def run(m):
        lanes = m.lanes()
        if not len(lanes):
            return
        if (np.bincount(m.local[lanes]) > 1).any():
            m.fail("a product by several threads of a program", lanes)
        word = np.unique(m.spread(description(m))[lanes])
        if len(word) > 1:
            raise NotImplementedError("programs with different products")
        of, n, turned = _described(int(word[0]), kind, i.text)
        k, size = (8, 4) if of == "tf32" else (16, 2)
        programs, reads = m.local[lanes], []

        def shared(get, rows, turned):
            places = matrix_places(m.spread(get(m))[lanes].astype(np.int64), rows, k, size, turned)
            data, note = m.products.read(places.reshape(-1), np.repeat(lanes, rows * k), size)
            reads.append(note)
            return numbers(data.view(f"u{size}"), of).reshape(-1, rows, k)

        def matrix_cells(at, columns):
            at = at[:, None, None]
            cells = m.tensor_memory.cells(
                programs[:, None, None], (at >> 16) + _LANES[:, None], (at & 0xFFFF) + np.arange(columns)
            )
            return cells.reshape(len(lanes), -1)

        factors = None
        if a is None:
            factors = matrix_cells(m.address(i.args[1], np.int64)[lanes], k * size // 4)
            bits = np.ascontiguousarray(m.tensor_memory.factors(factors, lanes))
            A = numbers(bits.view(f"u{size}"), of).reshape(-1, _ROWS, k)
        else:
            A = shared(a, _ROWS, turned[0])
        B = shared(b, n, turned[1])
        sums = matrix_cells(m.address(i.args[0], np.int64)[lanes], n)
        D = (A @ B.transpose(0, 2, 1)).reshape(len(lanes), -1)
        keep = m.spread(add(m))[lanes, None]
        if keep.any():
            D = np.where(keep, D + m.tensor_memory.factors(sums, lanes).view(np.float32), D)
        m.tensor_memory.multiply(lanes, sums, D.astype(np.float32).view(np.uint32), factors, reads)

    return run


def _described(word, kind, text):
    """Return the operands' type, n, and whether A and B are turned, from a product's description in 32 bits."""
    of = _TYPES.get((kind, word >> 7 & 7))
    if of is None or word >> 10 & 7 != word >> 7 & 7 or word >> 4 & 3 != 1 or word >> 24 & 31 != _ROWS // 16:
        raise NotImplementedError(f"{text} of {word:#x}")
    if word & 0x600F:
        raise NotImplementedError(f"{text} of {word:#x}")
    return of, (word >> 17 & 63) * 8, (bool(word >> 15 & 1), bool(word >> 16 & 1))


def _barrier(m, argument, lanes):
    """An mbarrier's place in shared memory, the same in all programs."""
    at = np.unique(m.in_shared(m.address(argument, np.int64)[lanes], lanes, 8, "an mbarrier") % m.shared.room)
    if len(at) != 1:
        m.fail("several mbarriers at once", lanes)
    return int(at[0])


def _commit(i):
    def run(m):
        if len(lanes := m.lanes()):
            m.tensor_memory.commit(_barrier(m, i.args[0], lanes), lanes)

    return run


def _mbarrier(i):
    if i.op[1] == "init" and int(i.args[1], 0) != 1:
        raise NotImplementedError(i.text)
    if i.op[1] in ("init", "inval"):

        def begin_or_end(m):
            if len(lanes := m.lanes()):
                barrier = _barrier(m, i.args[0], lanes)
                (m.tensor_memory.start_barrier if i.op[1] == "init" else m.tensor_memory.end_barrier)(barrier, lanes)

        return begin_or_end
    if i.op[1:3] != ["try_wait", "parity"]:
        raise NotImplementedError(i.text)
    parity = operand(i.args[2], "u32")

    def wait(m):
        lanes = m.lanes()
        m.tensor_memory.passed(_barrier(m, i.args[1], lanes), m.spread(parity(m))[lanes], lanes)
        m.write_register(i.args[0], np.ones(m.n, bool))

    return wait


def _elect(i):
    """The first thread of each warp."""
    _, predicate = re.split(r"\|", i.args[0])

    def run(m):
        m.whole_warps(m.lanes())
        m.write_register(predicate, m.lane % 32 == 0)

    return run


TABLE = {"tcgen05": _tcgen05, "mbarrier": _mbarrier, "elect": _elect}
