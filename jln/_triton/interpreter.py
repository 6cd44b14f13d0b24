"""Triton kernels on the CPU, by Triton's own interpreter, without PyTorch.

Every array is copied into a buffer with guard words on both sides, and every output is filled with NaN first: a store
outside its buffer raises, and an element that no program wrote, or that came from a load out of bounds, is NaN.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from unittest import mock

import ml_dtypes
import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle

from jln._triton.launch import TYPE_NAMES, Launch

# The types whose numbers Triton holds as integers of the same bits.
HELD_AS_BITS = {"bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}
GUARD_BYTES = 4096
GUARD_BYTE = 0xFF  # all ones is a NaN in every floating-point type

# The interpreter keeps the program's index in a module-level object.
_lock = threading.Lock()


class OutOfBoundsStore(RuntimeError):
    """The error of a kernel that wrote outside one of its buffers."""


class Buffer:
    """An array between guard words, with the two attributes by which Triton knows a pointer."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, value: np.ndarray | None = None):
        self.shape = shape
        self.np_dtype = np.dtype(dtype)
        self.dtype = TYPE_NAMES[self.np_dtype.name]
        size = int(np.prod(shape)) * self.np_dtype.itemsize
        self._bytes = np.full(size + 2 * GUARD_BYTES, GUARD_BYTE, np.uint8)
        self._inside = slice(GUARD_BYTES, GUARD_BYTES + size)
        if value is not None:
            self.array()[...] = value

    def data_ptr(self) -> int:
        return self._bytes.ctypes.data + GUARD_BYTES

    def array(self) -> np.ndarray:
        return self._bytes[self._inside].view(self.np_dtype).reshape(self.shape)

    def check_guards(self, kernel: str, argument: str) -> None:
        for side, guard in (("before", self._bytes[:GUARD_BYTES]), ("after", self._bytes[self._inside.stop :])):
            touched = np.flatnonzero(guard != GUARD_BYTE)
            if touched.size:
                raise OutOfBoundsStore(
                    f"{kernel}: {touched.size} bytes {side} {argument} {self.shape} were overwritten"
                )


class _Executor(GridExecutor):
    """A grid executor whose arguments are on the host already."""

    def _init_args_hst(self, args_dev, kwargs):
        return args_dev, kwargs

    def _restore_args_dev(self, args_dev, args_hst, kwargs, kwargs_hst):
        pass


@contextlib.contextmanager
def _patch():
    """Patch the interpreter while the context is active."""
    patched = set()
    original_cast = InterpreterBuilder.cast_impl
    original_dot = InterpreterBuilder.create_dot

    def call_device_function(self, *args, **kwargs):
        # Triton patches what a helper's module knows of the language at every call, which is most of the time of a run.
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    def cast(self, src, dst_type, rounding_mode=None):
        # Triton's own casts to bfloat16 truncate; GPUs round to nearest even.
        source, wanted = (t.scalar.name for t in (src.dtype, dst_type))
        if source == wanted or not {source, wanted} & {*HELD_AS_BITS}:
            return original_cast(self, src, dst_type)
        value, held = numbers(src), interpreter._get_np_dtype(dst_type)
        value = value.astype(HELD_AS_BITS[wanted]).view(held) if wanted in HELD_AS_BITS else value.astype(held)
        return TensorHandle(value, dst_type.scalar)

    def dot(self, a, b, d, *options):
        # Triton's own multiplies the bit patterns of bfloat16.
        return original_dot(self, widen(a), widen(b), d, *options)

    def splat(self, to, a):
        # Triton's own makes integers of a comparison of two numbers, and no mask may be made of these.
        return TensorHandle(np.full(to.shape, a.data, a.data.dtype), a.dtype.scalar)

    def widen(a):
        if a.dtype.scalar.name not in HELD_AS_BITS:
            return a
        return TensorHandle(numbers(a).astype(np.float32), interpreter.tl.float32)

    def numbers(a):
        held = HELD_AS_BITS.get(a.dtype.scalar.name)
        return a.data if held is None else a.data.view(held)

    # Triton's own reckons in 64 bits whether sums and products of indices overflow, and drops the answer.
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    rules = {"cast_impl": cast, "create_fp_to_fp": cast, "create_dot": dot, "create_splat": splat}
    with (
        mock.patch.object(interpreter.interpreter_builder, "options", options),
        mock.patch.object(InterpretedFunction, "__call__", call_device_function),
        mock.patch.multiple(InterpreterBuilder, **rules),
    ):
        yield


def run(launch: Launch, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run a launch's kernel for every program and return the results.

    A result that takes an operand's place is in the place of a copy of the operand.
    """
    kernel = launch.kernel
    if not isinstance(kernel, InterpretedFunction):
        raise RuntimeError("TRITON_INTERPRET=1 must be set before triton is first imported")
    pairs = zip(launch.arrays, arrays, strict=True)
    buffers = {name: Buffer(np.shape(a), a.dtype, np.asarray(a)) for name, a in pairs}
    taken = {result: buffers[operand] for operand, result in launch.in_place.items()}
    buffers |= {name: taken.get(name) or Buffer(r.shape, r.dtype) for name, r in launch.results.items()}
    arguments = launch.by_parameter(buffers | launch.scalars | launch.constants)
    with _lock, _patch(), np.errstate(all="ignore"):  # a NaN or an overflow is the kernel's business
        _Executor(kernel.rewrite(), kernel.arg_names, (launch.programs,))(**arguments)
    for name, buffer in buffers.items():
        buffer.check_guards(kernel.__name__, name)
    return [buffers[name].array() for name in launch.results]
