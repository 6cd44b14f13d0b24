"""Moves between registers and memory: ld, st, ldmatrix, stmatrix, cp.async; between threads of a warp: shfl, redux."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx.operands import TYPES, group, operand


def _count(m, kind, addresses, lanes, width):
    rows = np.full(m.n, 2**63, np.uint64)
    rows[lanes] = addresses
    m.stats.count(kind, m.buffers.at(addresses[0]), m.now.line, rows.reshape(-1, 32), width)


def _ld(i: Any):
    space, ptx_type = i.op[1], i.op[-1]
    if space == "param":
        name = i.args[1].strip("[]")
        return lambda m: m.write_bits(i.args[0], np.asarray(m.given[name]).astype(TYPES[ptx_type]))
    if space not in ("global", "shared") or {"volatile", "acquire"} & set(i.op):
        raise NotImplementedError(i.text)
    registers, size = group(i.args[0]), TYPES[ptx_type].itemsize
    width = size * len(registers)

    def run(m):
        lanes = m.lanes()
        data = np.empty((0, width), np.uint8)
        if space == "global" and len(lanes):
            addresses = m.address(i.args[1], np.uint64)[lanes]
            data = m.load_global(m.in_global(addresses, lanes, width, "a read"), lanes, width, "a read")
            _count(m, "read", addresses, lanes, width)
        elif len(lanes):
            addresses = m.address(i.args[1], np.int64)[lanes]
            data = m.load_shared(m.in_shared(addresses, lanes, width, "a read"), lanes, width, "a read")
        values = data.view(f"u{size}")
        for k, register in enumerate(registers):
            whole = np.zeros(m.n, f"u{size}")
            whole[lanes] = values[:, k]
            m.write_bits(register, whole)

    return run


def _st(i):
    space, registers, size = i.op[1], group(i.args[1]), TYPES[i.op[-1]].itemsize
    get, width = [operand(r, f"b{8 * size}") for r in registers], size * len(registers)
    if space not in ("global", "shared") or {"volatile", "release"} & set(i.op):
        raise NotImplementedError(i.text)

    def run(m):
        lanes = m.lanes()
        if not len(lanes):
            return
        data = np.stack([m.spread(g(m))[lanes] for g in get], 1).view(np.uint8)
        if space == "global":
            addresses = m.address(i.args[0], np.uint64)[lanes]
            m.store_global(m.in_global(addresses, lanes, width, "a write"), lanes, data, "a write")
            _count(m, "written", addresses, lanes, width)
        else:
            addresses = m.address(i.args[0], np.int64)[lanes]
            m.store_shared(m.in_shared(addresses, lanes, width, "a write"), lanes, data, "a write")

    return run


def _matrix(i):
    """The instructions ldmatrix and stmatrix: 8 by 8 elements of 16 bits.

    Thread 8k + r has the address of row r of matrix k.
    """
    loads = i.op[0] == "ldmatrix"
    registers, address = (group(i.args[0]), i.args[1]) if loads else (group(i.args[1]), i.args[0])
    transposed = "trans" in i.op
    if "m8n8" not in i.op or i.op[-1] != "b16":
        raise NotImplementedError(i.text)
    get = None if loads else [operand(r, "b32") for r in registers]

    def turned(elements):
        return np.ascontiguousarray(elements.transpose(0, 2, 1) if transposed else elements)

    def run(m):
        lanes = m.lanes()
        m.whole_warps(lanes)
        addresses = m.address(address, np.int64)
        for k, register in enumerate(registers):
            rows = (lanes[::32, None] + 8 * k + np.arange(8)).reshape(-1)
            at = m.in_shared(addresses[rows], rows, 16, "a read of a row" if loads else "a write of a row")
            if loads:
                data = m.load_shared(at, rows, 16, "a read of a row").view(np.uint16)
                whole = np.zeros(m.n, np.uint32)
                whole[lanes] = turned(data.reshape(-1, 8, 8)).view(np.uint32).reshape(-1)
                m.write_bits(register, whole)
            else:
                elements = np.ascontiguousarray(m.spread(get[k](m))[lanes]).view(np.uint16).reshape(-1, 8, 8)
                m.store_shared(at, rows, turned(elements).view(np.uint8).reshape(-1, 16), "a write of a row")

    return run


def _cp(i):
    if i.op[1] != "async" or "bulk" in i.op:
        raise NotImplementedError(i.text)
    if i.op[2] == "commit_group":
        return lambda m: m.copies.commit()
    if i.op[2] in ("wait_group", "wait_all"):
        newest = int(i.args[0], 0) if i.args else None  # that many groups may be under way still
        return lambda m: m.copies.wait(newest)
    if i.op[3:5] != ["shared", "global"]:
        raise NotImplementedError(i.text)
    width = int(i.args[2], 0)
    wanted = operand(i.args[3], "u32") if len(i.args) > 3 else lambda m: np.uint32(width)

    def run(m):
        lanes = m.lanes()
        if not len(lanes):
            return
        data, size = np.zeros((len(lanes), width), np.uint8), m.spread(wanted(m))[lanes]
        if not np.isin(size, (0, width)).all():
            raise NotImplementedError("a part of a copy")
        at = m.in_shared(m.address(i.args[0], np.int64)[lanes], lanes, width, "a copy")
        some = size > 0  # the others are filled with zeros
        if some.any():
            addresses = m.address(i.args[1], np.uint64)[lanes[some]]
            data[some] = m.load_global(
                m.in_global(addresses, lanes[some], width, "a copy"), lanes[some], width, "a copy"
            )
            _count(m, "read", addresses, lanes[some], width)
        m.copies.start(at, lanes, data)

    return run


def _shfl(i):
    how, get, results = i.op[2], [operand(a, "b32") for a in i.args[1:4]], i.args[0].split("|")

    def run(m):
        m.whole_warps(m.lanes())
        lane = m.lane % 32
        value, b, c = (m.spread(g(m)) for g in get)
        b, c = b.astype(np.int64), c.astype(np.int64)
        clamp, segment = c & 31, c >> 8 & 31
        top, low = lane & segment | clamp & ~segment, lane & segment
        source = {"bfly": lane ^ b, "up": lane - b, "down": lane + b, "idx": low | b & ~segment & 31}[how]
        inside = source >= top if how == "up" else source <= top
        m.write_bits(results[0], value[m.lane - lane + np.where(inside, source, lane)])
        if len(results) > 1:
            m.write_register(results[1], inside)

    return run


_OF_LANES = {"min": np.min, "max": np.max, "add": np.sum, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce}


def _redux(i):
    """One integer of all 32 threads, which all of them get."""
    get, mask = operand(i.args[1], i.op[3]), operand(i.args[2], "b32")

    def run(m):
        m.whole_warps(m.lanes())
        if np.any(m.spread(mask(m)) != 2**32 - 1):
            raise NotImplementedError(f"{i.text}, of some threads")
        value = m.spread(get(m))
        of_each = _OF_LANES[i.op[2]](value.reshape(-1, 32), axis=1).astype(value.dtype)
        m.write_bits(i.args[0], np.repeat(of_each, 32))

    return run


TABLE = {"redux": _redux, "ld": _ld, "st": _st, "ldmatrix": _matrix, "stmatrix": _matrix, "cp": _cp, "shfl": _shfl}
