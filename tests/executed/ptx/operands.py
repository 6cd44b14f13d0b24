"""Operands: PTX's types and registers as functions of the machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

SHARED_BASE = 1024  # where `global_smem` lies

TYPES = {f"{k}{n}": np.dtype(f"{'int' if k == 's' else 'uint'}{n}") for k in "bus" for n in (8, 16, 32, 64)}
TYPES |= {"f16": np.dtype("float16"), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype("float32")}
TYPES |= {"f64": np.dtype("float64"), "pred": np.dtype(bool)}
TYPES |= {"f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn), "f8E5M2": np.dtype(ml_dtypes.float8_e5m2)}  # of arrays alone

# Bytes, by LLVM's prefixes; a predicate has none.
_WIDTHS = {"rs": 2, "r": 4, "rd": 8, "f": 4, "fd": 8, "h": 2, "hh": 4, "rc": 1, "rb": 1, "p": 0, "pq": 0, "rq": 16}


def register_width(name: str) -> int:
    match = re.match(r"%([a-z]+)\d", name)
    return _WIDTHS.get(match[1], 4) if match else 0  # a name of inline assembly's own: a predicate


def is_float(ptx_type: str) -> bool:
    return ptx_type.removesuffix("x2") in ("f16", "bf16", "f32", "f64")


def is_register(argument: str) -> bool:
    return argument[0] == "%"


def group(argument: str) -> list[str]:
    """The registers of `{...}`, or of a register that stands alone."""
    return [a.strip() for a in argument[1:-1].split(",")] if argument[0] == "{" else [argument]


def operand(argument: str, ptx_type: str) -> Callable[[Any], np.ndarray]:
    """A function of the machine: the argument as an array of that type."""
    dtype = TYPES[ptx_type]
    if not is_register(argument):
        constant = _constant(argument, dtype)
        return lambda machine: constant

    def read(machine):
        value = machine.read_register(argument)
        if dtype.kind == "b" or value.dtype.kind == "b":
            return value
        if value.dtype.itemsize > dtype.itemsize:
            value = value.astype(f"u{dtype.itemsize}")
        elif value.dtype.itemsize < dtype.itemsize:
            machine.fail(f"{argument} is narrower than {ptx_type}")
        return value.view(dtype)

    return read


def _constant(text: str, dtype: np.dtype) -> Any:
    if text[:2] in ("0f", "0F"):
        return np.uint32(int(text[2:], 16)).view(dtype if dtype.itemsize == 4 else np.float32)
    if text[:2] in ("0d", "0D"):
        return np.uint64(int(text[2:], 16)).view(dtype if dtype.itemsize == 8 else np.float64)
    value = SHARED_BASE if text == "global_smem" else int(text.rstrip("U"), 0)
    if dtype.kind == "b":
        return np.bool_(value != 0)
    bits = np.array(value & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}")
    return bits.view(dtype)[()]
