"""The tensor cores of sm_100, for one program: tcgen05's alloc, ld, st, mma, commit; and their mbarriers.

Of the shapes those that Triton makes of our kernels: products of 64 rows, loads and stores of 16 lanes in two halves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx.operands import group, operand
from ptx.tensor_cores import matrix_places, numbers

_ROWS = 64
# Row r of a product of 64 is in lane r % 16 of those that belong to warp r // 16.
_LANES = 32 * (np.arange(_ROWS) // 16) + np.arange(_ROWS) % 16
_K = 16


def _tcgen05(i: Any):
    known = {"alloc": _alloc, "dealloc": _dealloc, "ld": _move, "st": _move, "mma": _mma, "commit": _commit}
    if i.op[1] in known:
        return known[i.op[1]](i)
    if i.op[1] == "wait::ld":
        return lambda m: m.tensor_memory.wait_loads()
    if i.op[1] == "wait::st":
        return lambda m: m.tensor_memory.wait_stores()
    if i.op[1] == "relinquish_alloc_permit":
        return lambda m: m.whole_warps()
    raise NotImplementedError(i.text)


def _alloc(i):
    columns = int(i.args[1], 0)

    def run(m):
        lanes = m.whole_warps()
        first = lanes[::32]
        address = np.full((len(first), 1), m.tensor_memory.allocate(columns, lanes), np.uint32)
        m.store(m.shared, m.in_shared(i.args[0], first, 4, "a write"), first, address.view(np.uint8), "a write")

    return run


def _dealloc(i):
    get, columns = operand(i.args[0], "b32"), int(i.args[1], 0)

    def run(m):
        lanes = m.whole_warps()
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
        lanes = m.whole_warps()
        at = m.address(address, lanes)
        lane, column = at >> 16, at & 0xFFFF
        first = lane - m.thread[lanes] // 32 % 4 * 32  # of the 32 that belong to this warp
        if (at.reshape(-1, 32) != at[::32, None]).any() or ((first != 0) & (first != 16)).any():
            m.fail("not the lanes of tensor memory that belong to this warp", lanes)
        half, own = np.arange(len(lanes)) % 32 // 16, np.arange(len(lanes)) % 16
        columns = (column + half * int(split, 0))[:, None] + np.arange(len(registers))
        cells = m.tensor_memory.cells(m.local[lanes, None], (lane + own)[:, None], columns)
        if loads:
            values = m.tensor_memory.load(cells, lanes)
            for register, value in zip(registers, values.T, strict=True):
                m.write_some(register, lanes, value)
        else:
            m.tensor_memory.store(cells, lanes, np.stack([m.spread(g(m))[lanes] for g in get], 1))

    return run


def _mma(i):
    """The product D [64, n] = A [64, k] times B [k, n] (+ D), by one thread.

    D is in tensor memory, A too or in shared memory.
    """
    if i.op[2:] != ["cta_group::1", "kind::f16"] or len(i.args) != 5:
        raise NotImplementedError(i.text)
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
        of, n, turned = _described(int(word[0]), i.text)
        programs, reads = m.local[lanes], []

        def shared(get, rows, turned):
            places = matrix_places(m.spread(get(m))[lanes].astype(np.int64), rows, _K, 2, turned)
            data, note = m.products.read(places.reshape(-1), np.repeat(lanes, rows * _K), 2)
            reads.append(note)
            return numbers(data.view(np.uint16), of).reshape(-1, rows, _K)

        def matrix_cells(at, columns):
            at = at[:, None, None]
            cells = m.tensor_memory.cells(
                programs[:, None, None], (at >> 16) + _LANES[:, None], (at & 0xFFFF) + np.arange(columns)
            )
            return cells.reshape(len(lanes), -1)

        factors = None
        if a is None:
            factors = matrix_cells(m.address(i.args[1], lanes), _K // 2)
            bits = np.ascontiguousarray(m.tensor_memory.factors(factors, lanes))
            A = numbers(bits.view(np.uint16), of).reshape(-1, _ROWS, _K)
        else:
            A = shared(a, _ROWS, turned[0])
        B = shared(b, n, turned[1])
        sums = matrix_cells(m.address(i.args[0], lanes), n)
        D = (A @ B.transpose(0, 2, 1)).reshape(len(lanes), -1)
        keep = m.spread(add(m))[lanes, None]
        if keep.any():
            D = np.where(keep, D + m.tensor_memory.factors(sums, lanes).view(np.float32), D)
        m.tensor_memory.multiply(lanes, sums, D.astype(np.float32).view(np.uint32), factors, reads)

    return run


def _described(word, text):
    """Return the operands' type, n, and whether A and B are turned, from a product's description in 32 bits."""
    of = {0: "f16", 1: "bf16"}.get(word >> 7 & 7)
    if of is None or word & 0x1F007C3F != _ROWS // 16 << 24 | (word >> 7 & 7) << 10 | 1 << 4:
        raise NotImplementedError(f"{text} of {word:#x}")
    return of, (word >> 17 & 63) * 8, (bool(word >> 15 & 1), bool(word >> 16 & 1))


def _barrier(m, argument, lanes):
    """An mbarrier's place in shared memory, the same in all programs."""
    at = np.unique(m.in_shared(argument, lanes, 8, "an mbarrier")[:, 0] % m.shared.room)
    if len(at) != 1:
        m.fail("several mbarriers at once", lanes)
    return int(at[0])


def _commit(i):
    def run(m):
        if len(lanes := m.lanes()):
            m.tensor_memory.commit(_barrier(m, i.args[0], lanes), lanes)

    return run


def _mbarrier(i):
    what = i.op[1]
    if what == "try_wait":
        return _try_wait(i)
    if (what, i.args[1:]) not in (("init", ["1"]), ("inval", [])):
        raise NotImplementedError(i.text)

    def run(m):
        if len(lanes := m.lanes()):
            m.tensor_memory.set_barrier(_barrier(m, i.args[0], lanes), lanes, 0 if what == "init" else -1)

    return run


def _try_wait(i):
    parity = operand(i.args[2], "u32")

    def run(m):
        lanes = m.lanes()
        m.tensor_memory.passed(_barrier(m, i.args[1], lanes), m.spread(parity(m))[lanes], lanes)
        m.write_register(i.args[0], np.ones(m.n, bool))

    return run


TABLE = {"tcgen05": _tcgen05, "mbarrier": _mbarrier}
