"""Arithmetic instructions: add, mul, fma, div, sqrt, ...; setp and selp; cvt."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ptx.operands import TYPES, is_float, operand, register_width


def _wider(ptx_type: str) -> str:
    return ptx_type[0] + str(2 * int(ptx_type[1:]))


def _quotient(a, b):
    """The truncated quotient; by zero it is anything."""
    b = np.where(b == 0, 1, b).astype(a.dtype)
    if a.dtype.kind == "u":
        return a // b
    q = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return np.where((a < 0) != (b < 0), -q, q).astype(a.dtype)


def _upper_half(a, b, ptx_type):
    if ptx_type.endswith("32"):
        wide = TYPES[_wider(ptx_type)]
        return (a.astype(wide) * b.astype(wide) >> wide.type(32)).astype(TYPES[ptx_type])
    product = np.asarray(a, object) * np.asarray(b, object)  # Python's integers
    return np.asarray(product >> 64).astype(object).astype(TYPES[ptx_type])


def _shifted(left: bool):
    def shift(a, n):
        width = a.dtype.itemsize * 8
        over = n >= width
        by = np.where(over, 0, n).astype(a.dtype)
        if left:
            return np.where(over, a.dtype.type(0), a << by)
        sign = a >> a.dtype.type(width - 1) if a.dtype.kind == "i" else a.dtype.type(0)
        return np.where(over, sign, a >> by)

    return shift


def _fma(a, b, c):
    """The sum a * b + c. A float32 product is exact in float64, so the sum is rounded twice at most."""
    up = np.float64 if a.dtype.itemsize < 8 else np.longdouble
    return (a.astype(up) * b.astype(up) + c.astype(up)).astype(a.dtype)


def _exactly(function: Callable[..., Any], up: Any = np.longdouble):
    return lambda a: np.asarray(function(a.astype(up))).astype(a.dtype)


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
    "shl": _shifted(left=True),
    "shr": _shifted(left=False),
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
    "sqrt": np.sqrt,
    "rsqrt": _exactly(lambda a: 1 / np.sqrt(a)),
    "rcp": _exactly(lambda a: 1 / a),
    "ex2": _exactly(np.exp2, np.float64),
    "lg2": _exactly(np.log2, np.float64),
}
_OF_FLOATS = {"min": np.fmin, "max": np.fmax, "div": np.divide}


def _compile(i: Any):
    head, modifiers, ptx_type = i.op[0], i.op[1:], i.op[-1]
    function = _OF_FLOATS.get(head, _FUNCTIONS[head]) if is_float(ptx_type) else _FUNCTIONS[head]
    if "NaN" in modifiers:  # which min and max then return
        function = _FUNCTIONS[head]
    if "xorsign" in modifiers:
        function = functools.partial(_of_magnitudes, function)
    if ptx_type.endswith("x2"):
        return _packed(i, function, TYPES[ptx_type[:-2]])
    if ptx_type in ("f16", "bf16"):
        return _narrow(i, function, ptx_type)
    if "wide" in modifiers:
        return _wide(i, ptx_type)
    if head == "mul" and "hi" in modifiers:
        function = functools.partial(_upper_half, ptx_type=ptx_type)
    types = [ptx_type] * len(i.args[1:])
    if head in ("shl", "shr"):
        types = [ptx_type.replace("b", "u"), "u32"]
    get = [operand(a, t) for a, t in zip(i.args[1:], types, strict=True)]
    if "ftz" not in modifiers:
        return lambda m: m.write_bits(i.args[0], np.asarray(function(*(np.asarray(g(m)) for g in get))))
    return lambda m: m.write_bits(i.args[0], _flushed(np.asarray(function(*(_flushed(g(m)) for g in get)))))


def _of_magnitudes(function, a, b):
    """A function of |a| and |b|, negative where one of a and b is."""
    return np.copysign(function(np.abs(a), np.abs(b)), np.where(np.signbit(a) ^ np.signbit(b), -1, 1).astype(a.dtype))


def _flushed(a):
    """The numbers with zeros for subnormal ones."""
    return np.where(np.abs(a) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), a), a).astype(np.float32)


def _packed(i, function, part):
    """An operation on two narrow numbers in one register, computed in float32 and rounded."""
    whole = f"b{16 * part.itemsize}"
    get = [operand(a, whole) for a in i.args[1:]]

    def run(m):
        halves = [np.ascontiguousarray(g(m)).reshape(-1, 1).view(part).astype(np.float32) for g in get]
        m.write_bits(i.args[0], np.ascontiguousarray(function(*halves).astype(part)).view(TYPES[whole]).reshape(-1))

    return run


def _narrow(i, function, ptx_type):
    """An operation on 16 bits, computed in float32 and rounded.

    fma.rn.f32.bf16 of sm_100 adds to a float32, and its result stays one.
    """
    if i.op[-2] == "f32":
        get = [operand(a, ptx_type) for a in i.args[1:-1]] + [operand(i.args[-1], "f32")]
        target = TYPES["f32"]
    else:
        get, target = [operand(a, ptx_type) for a in i.args[1:]], TYPES[ptx_type]

    def run(m):
        values = [np.asarray(g(m)).astype(np.float32) for g in get]
        m.write_bits(i.args[0], np.asarray(function(*values)).astype(target))

    return run


def _wide(i, ptx_type):
    """The instructions mul.wide and mad.wide, whose third operand is wide already."""
    wide = _wider(ptx_type)
    a, b = (operand(x, ptx_type) for x in i.args[1:3])
    c = operand(i.args[3], wide) if len(i.args) > 3 else lambda m: TYPES[wide].type(0)

    def run(m):
        product = np.asarray(a(m)).astype(TYPES[wide]) * np.asarray(b(m)).astype(TYPES[wide])
        m.write_bits(i.args[0], np.asarray(product + c(m)))

    return run


def _ordered(compare):
    """A comparison that is False where one number is a NaN, as numpy's are; `a != b` is not."""
    return lambda a, b: compare(a, b) & (a == a) & (b == b)


def _unordered(compare):
    return lambda a, b: compare(a, b) | (a != a) | (b != b)


_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_COMPARISONS |= {f"{name}u": _unordered(f) for name, f in _COMPARISONS.items()}
_COMPARISONS |= {
    "ne": _ordered(np.not_equal),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_LOGIC = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _setp(i):
    compare, (a, b) = _COMPARISONS[i.op[1]], (operand(x, i.op[-1]) for x in i.args[1:3])
    combine = _LOGIC[i.op[2]] if len(i.args) > 3 else None
    third = operand(i.args[3], "pred") if combine else None
    results = i.args[0].split("|")

    def run(m):
        result = np.asarray(compare(a(m), b(m)))
        for name, value in zip(results, (result, ~result), strict=False):
            m.write_register(name, value if combine is None else combine(value, third(m)))

    return run


def _selp(i):
    ptx_type = i.op[-1]
    a, b, predicate = operand(i.args[1], ptx_type), operand(i.args[2], ptx_type), operand(i.args[3], "pred")
    return lambda m: m.write_bits(i.args[0], np.asarray(np.where(predicate(m), a(m), b(m)).astype(TYPES[ptx_type])))


_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _cvt(i):
    modifiers, (to, of) = i.op[1:], i.op[-2:]
    if to in _EIGHT_BITS:
        return _cvt_eight_bits(i, _EIGHT_BITS[to], of)
    if to.endswith("x2"):
        return _cvt_packed(i, TYPES[to[:-2]], of)
    get, target = operand(i.args[1], of), TYPES[to]
    if is_float(of) and not is_float(to):
        rounded, limits = _TO_INTEGER[next(x for x in modifiers if x in _TO_INTEGER)], np.iinfo(target)

        def to_integer(m):
            value = np.nan_to_num(rounded(np.asarray(get(m)).astype(np.float64)))
            m.write_bits(i.args[0], np.clip(value, limits.min, limits.max).astype(target))

        return to_integer
    if "sat" in modifiers or {"rz", "rm", "rp", "rna"} & set(modifiers):
        raise NotImplementedError(i.text)

    def run(m):
        value = np.asarray(get(m)).astype(target)
        width = register_width(i.args[0])
        if not is_float(to) and width > target.itemsize:  # extended by its sign
            value = value.astype(f"{target.kind}{width}")
        m.write_bits(i.args[0], value)

    return run


def _cvt_packed(i, part, of):
    get = [operand(a, of) for a in i.args[1:3]]

    def run(m):
        upper, lower = (np.asarray(g(m)).astype(part).view(np.uint16).astype(np.uint32) for g in get)
        m.write_bits(i.args[0], upper << np.uint32(16) | lower)

    return run


_EIGHT_BITS = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}


def _cvt_eight_bits(i, dtype, of):
    """Two numbers in a register of 16 bits, the first in the upper half; `satfinite` cuts to the largest number."""
    if "satfinite" not in i.op or of != "f32":
        raise NotImplementedError(i.text)
    get, largest = [operand(a, of) for a in i.args[1:3]], np.float32(ml_dtypes.finfo(dtype).max)

    def bits(a):
        return np.clip(a, -largest, largest).astype(dtype).view(np.uint8).astype(np.uint16)

    def run(m):
        upper, lower = (bits(np.asarray(g(m))) for g in get)
        m.write_bits(i.args[0], upper << np.uint16(8) | lower)

    return run


TABLE = dict.fromkeys(_FUNCTIONS, _compile) | {"setp": _setp, "selp": _selp, "cvt": _cvt}
