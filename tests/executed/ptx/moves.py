"""Moves between registers and memory: ld, st, ldmatrix, stmatrix; between threads of a warp: shfl, redux, elect."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx.operands import TYPES, group, operand


def _ld(i: Any):
    space, ptx_type = i.op[1], i.op[-1]
    if space == "param":
        name = i.args[1].strip("[]")
        return lambda m: m.write_bits(i.args[0], m.given[name].astype(TYPES[ptx_type]))
    registers, size = group(i.args[0]), TYPES[ptx_type].itemsize
    width = size * len(registers)
    if space not in ("global", "shared") or len(i.op) != 3 + (len(registers) > 1):
        raise NotImplementedError(i.text)

    def run(m):
        lanes = m.lanes()
        if space == "global":
            data = m.load_global(i.args[1], lanes, width, "a read")
        else:
            data = m.load(m.shared, m.in_shared(i.args[1], lanes, width, "a read"), lanes, "a read")
        for register, values in zip(registers, data.view(f"u{size}").T, strict=True):
            m.write_some(register, lanes, values)

    return run


def _st(i):
    space, registers, size = i.op[1], group(i.args[1]), TYPES[i.op[-1]].itemsize
    get, width = [operand(r, f"b{8 * size}") for r in registers], size * len(registers)
    if space not in ("global", "shared") or len(i.op) != 3 + (len(registers) > 1):
        raise NotImplementedError(i.text)

    def run(m):
        lanes = m.lanes()
        data = np.stack([m.spread(g(m))[lanes] for g in get], 1).view(np.uint8)
        if space == "global":
            m.store_global(i.args[0], lanes, data, "a write")
        else:
            m.store(m.shared, m.in_shared(i.args[0], lanes, width, "a write"), lanes, data, "a write")

    return run


def _matrix(i):
    """The instructions ldmatrix and stmatrix: 8 by 8 elements of 16 bits.

    Thread 8k + r has the address of row r of matrix k.
    """
    loads = i.op[0] == "ldmatrix"
    registers, address = (group(i.args[0]), i.args[1]) if loads else (group(i.args[1]), i.args[0])
    order = (0, 2, 1) if "trans" in i.op else (0, 1, 2)
    if "m8n8" not in i.op or i.op[-1] != "b16":
        raise NotImplementedError(i.text)
    get = None if loads else [operand(r, "b32") for r in registers]
    what = "a read of a row" if loads else "a write of a row"

    def run(m):
        lanes = m.whole_warps()
        for k, register in enumerate(registers):
            rows = (lanes[::32, None] + 8 * k + np.arange(8)).reshape(-1)
            places = m.in_shared(address, rows, 16, what)
            if loads:
                matrices = m.load(m.shared, places, rows, what).view(np.uint16).reshape(-1, 8, 8)
                values = np.ascontiguousarray(matrices.transpose(order)).view(np.uint32)
                m.write_some(register, lanes, values.reshape(-1))
            else:
                matrices = np.ascontiguousarray(m.spread(get[k](m))[lanes]).view(np.uint16).reshape(-1, 8, 8)
                data = np.ascontiguousarray(matrices.transpose(order)).view(np.uint8).reshape(-1, 16)
                m.store(m.shared, places, rows, data, what)

    return run


def _shfl(i):
    """The value of another thread of the warp, or the own where there is none."""
    value, by = operand(i.args[1], "b32"), operand(i.args[2], "u32")
    if int(i.args[3], 0) != 31:
        raise NotImplementedError(i.text)

    def run(m):
        m.whole_warps()
        lane, n = m.lane % 32, by(m)
        source = {"bfly": lane ^ n, "down": lane + n, "idx": n & 31}[i.op[2]]
        m.write_bits(i.args[0], m.spread(value(m))[m.lane - lane + np.where(source < 32, source, lane)])

    return run


def _redux(i):
    """The largest signed integer of all 32 threads, which all of them get."""
    get, mask = operand(i.args[1], "s32"), operand(i.args[2], "b32")
    if i.op[2:] != ["max", "s32"]:
        raise NotImplementedError(i.text)

    def run(m):
        m.whole_warps()
        if np.any(m.spread(mask(m)) != 2**32 - 1):
            raise NotImplementedError(f"{i.text}, of some threads")
        m.write_bits(i.args[0], np.repeat(m.spread(get(m)).reshape(-1, 32).max(1), 32))

    return run


def _elect(i):
    """The first thread of each warp."""
    predicate = i.args[0].split("|")[1]

    def run(m):
        m.whole_warps()
        m.write_register(predicate, m.lane % 32 == 0)

    return run


TABLE = {"ld": _ld, "st": _st, "ldmatrix": _matrix, "stmatrix": _matrix}
TABLE |= {"shfl": _shfl, "redux": _redux, "elect": _elect}
