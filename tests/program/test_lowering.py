"""Rung 4: operators in every combination of dtypes lower for a GPU, forward and backward, with Triton calls in it.

By default every pair of operator and dtypes does, and each operator in bfloat16 with parameters of 16 and 32 bits.
"""

import itertools

import jax
import pytest

import catalogue
import jln
import program
from absent_gpu import struct
from catalogue import OPERATORS
from jln._triton import target
from jln._triton.chip import CHIPS

DTYPES = ("float16", "bfloat16", "float32", "float64")
H200 = target.Gpu(CHIPS["h200"])
ROWS, H, N = 64, 128, 512  # in 16 bits the product is composed, and the norm's backward works in place


@pytest.fixture(scope="module", autouse=True)
def float64():
    program.mesh("h200", (1,), ("x",))  # finds the toolchain
    with jax.enable_x64(True):
        yield


def operands(name, dtype, parameter_dtype):
    """Return the shapes of x, of what is added to it, and of the parameters."""
    sizes = catalogue.sizes((ROWS, H), -1, (N,))
    return [
        a.of(sizes, dtype if a.role == "activation" else parameter_dtype, parameter_dtype)
        for a in OPERATORS[name].arguments
    ]


def dtypes_of_operators():
    """Yield (operator, x's dtype, the parameters' dtype): what is usual, as few as have every pair, the rest heavy."""
    for (i, name), (j, dtype), (k, of_parameters) in itertools.product(*map(enumerate, (OPERATORS, DTYPES, DTYPES))):
        is_usual = (dtype, of_parameters) in (("bfloat16", "bfloat16"), ("bfloat16", "float32"))
        marks = [] if is_usual or (i + j + k) % len(DTYPES) == 0 else [pytest.mark.heavy]
        yield pytest.param(name, dtype, of_parameters, marks=marks)


@pytest.mark.parametrize(("name", "dtype", "parameter_dtype"), list(dtypes_of_operators()))
def test_forward_and_backward_lower_with_parameters_of_every_dtype(name, dtype, parameter_dtype):
    def step(*operands):
        y, pullback = jax.vjp(getattr(jln, name), *operands)
        return y, pullback(y)

    with target.using(H200):
        traced = jax.jit(step).trace(*operands(name, dtype, parameter_dtype))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @triton_kernel_call") >= 2


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31, 2**32 - 1, 2**32])  # on either side of an int32 and a uint32
def test_many_rows_lower(rows):
    def step(x, scale, dy):
        y, pullback = jax.vjp(jln.rms_norm, x, scale)
        return y, pullback(dy)

    x, scale = struct(rows, 16), struct(16)
    with target.using(H200):
        text = jax.jit(step).trace(x, scale, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @triton_kernel_call") >= 2


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31])
def test_many_rows_of_a_fused_linear_lower(rows):
    def step(x, scale, kernel, dy):
        y, pullback = jax.vjp(jln.rms_norm_linear, x, scale, kernel)
        return y, pullback(dy)

    shapes = ((rows, 16), (16,), (16, 8), (rows, 8))
    with target.using(H200):
        traced = jax.jit(step).trace(*(struct(*s) for s in shapes))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @triton_kernel_call") == 4
