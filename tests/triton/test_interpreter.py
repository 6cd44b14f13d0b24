"""Tests of the interpreter's guards: no kernel passes that stores outside its buffers, or not at all."""

from typing import Any, NamedTuple

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


class Record(NamedTuple):
    x: Any = None
    y: Any = None


@triton.jit
def add_kernel(a: Record, r: Record, BLOCK_H: tl.constexpr):
    at = tl.arange(0, BLOCK_H)
    x = tl.load(a.x + at)
    tl.store(r.y + at, x if a.y is None else x + tl.load(a.y + at))


def test_records_have_what_is_given_and_none_for_the_rest():
    x, tile = FIVE[:4], Tile(1, 4, 1)
    result = Record(y=jax.ShapeDtypeStruct(x.shape, x.dtype))
    for given in (Record(x), Record(x, 2 * x)):
        made = run(add_kernel, {"a": given}, {"r": result}, tile)["r"]
        assert made.x is None
        np.testing.assert_array_equal(made.y, x if given.y is None else 3 * x)
    with pytest.raises(AssertionError, match="results in front of operands"):  # which XLA hands over first
        run(add_kernel, {"r": Record(x)}, {"a": result}, tile)
    with pytest.raises(AssertionError, match=r"no arguments \['b.x'\]"):
        run(add_kernel, {"b": Record(x)}, {"r": result}, tile)


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr, COMPUTE: tl.constexpr):
    at = tl.arange(0, BLOCK_ROWS)[:, None] * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.trans(tl.load(b_ptr + at)), tl.zeros_like(at).to(COMPUTE)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dot_multiplies_numbers(dtype):
    """`tl.dot` multiplies numbers, where Triton's own interpreter multiplies the bit patterns of bfloat16."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((16, 16)).astype(jnp.dtype(dtype)) for _ in range(2))
    operands = {"a": jnp.asarray(a), "b": jnp.asarray(b)}
    c = run(dot_kernel, operands, {"c": jax.ShapeDtypeStruct((16, 16), "float32")}, Tile(16, 16, 1))["c"]
    np.testing.assert_allclose(c, a.astype("float64") @ b.astype("float64").T, rtol=0, atol=1e-5)


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
