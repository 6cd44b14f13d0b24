"""The tensor cores: mma of a warp and wgmma of four, with operands of 16 bits or tf32 and sums in float32.

The products are summed in float64 and rounded once; hardware's order of sums is not known.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ptx.operands import TYPES, group, operand

# In a fragment thread 4 * row + column has a row's elements at `column`.
_ROW, _COLUMN = np.arange(32) // 4, np.arange(32) % 4


def numbers(bits: np.ndarray, of: str) -> np.ndarray:
    """The operands of a product in float64."""
    if of == "tf32":  # the last 13 bits are not looked at
        return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return bits.view(TYPES[of]).astype(np.float64)


def _fragment(m, registers, rows, columns, shape, of) -> np.ndarray:
    """An operand [warps, *shape] from registers.

    Register r of a thread has the elements at (rows[r], columns[r]) and to its right.
    """
    matrix = np.zeros((m.n // 32, *shape))
    size = 4 if of in ("tf32", "f32") else 2
    for register, row, column in zip(registers, rows, columns, strict=True):
        bits = np.ascontiguousarray(m.spread(register(m))).view(f"u{size}").reshape(-1, 32, 4 // size)
        values = numbers(bits, of)
        for e in range(4 // size):
            matrix[:, row, column + e] = values[..., e]
    return matrix


def _mma(i: Any):
    """The products m16n8k16 of 16 bits and m16n8k8 of tf32: D [16, 8] = A [16, k] times B [k, 8] + C."""
    shape = next(word for word in i.op if re.match(r"m\d", word))
    d_type, of, b_type, c_type = i.op[-4:]
    if (shape, of == "tf32") not in {("m16n8k16", False), ("m16n8k8", True)} or d_type != "f32" or c_type != "f32":
        raise NotImplementedError(i.text)
    if of != b_type or i.op[-6:-4] != ["row", "col"]:
        raise NotImplementedError(i.text)
    k, pair = (8, 1) if of == "tf32" else (16, 2)
    left, right = _COLUMN * pair, _COLUMN * pair + k // 2
    d, a, b, c = (group(x) for x in i.args)
    a, b, c = ([operand(x, "b32") for x in registers] for registers in (a, b, c))
    sums = [(_ROW + 8 * (r // 2), 2 * _COLUMN + r % 2) for r in range(4)]

    def run(m):
        m.whole_warps()
        A = _fragment(m, a, [_ROW, _ROW + 8] * 2, [left, left, right, right], (16, k), of)
        B = _fragment(m, b, [_ROW, _ROW], [left, right], (8, k), of)
        C = _fragment(m, c, *zip(*sums, strict=True), (16, 8), "f32")
        D = (A @ B.transpose(0, 2, 1) + C).astype(np.float32)
        for register, (row, column) in zip(d, sums, strict=True):
            m.write_bits(register, np.ascontiguousarray(D[:, row, column]).reshape(-1))

    return run


def _wgmma(i):
    if i.op[1] == "fence":
        return lambda m: m.products.fence()
    if i.op[1] == "commit_group":
        return lambda m: m.products.commit()
    if i.op[1] == "wait_group":
        return lambda m: m.products.wait(int(i.args[0], 0))
    return _wgmma_mma(i)


def _wgmma_mma(i):
    """The product D [64, n] = A [64, k] times B [k, n] (+ D), for each four warps.

    B is in shared memory, A too or in registers.
    """
    shape = re.match(r"m64n(\d+)k(\d+)", i.op[4])
    d, of = group(i.args[0]), i.op[-1]
    if i.op[1] != "mma_async" or i.op[5] != "f32" or [int(x, 0) for x in i.args[4:6]] != [1, 1]:
        raise NotImplementedError(i.text)
    n, k = int(shape[1]), int(shape[2])
    pair = 1 if of == "tf32" else 2
    in_registers = i.args[1][0] == "{"
    turned = [int(x, 0) for x in i.args[6:]]  # whether A, if in shared memory, and B have their other order there
    if turned[:-1] == [1]:
        raise NotImplementedError(i.text)
    a_registers = group(i.args[1]) if in_registers else []
    a = [operand(x, "b32") for x in a_registers] if in_registers else operand(i.args[1], "u64")
    b, add = operand(i.args[2], "u64"), operand(i.args[3], "pred")
    sums = [(_ROW + 8 * (r % 4 // 2), 8 * (r // 4) + 2 * _COLUMN + r % 2) for r in range(len(d))]

    def run(m):
        lanes = m.whole(128, "four warps")
        groups = lanes[::128] // 128
        m.products.start(d, a_registers)
        reads: list[Any] = []
        if in_registers:
            columns = [_COLUMN * pair + 4 * pair * (r // 2) for r in range(4)]
            A = _fragment(m, a, [_ROW, _ROW + 8] * 2, columns, (16, k), of).reshape(-1, 64, k)[groups]
        else:
            A = _wgmma_operand(m, groups, a(m), 64, k, of, False, reads)
        B = _wgmma_operand(m, groups, b(m), n, k, of, turned[-1:] == [1], reads)
        D = np.zeros((m.n // 128, 64, n))
        D[groups] = A @ B.transpose(0, 2, 1)
        D = D.reshape(-1, 16, n)
        keep = m.spread(add(m)).reshape(-1, 32)
        for register, (row, column) in zip(d, sums, strict=True):
            new = D[:, row, column]
            if keep.any():
                new = np.where(keep, new + m.spread(m.registers[register]).view(np.float32).reshape(-1, 32), new)
            m.set_register(register, np.ascontiguousarray(new.astype(np.float32)).view(np.uint32).reshape(-1))
        m.products.finish(lanes, d, a_registers, reads)

    return run


def _wgmma_operand(m, groups, descriptor, rows, k, of, turned, reads):
    """An operand [groups, rows, k] from shared memory. `turned`: neighbours in memory are rows, not columns."""
    words = m.spread(descriptor).reshape(-1, 128)[groups]
    if (words != words[:, :1]).any():
        m.fail("several descriptors in one group of warps", groups * 128)
    size = 4 if of == "tf32" else 2
    places = matrix_places(words[:, 0].astype(np.int64), rows, k, size, turned)
    lanes = np.repeat(groups * 128, rows * k)
    data, note = m.products.read(places.reshape(-1), lanes, size)
    reads.append(note)
    return numbers(data.view(f"u{size}"), of).reshape(len(groups), rows, k)


def matrix_places(words: np.ndarray, rows: int, k: int, size: int, turned: bool) -> np.ndarray:
    """The addresses [words, rows, k] in shared memory of the elements of matrices, from their descriptors.

    A matrix is of atoms of eight lines, 32, 64 or 128 bytes wide, whose 16-byte pieces are swizzled: a piece's number
    is combined with the line's by exclusive or. An address's bits do it by themselves.
    """
    start, leading, stride = ((words >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    swizzle = int(words[0] >> 62 & 3)
    if (words >> 62 & 3 != swizzle).any() or swizzle == 0 or (words >> 49 & 7).any():
        raise NotImplementedError("this layout of a matrix in shared memory")
    width = {1: 128, 2: 64, 3: 32}[swizzle]
    row, column = np.arange(rows)[:, None], np.arange(k)[None, :]
    line, along = (column, row) if turned else (row, column)
    atom, within = along * size // width, along * size % width
    if not turned and atom.any():
        raise NotImplementedError("a matrix wider than an atom")
    offset = line // 8 * stride[:, None, None] + atom * leading[:, None, None] + line % 8 * width + within
    at = start[:, None, None] + offset
    return at ^ (at >> 7 & width // 16 - 1) << 4


TABLE = {"mma": _mma, "wgmma": _wgmma}
