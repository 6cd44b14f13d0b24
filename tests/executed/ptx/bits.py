"""Instructions on bits: mov with its packing, and lop3, prmt, shf, bfe."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx.operands import TYPES, group, is_register, operand


def _mov(i: Any):
    to, of = i.args
    if to[0] == "{":
        return _unpack(i, group(to), of)
    if of[0] == "{":
        return _pack(i, to, group(of))
    get = operand(of, i.op[-1])
    return lambda m: m.write_bits(to, np.asarray(get(m)))


def _unpack(i, parts, of):
    get, width = operand(of, i.op[-1]), TYPES[i.op[-1]].itemsize // len(parts)

    def run(m):
        whole = get(m)
        for k, part in enumerate(parts):
            m.write_bits(part, (whole >> whole.dtype.type(8 * width * k)).astype(f"u{width}"))

    return run


def _pack(i, to, parts):
    dtype = TYPES[i.op[-1]]
    width = dtype.itemsize // len(parts)
    get = [operand(part, f"b{8 * width}") for part in parts]

    def run(m):
        for part in parts:  # half of what is packed may be nobody's: a NaN, if it is used
            if is_register(part) and part not in m.registers:
                m.registers[part] = np.array(-1).astype(f"u{width}")
        whole = dtype.type(0)
        for k, g in enumerate(get):
            whole = whole | g(m).astype(dtype) << dtype.type(8 * width * k)
        m.write_bits(to, np.asarray(whole))

    return run


def _lop3(i):
    """The instruction lop3: any function of three bits, by its table of eight."""
    get, table = [operand(a, "b32") for a in i.args[1:4]], int(i.args[4], 0)

    def run(m):
        a, b, c = (g(m) for g in get)
        result = np.uint32(0)
        for k in range(8):
            if table >> k & 1:
                result = result | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
        m.write_bits(i.args[0], np.asarray(result))

    return run


def _prmt(i):
    """The instruction prmt: four of eight bytes; a selector's fourth bit asks for the byte's sign instead.

    LLVM fills registers with bytes in several steps. A byte of a register that nobody has written makes one that
    nobody has written, either.
    """
    if len(i.op) > 2:
        raise NotImplementedError(i.text)
    get = [operand(a, "b32") for a in i.args[1:4]]

    def run(m):
        undefined = [_undefined(m, a) for a in i.args[1:3]]
        if any(undefined):
            get_some = [get[k] if not undefined[k] else _what_there_is(i.args[1 + k]) for k in range(2)]
            of_both, selector = undefined[0] | undefined[1] << 4, int(i.args[3].rstrip("U"), 0)
            permute(m, *get_some, get[2])
            left = sum((of_both >> (selector >> 4 * k & 7) & 1) << k for k in range(4))
            if left:
                m.undefined[i.args[0]] = left
        else:
            permute(m, *get)

    def permute(m, *get):
        a, b, selectors = (g(m).astype(np.uint64) for g in get)
        both, result = a | b << np.uint64(32), np.uint64(0)
        for k in range(4):
            selector = selectors >> np.uint64(4 * k) & np.uint64(15)
            byte = both >> (selector & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            result = result | np.where(selector & np.uint64(8), sign, byte) << np.uint64(8 * k)
        m.write_bits(i.args[0], np.asarray(result).astype(np.uint32))

    return run


def _undefined(m, argument: str) -> int:
    """The bytes of an argument that nobody has written, a bit for each."""
    if not is_register(argument):
        return 0
    return m.undefined.get(argument, 0) if argument in m.registers else 15


def _what_there_is(argument: str):
    """A function of the machine: the bytes of a register, or zeros if it was never written."""
    return lambda m: np.asarray(m.registers.get(argument, np.uint32(0))).view(np.uint32)


def _shf(i):
    get, (direction, mode) = [operand(a, "b32") for a in i.args[1:4]], i.op[1:3]

    def run(m):
        low, high, n = (g(m).astype(np.uint64) for g in get)
        n = n & np.uint64(31) if mode == "wrap" else np.minimum(n, np.uint64(32))
        both = low | high << np.uint64(32)
        result = both << n >> np.uint64(32) if direction == "l" else both >> n
        m.write_bits(i.args[0], np.asarray(result).astype(np.uint32))

    return run


def _bfe(i):
    """The instruction bfe: bits of a number from one on; of a signed number with the sign of the last."""
    get, start, length = operand(i.args[1], i.op[-1]), int(i.args[2], 0), int(i.args[3], 0)
    whole = 8 * TYPES[i.op[-1]].itemsize
    if not 0 < length <= whole - start:
        raise NotImplementedError(i.text)

    def run(m):
        a = np.asarray(get(m))
        m.write_bits(i.args[0], a << a.dtype.type(whole - start - length) >> a.dtype.type(whole - length))

    return run


TABLE = {"mov": _mov, "lop3": _lop3, "prmt": _prmt, "shf": _shf, "bfe": _bfe}
