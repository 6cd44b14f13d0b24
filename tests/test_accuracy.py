"""Every result of every operator against float64 (float64's own against longdouble), for both implementations."""

import functools

import jax
import numpy as np
import pytest

import jln
import workbench
from workbench import OPERATORS

DTYPES = ("float16", "bfloat16", "float32", "float64")

# 1, 2, 3: rows shorter than any tile. 127, 128, 129: either side of a power of two. 1000: a row that starts on 16 bytes
# and is no power of two. 4096: whole rows in registers. 16385: just wider than any row that is. 65536: many chunks.
WIDTHS = (1, 2, 3, 127, 128, 129, 1000, 4096, 16385, 65536)
# 1: a tile of one row. 5: fewer rows than a tile. 1000: programs of the backward kernel take many tiles each.
ROWS = (1, 5, 1000)


def sizes():
    """A million elements take the interpreter about a second; of the larger ones CI runs two."""
    return [
        pytest.param(rows, width, marks=[pytest.mark.heavy] if rows * width > 1_000_000 else [])
        for rows in ROWS
        for width in WIDTHS
    ]


def check(operator, rows, width, dtype, implementation, mean=0.0, magnitude=1.0, parameter_dtype=None):
    x, *others = workbench.arguments(operator, (rows, width), dtype, mean=mean, parameter_dtype=parameter_dtype)
    operands = ((x * magnitude).astype(dtype), *others)

    def function(*operands, **options):
        return operator(*operands, epsilon=workbench.EPSILON, **options)

    ours = functools.partial(function, implementation=implementation)
    plain = functools.partial(function, module=jln.reference)
    cotangent = workbench.cotangents(jax.eval_shape(ours, *operands))
    got = workbench.value_and_gradients(operator, ours, operands, cotangent)
    true = workbench.truth(operator, operands, cotangent, total=got.get("total"))
    workbench.assert_accurate(got, workbench.value_and_gradients(operator, plain, operands, cotangent), true)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), sizes())
def test_layer_norm(rows, width, dtype, implementation):
    check(OPERATORS["layer_norm"], rows, width, dtype, implementation)


# The tiles are those of layer_norm, so one width of each regime: several rows a tile, a row a tile, a row shared by two
# programs, chunks.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["rms_norm", "add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize(("rows", "width"), [(37, 100), (5, 4096), (7, 16384), (2, 40000)])
def test_family(name, rows, width, dtype, implementation):
    check(OPERATORS[name], rows, width, dtype, implementation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm"])
@pytest.mark.parametrize(("rows", "width"), [(5, 3), (37, 1000), (3, 16385), (2, 65536)])
def test_rows_with_a_mean_1000_times_their_spread(name, rows, width, dtype, implementation):
    """E[x^2] - E[x]^2 would leave nothing of the variance."""
    check(OPERATORS[name], rows, width, dtype, implementation, mean=1000.0)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_long_rows_side_by_side(name, implementation):
    """Of which a chunk has few elements: 512 chunks, each of whose statistics is a rounding more."""
    x = 3 + workbench.normal(0, (16384, 32), "float32")
    wide = np.asarray(x, "float64")
    wide = wide - wide.mean(0) if name == "layer_norm" else wide
    true = wide / np.sqrt(np.square(wide).mean(0) + 1e-6)

    def error(module, **options):
        return np.max(np.abs(getattr(module, name)(x, axis=0, **options) - true))

    rounding = np.finfo("float32").eps * np.max(np.abs(true))
    assert error(jln, implementation=implementation) <= 2 * error(jln.reference) + rounding


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_wider_parameters_keep_their_digits(dtype, implementation):
    """In 16 bits the sum's own rounding would hide how it was added up."""
    check(OPERATORS["layer_norm"], 37, 100, dtype, implementation, parameter_dtype="float32")


# Spreads far from 1 and still inside float16's range; the square of 1e-3 is as large as epsilon.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-3, 1e3])
def test_small_and_large_data(dtype, magnitude, implementation):
    check(OPERATORS["layer_norm"], 9, 257, dtype, implementation, magnitude=magnitude)
