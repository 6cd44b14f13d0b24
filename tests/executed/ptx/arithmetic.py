"""Arithmetic, comparisons, conversions, and instructions on bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ptx.operands import TYPES, group, is_float, is_register, operand, register_width


def _apply(i: Any, function: Callable[..., Any], types: list[str]):
    """An instruction that writes a function of its first operands, which are of these types."""
    get = [operand(a, t) for a, t in zip(i.args[1:], types, strict=False)]
    return lambda m: m.write_bits(i.args[0], np.asarray(function(*(np.asarray(g(m)) for g in get))))


def _quotient(a, b):
    """The truncated quotient; by zero it is anything."""
    b = np.where(b == 0, 1, b).astype(a.dtype)
    if a.dtype.kind == "u":
        return a // b
    q = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return np.where((a < 0) != (b < 0), -q, q).astype(a.dtype)


def _shifted(function, a, n):
    """A shift, by no more than leaves no bits, or nothing but the sign."""
    width = a.dtype.itemsize * 8
    shifted = function(a, np.minimum(n, width - 1).astype(a.dtype))
    return np.where((n >= width) & (a.dtype.kind == "u"), a.dtype.type(0), shifted)


def _fma(a, b, c):
    """The sum a * b + c. A float32 product is exact in float64, so the sum is rounded twice at most."""
    up = np.float64 if a.dtype.itemsize < 8 else np.longdouble
    return (a.astype(up) * b.astype(up) + c.astype(up)).astype(a.dtype)


def _exactly(function: Callable[..., Any], up: Any = np.longdouble):
    return lambda a: function(a.astype(up)).astype(a.dtype)


_FUNCTIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "fma": _fma,
    "div": _quotient,
    "rem": lambda a, b: a - _quotient(a, b) * b,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": functools.partial(_shifted, np.left_shift),
    "shr": functools.partial(_shifted, np.right_shift),
    "rsqrt": _exactly(lambda a: 1 / np.sqrt(a)),
    "ex2": _exactly(np.exp2, np.float64),
}
_OF_FLOATS = {"min": np.fmin, "max": np.fmax, "div": np.divide}


def _compile(i):
    head, modifiers, ptx_type = i.op[0], i.op[1:], i.op[-1]
    function, types = _FUNCTIONS[head], [ptx_type] * len(i.args[1:])
    if is_float(ptx_type) and "NaN" not in modifiers:  # which min and max return if told to
        function = _OF_FLOATS.get(head, function)
    if "xorsign" in modifiers:
        function = functools.partial(_of_magnitudes, function)
    if "wide" in modifiers or "hi" in modifiers:
        return _wide(i, ptx_type)
    if head in ("shl", "shr"):
        types = [ptx_type.replace("b", "u"), "u32"]
    elif ptx_type.endswith("x2"):  # two numbers in a register
        part = TYPES[ptx_type[:-2]]
        types = [f"b{16 * part.itemsize}"] * len(types)
        function = functools.partial(_of_halves, _narrow(function, part), part)
    elif ptx_type in ("f16", "bf16"):
        if i.op[-2] == "f32":  # sm_100 adds 16 bits to a float32, and the result stays one
            types[-1] = "f32"
        function = _narrow(function, TYPES[types[-1]])
    elif "ftz" in modifiers:
        function = functools.partial(_flushing, function)
    return _apply(i, function, types)


def _of_magnitudes(function, a, b):
    """A function of |a| and |b|, negative where one of a and b is."""
    return np.copysign(function(np.abs(a), np.abs(b)), np.where(np.signbit(a) ^ np.signbit(b), -1, 1).astype(a.dtype))


def _flushing(function, *operands):
    """A function with zeros for subnormal numbers."""
    flushed = (np.where(np.abs(a) < np.finfo(np.float32).tiny, a * np.float32(0), a) for a in operands)
    result = function(*flushed)
    return np.where(np.abs(result) < np.finfo(np.float32).tiny, result * np.float32(0), result)


def _narrow(function, dtype):
    """A function computed in float32 and rounded."""
    return lambda *operands: function(*(a.astype(np.float32) for a in operands)).astype(dtype)


def _of_halves(function, part, *operands):
    whole = f"u{2 * part.itemsize}"
    halves = (np.ascontiguousarray(a).reshape(-1, 1).view(part) for a in operands)
    return np.ascontiguousarray(function(*halves)).view(whole).reshape(-1)


def _wide(i, ptx_type):
    """The instructions mul.wide; mad.wide, whose third operand is wide already; mul.hi, the product's upper half."""
    dtype, wide = TYPES[ptx_type], ptx_type[0] + str(2 * int(ptx_type[1:]))

    def function(a, b, *c):
        product = a.astype(TYPES[wide]) * b.astype(TYPES[wide])
        if "hi" in i.op:
            return (product >> TYPES[wide].type(8 * dtype.itemsize)).astype(dtype)
        return sum(c, product)

    return _apply(i, function, [ptx_type, ptx_type, wide])


_COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "neu": np.not_equal}
_COMPARISONS |= {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def _setp(i):
    a, b = (operand(argument, i.op[-1]) for argument in i.args[1:])
    if i.op[1] == "ne" and is_float(i.op[-1]):  # false where one is a NaN, as numpy's is not
        raise NotImplementedError(i.text)
    return lambda m: m.write_register(i.args[0], np.asarray(_COMPARISONS[i.op[1]](a(m), b(m))))


def _selp(i):
    return _apply(i, lambda a, b, predicate: np.where(predicate, a, b), [i.op[-1], i.op[-1], "pred"])


_EIGHT_BITS = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}


def _cvt(i):
    modifiers, (to, of) = {*i.op[1:-2]} - {"ftz"}, i.op[-2:]
    if modifiers - {"rn", "satfinite"} or ("satfinite" in modifiers) != (to in _EIGHT_BITS):
        raise NotImplementedError(i.text)
    if to.endswith("x2"):
        return _apply(i, functools.partial(_packed, to), [of, of])
    if is_float(of) and not is_float(to):
        raise NotImplementedError(i.text)
    target, width = TYPES[to], register_width(i.args[0])
    if not is_float(to) and width > target.itemsize:  # extended by its sign
        return _apply(i, lambda a: a.astype(target).astype(f"{target.kind}{width}"), [of])
    return _apply(i, lambda a: a.astype(target), [of])


def _packed(to, upper, lower):
    """Two narrow numbers in one register; those of eight bits are cut to the largest."""
    part = _EIGHT_BITS.get(to) or TYPES[to[:-2]]
    if to in _EIGHT_BITS:
        largest = np.float32(ml_dtypes.finfo(part).max)
        upper, lower = (np.clip(a, -largest, largest) for a in (upper, lower))
    size = np.dtype(part).itemsize
    upper, lower = (a.astype(part).view(f"u{size}").astype(f"u{2 * size}") for a in (upper, lower))
    return upper << upper.dtype.type(8 * size) | lower


def _mov(i):
    to, of = i.args
    dtype = TYPES[i.op[-1]]
    if to[0] == "{":
        return _unpack(group(to), operand(of, i.op[-1]), dtype.itemsize)
    if of[0] == "{":
        return _pack(to, group(of), dtype)
    return _apply(i, lambda a: a, [i.op[-1]])


def _unpack(parts, get, size):
    width = size // len(parts)

    def run(m):
        whole = get(m)
        for k, part in enumerate(parts):
            m.write_bits(part, (whole >> whole.dtype.type(8 * width * k)).astype(f"u{width}"))

    return run


def _pack(to, parts, dtype):
    width = dtype.itemsize // len(parts)
    get = [operand(part, f"b{8 * width}") for part in parts]

    def run(m):
        whole = dtype.type(0)
        for k, g in enumerate(get):
            # Half of what is packed may be nobody's: a NaN, if it is used.
            known = not is_register(parts[k]) or parts[k] in m.registers
            part = g(m).astype(dtype) if known else dtype.type((1 << 8 * width) - 1)
            whole = whole | part << dtype.type(8 * width * k)
        m.write_bits(to, np.asarray(whole))

    return run


def _prmt(i):
    """The instruction prmt: four of eight bytes; a selector's fourth bit asks for the byte's sign instead."""

    def function(a, b, selectors):
        both, result = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.uint32(0)
        for k in range(4):
            selector = selectors >> np.uint32(4 * k)
            byte = (both >> (selector & 7).astype(np.uint64) * np.uint64(8)).astype(np.uint8)
            byte = np.where(selector & 8, byte.view(np.int8) >> 7, byte).astype(np.uint8)
            result = result | byte.astype(np.uint32) << np.uint32(8 * k)
        return result

    return _apply(i, function, ["b32"] * 3)


def _bfe(i):
    """The instruction bfe: bits of a number from one on; of a signed number with the sign of the last."""
    length, start = int(i.args[3], 0), int(i.args[2], 0)
    whole = 8 * TYPES[i.op[-1]].itemsize
    if not 0 < length <= whole - start:
        raise NotImplementedError(i.text)
    left, right = whole - start - length, whole - length
    return _apply(i, lambda a: a << a.dtype.type(left) >> a.dtype.type(right), [i.op[-1]])


TABLE = dict.fromkeys(_FUNCTIONS, _compile) | {"setp": _setp, "selp": _selp, "cvt": _cvt}
TABLE |= {"mov": _mov, "prmt": _prmt, "bfe": _bfe}
