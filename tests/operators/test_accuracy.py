"""Tests of every result of every operator against float64 (longdouble for float64), for both implementations."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from workbench import FORMS, GATED, LINEAR_OPERATORS, OPERATORS, check

ALL = OPERATORS | LINEAR_OPERATORS | FORMS | GATED
DTYPES = ("float16", "bfloat16", "float32", "float64")

# 1, 3: rows shorter than any tile. 127, 129: either side of a power of two. 1000: a row that starts on 16 bytes and is
# no power of two. 4096: whole rows in registers. 16385: just too wide for these. 65536: many chunks.
WIDTHS = (1, 3, 127, 129, 1000, 4096, 16385, 65536)
# 1: a tile of one row. 5: fewer rows than a tile. 1000: programs of the backward kernel take many tiles each, those of
# 65536 elements left out: 16385 are chunks too, and a quarter of the time.
ROWS = (1, 5, 1000)


def by_dtype(cases, is_heavy=lambda *_: False):
    """Return each case in four dtypes as pytest parameters, two of the four dtypes marked as heavy.

    By default a case runs in one dtype of 16 bits and a wider one, and the next case in the other two. That is enough,
    as tiles depend on an element's size and not on its format.
    """
    return [
        pytest.param(*case, dtype, marks=[pytest.mark.heavy] if i % 2 != j % 2 or is_heavy(*case) else [])
        for i, case in enumerate(cases)
        for j, dtype in enumerate(DTYPES)
    ]


def is_long(rows, width):
    """Return whether x has more than a million elements.

    The interpreter takes about a second for a million elements. CI runs one of the larger sizes, in bfloat16.
    """
    return rows * width > 1_000_000


@pytest.mark.parametrize(
    ("rows", "width", "dtype"), by_dtype([(r, w) for w in WIDTHS for r in ROWS if (r, w) != (1000, 65536)], is_long)
)
def test_layer_norm(rows, width, dtype, implementation):
    operator = OPERATORS["layer_norm"]
    check(operator, workbench.arguments(operator, (rows, width), dtype), implementation)


# The tiles are those of layer_norm, so one width of each regime is enough: several rows a tile, a row a tile, a row
# shared by two programs, chunks. With a gate: several programs, chunks.
@pytest.mark.parametrize(
    ("rows", "width", "name", "dtype"),
    by_dtype(
        [(*size, n) for size in [(37, 100), (5, 4096), (7, 16384), (2, 40000)] for n in OPERATORS if n != "layer_norm"]
        + [(*size, n) for size in [(150, 127), (2, 20000)] for n in (*FORMS, *GATED) if "linear" not in n]
    ),
)
def test_family(name, rows, width, dtype, implementation):
    check(ALL[name], workbench.arguments(ALL[name], (rows, width), dtype), implementation)


@pytest.mark.parametrize("name", GATED)
def test_gates_far_from_zero_are_nothing_or_all(name, implementation):
    """Gates are right where silu(z) is 0 or z: of very negative z exp(-z) overflows, of very positive it vanishes."""
    x, z, scale = workbench.arguments(GATED[name], (9, 100), "float32")
    check(GATED[name], (x, 100 * z, scale), implementation)


@pytest.mark.parametrize(("name", "width"), [("add_layer_norm_linear", 5000), ("add_rms_norm_linear", 8192)])
def test_rows_of_float32_that_no_tile_holds_beside_another_cotangent(name, width):
    """The cotangent of a sum has its row sums where y is made again, too, in rows of 4097 to 8192 of float32."""
    check(ALL[name], workbench.arguments(ALL[name], (3, width), "float32", features=(512,)), "triton")


@pytest.mark.parametrize(
    ("rows", "width", "name", "dtype"),
    by_dtype(
        (*size, name)
        for name in ["layer_norm", "add_layer_norm"]
        for size in [(5, 3), (37, 1000), (3, 16385), (2, 40000)]
    ),
)
def test_rows_with_a_mean_1000_times_their_spread(name, rows, width, dtype, implementation):
    """Rows whose mean is 1000 times their spread keep their variance, of which E[x^2] - E[x]^2 would leave nothing."""
    operator = OPERATORS[name]
    check(operator, workbench.arguments(operator, (rows, width), dtype, mean=1000.0), implementation)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_rows_of_many_chunks(name, implementation):
    """A row of two million elements, in hundreds of chunks, each of whose statistics is a rounding more."""
    x = 3 + workbench.normal(0, (1, 2**21), "float32")
    wide = np.asarray(x, "float64")
    wide = wide - wide.mean() if name == "layer_norm" else wide
    true = wide / np.sqrt(np.square(wide).mean() + 1e-6)

    def error(module, **options):
        return np.max(np.abs(getattr(module, name)(x, **options) - true))

    assert error(jln, implementation=implementation) <= 2 * error(jln.reference)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_wider_parameters_keep_their_digits(dtype, implementation):
    """Float32 parameters of an x in 16 bits have gradients as accurate as float32.

    With parameters in 16 bits the gradient's own rounding would hide how its sum over rows was added up.
    """
    operator = OPERATORS["layer_norm"]
    check(operator, workbench.arguments(operator, (37, 100), dtype, parameter_dtype="float32"), implementation)


# Spreads far from 1 whose squares do not overflow; the square of 1e-3 is as large as epsilon.
@pytest.mark.parametrize(
    ("magnitude", "dtype"), [*itertools.product((1e-3, 1e3), DTYPES), *itertools.product((1e-30, 1e17), DTYPES[1:3])]
)
def test_small_and_large_data(dtype, magnitude, implementation):
    operator = OPERATORS["layer_norm"]
    x, *others = workbench.arguments(operator, (9, 257), dtype)
    check(operator, ((x * magnitude).astype(dtype), *others), implementation)


def optional_arguments():
    """Yield (name, features, names of absent arguments, zero_centered_scale) for every operator.

    Each optional argument is absent alone, all are, and none. Behind a sum a Linear has all or the bias alone, since
    the norm's parameters play the same part as without one. 64 features and 1000 are the two strategies for a product.
    """
    for name, operator in (OPERATORS | LINEAR_OPERATORS).items():
        optional = tuple(argument.name for argument in operator.entry.arguments if argument.optional)
        others = tuple(n for n in optional if n not in ("scale", "bias"))
        if operator.entry.is_linear and operator.adds:
            sets = ((), tuple(n for n in optional if n != "bias"))
        else:
            sets = dict.fromkeys(((), *((n,) for n in optional), optional))
        for absent in sets:
            yield name, (64,) * operator.entry.is_linear, absent, False
        if operator.entry.is_linear:
            yield name, (1000,), (), False
        else:
            for absent in dict.fromkeys((others, ())):
                yield name, (), absent, True


def id_of(case):
    name, features, absent, zero_centered = case
    return "-".join([name, *map(str, features), *(f"no {n}" for n in absent), *["zero-centered"] * zero_centered])


# A norm in float64, where every slip is larger than rounding; a Linear in bfloat16, where few features are one kernel.
@pytest.mark.parametrize("case", list(optional_arguments()), ids=id_of)
def test_optional_arguments(case, implementation):
    name, features, absent, zero_centered = case
    operator = ALL[name]
    shape, dtype = ((70, 100), "bfloat16") if features else ((15, 17), "float64")
    operands = workbench.arguments(operator, shape, dtype, features=features)
    given = [None if n in absent else v for n, v in zip(operator.kind.names, operands, strict=True)]
    check(operator, given, implementation, zero_centered_scale=zero_centered, epsilon=1e-3)


# (x, parameters): the usual mixed precision; then the other way round; two formats of 16 bits, promoted to float32; and
# float64 beside float32, either way.
PAIRS = [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")]
PAIRS += [("float64", "float32"), ("float32", "float64")]
# (x, residual, parameters): the second is a residual stream kept in float32.
TRIPLES = [("bfloat16", "bfloat16", "float32"), ("bfloat16", "float32", "float32"), ("float32", "bfloat16", "bfloat16")]
TRIPLES += [("float16", "bfloat16", "float16"), ("float64", "float32", "float32"), ("float32", "float32", "float64")]
OF_ROWS = (("layer_norm", ()), ("layer_norm_linear", (64,)), ("layer_norm_linear", (600,)))


@pytest.mark.parametrize(
    ("name", "features", "dtypes"),
    [(*of, (x, x, parameter)) for of in OF_ROWS for x, parameter in PAIRS]
    + [(n, (), dtypes) for n in ("add_layer_norm", "layer_norm_add", "rms_norm_add_rms_norm") for dtypes in TRIPLES],
    ids=lambda a: "-".join(map(str, a)) if isinstance(a, tuple) else a,
)
def test_mixed_dtypes(name, features, dtypes, implementation):
    operator, (x, residual, parameter) = ALL[name], dtypes
    operands = workbench.arguments(operator, (33, 100), x, features=features, parameter_dtype=parameter)
    given = [a.astype(residual) if n == "residual" and a is not None else a
             for n, a in zip(operator.kind.names, operands, strict=True)]  # fmt: skip
    check(operator, given, implementation)
    y = jax.tree.leaves(jax.eval_shape(functools.partial(operator, implementation=implementation), *given))
    of_y = jnp.promote_types(x, parameter) if features else x
    of_y = jnp.promote_types(x, residual) if operator.entry.adds_behind else of_y
    assert [a.dtype for a in y] == [of_y, jnp.promote_types(x, residual)][: 1 + operator.adds]
