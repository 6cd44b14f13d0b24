"""The tensor cores of sm_100, for one program, with their memory: tcgen05's alloc, ld, st, mma; and mbarriers.

Of the shapes those that Triton makes of our kernels: products of 64 rows, loads and stores of 16 lanes in two halves.
All is done at once: whether the kernel waits for it, with tcgen05.wait or at an mbarrier, is not looked at.
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
_FIRST_COLUMN = 128  # where the only allocation lies; hardware chooses


class TensorMemory:
    """The tensor memory of the programs that run: 128 lanes of 32-bit columns for each.

    Cells are numbered through: program, lane, column.
    """

    def __init__(self, machine: Any):
        self._machine = machine
        self.columns = 0  # 0: nothing is allocated

    def allocate(self, columns: int) -> int:
        """Allocate columns in all programs, filled with NaN, and return the address."""
        if self.columns:
            raise NotImplementedError("a second allocation of tensor memory")
        self.columns, self.bits = columns, np.full(self._machine.programs * 128 * columns, 0xFFFFFFFF, np.uint32)
        return _FIRST_COLUMN

    def cells(self, programs: np.ndarray, lane: np.ndarray, column: np.ndarray) -> np.ndarray:
        """The numbers of cells; arrays that broadcast together, `column` counted as addresses count."""
        column = column - _FIRST_COLUMN
        if ((column < 0) | (column >= self.columns) | (lane >= 128)).any():
            self._machine.fail(f"outside the {self.columns} columns of tensor memory that are allocated")
        return (programs * 128 + lane) * self.columns + column


def _tcgen05(i: Any):
    known = {"alloc": _alloc, "dealloc": _dealloc, "ld": _move, "st": _move, "mma": _mma}
    if i.op[1] in known:
        return known[i.op[1]](i)
    if i.op[1] in ("wait::ld", "wait::st", "commit", "relinquish_alloc_permit"):
        return lambda m: None
    raise NotImplementedError(i.text)


def _alloc(i):
    columns = int(i.args[1], 0)

    def run(m):
        lanes = m.whole_warps()
        first = lanes[::32]
        address = np.full((len(first), 1), m.tensor_memory.allocate(columns), np.uint32)
        m.store(m.shared, m.in_shared(i.args[0], first, 4, "a write"), first, address.view(np.uint8), "a write")

    return run


def _dealloc(i):
    def run(m):
        m.whole_warps()
        m.tensor_memory.columns = 0

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
            for register, value in zip(registers, m.tensor_memory.bits[cells].T, strict=True):
                m.write_some(register, lanes, value)
        else:
            m.tensor_memory.bits[cells] = np.stack([m.spread(g(m))[lanes] for g in get], 1)

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
        programs, bits = m.local[lanes], m.tensor_memory.bits

        def shared(get, rows, turned):
            places = matrix_places(m.spread(get(m))[lanes].astype(np.int64), rows, _K, 2, turned)
            data, _ = m.products.read(places.reshape(-1), np.repeat(lanes, rows * _K), 2)
            return numbers(data.view(np.uint16), of).reshape(-1, rows, _K)

        def matrix_cells(at, columns):
            at = at[:, None, None]
            cells = m.tensor_memory.cells(
                programs[:, None, None], (at >> 16) + _LANES[:, None], (at & 0xFFFF) + np.arange(columns)
            )
            return cells.reshape(len(lanes), -1)

        if a is None:
            factors = bits[matrix_cells(m.address(i.args[1], lanes), _K // 2)]
            A = numbers(factors.view(np.uint16), of).reshape(-1, _ROWS, _K)
        else:
            A = shared(a, _ROWS, turned[0])
        B = shared(b, n, turned[1])
        sums = matrix_cells(m.address(i.args[0], lanes), n)
        D = (A @ B.transpose(0, 2, 1)).reshape(len(lanes), -1)
        keep = m.spread(add(m))[lanes, None]
        if keep.any():
            D = np.where(keep, D + bits[sums].view(np.float32), D)
        bits[sums] = D.astype(np.float32).view(np.uint32)

    return run


def _described(word, text):
    """Return the operands' type, n, and whether A and B are turned, from a product's description in 32 bits."""
    of = {0: "f16", 1: "bf16"}.get(word >> 7 & 7)
    if of is None or word & 0x1F007C3F != _ROWS // 16 << 24 | (word >> 7 & 7) << 10 | 1 << 4:
        raise NotImplementedError(f"{text} of {word:#x}")
    return of, (word >> 17 & 63) * 8, (bool(word >> 15 & 1), bool(word >> 16 & 1))


def _mbarrier(i):
    """A wait finds that all has arrived."""
    if i.op[1] == "try_wait":
        return lambda m: m.write_register(i.args[0], np.ones(m.n, bool))
    if (i.op[1], i.args[1:]) not in (("init", ["1"]), ("inval", [])):
        raise NotImplementedError(i.text)
    return lambda m: None


TABLE = {"tcgen05": _tcgen05, "mbarrier": _mbarrier}
