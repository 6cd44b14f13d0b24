"""Tests of the interpreter's guards: no kernel passes that stores outside its buffers, or not at all."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from jln._triton import interpreter  # noqa: E402
from jln._triton.launch import launch  # noqa: E402
from jln._triton.target import Interpreter, interpreting  # noqa: E402
from jln._triton.tile import Tile, next_power_of_2  # noqa: E402

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")

FIVE = jnp.arange(5, dtype="float32")


def run(kernel, operands, results, tile=None, programs=1, **more):
    """Launch a kernel on one tile of x's size, or on others."""
    tile = tile or Tile(1, next_power_of_2(operands["x"].size), 1)
    how = {"programs": programs, "tile": tile, "compute": jnp.dtype("float32")}
    return launch(Interpreter(), kernel, operands, results, **how, **more)


@triton.jit
def copy_kernel(x_ptr, n, y_ptr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr, COMPUTE: tl.constexpr,
                SHIFT: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    at = tl.arange(0, BLOCK_H)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(COMPUTE)
    tl.store(y_ptr + SHIFT + at, x.to(y_ptr.dtype.element_ty), mask=at < COUNT)


def copy(x, shift=0, count=None, result="float32"):
    count = x.size if count is None else count
    result = {"y": jax.ShapeDtypeStruct(x.shape, result)}
    return run(copy_kernel, {"x": x, "n": x.size}, result, SHIFT=shift, COUNT=count)["y"]


@pytest.mark.parametrize(("shift", "side"), [(1, "after"), (-1, "before")])
def test_a_store_out_of_bounds_raises(shift, side):
    np.testing.assert_array_equal(copy(FIVE), FIVE)
    with pytest.raises(Exception, match=f"copy_kernel: 4 bytes {side} y "):
        jax.block_until_ready(copy(FIVE, shift=shift))


def test_an_unwritten_element_is_nan_and_so_is_a_load_out_of_bounds():
    np.testing.assert_array_equal(np.isnan(copy(FIVE, count=4)), [False] * 4 + [True])
    buffer = interpreter.Buffer((3,), np.dtype("float32"), np.ones(3, "float32"))
    outside = np.frombuffer(buffer._bytes, "float32")
    assert np.isnan(outside[[0, -1]]).all() and np.isfinite(outside).sum() == 3


def test_casts_to_bfloat16_round_to_nearest_even():
    """Casts to bfloat16 round to nearest even, where Triton's own interpreter truncates."""
    x = np.random.default_rng(0).standard_normal(1000).astype("float32")
    x[:4] = [1 + 2**-8, 1 + 3 * 2**-8, np.inf, -np.inf]  # two ties
    np.testing.assert_array_equal(copy(jnp.asarray(x), result="bfloat16"), x.astype(ml_dtypes.bfloat16))


@triton.jit
def reversed_kernel(x_ptr, y_ptr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr, COMPUTE: tl.constexpr):
    """Store each element at the other end, one element a program.

    In place, each program of the last half reads what one of the first half has written.
    """
    at, last = tl.program_id(0), tl.num_programs(0) - 1
    tl.store(y_ptr + at, tl.load(x_ptr + last - at))


def test_a_result_in_place_of_an_operand_overwrites_it_and_leaves_the_callers_array():
    x = FIVE[:4]

    def reverse(result="float32", **options):
        results = {"y": jax.ShapeDtypeStruct(x.shape, result)}
        return run(reversed_kernel, {"x": x}, results, Tile(1, 1, 1), programs=4, **options)["y"]

    np.testing.assert_array_equal(reverse(), [3, 2, 1, 0])
    np.testing.assert_array_equal(reverse(in_place={"x": "y"}), [3, 2, 2, 3])
    np.testing.assert_array_equal(x, [0, 1, 2, 3])
    with pytest.raises(AssertionError, match=r"y, .*float64.*, cannot take the place of x, .*float32"):
        reverse("float64", in_place={"x": "y"})
