"""Tests of Linears behind a norm against float64: sizes, strategies, and data that a norm alone does not mind."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from jln._junction.linears.tiles import missing_fence
from jln._triton.target import target_chip
from workbench import LINEAR_OPERATORS, check

DTYPES = ("float16", "bfloat16", "float32", "float64")
# 1, 7: narrower than any tile of a product. 16: its narrowest tile. 64, 128, 256: the fused kernels' tiles. 1000:
# ragged, and more than they take.
FEATURES = (1, 7, 16, 64, 128, 256, 1000)
# 8: less than a tile. 100, 768: ragged for tiles of a power of two. 4096: many tiles.
WIDTHS = (8, 100, 768, 1024, 4096)
# 333: several tiles of rows, the last one ragged.
ROWS = (1, 16, 333)
OPTIONAL = ("scale", "offset", "bias")

# Every number of features, every width, every number of rows, and the corners where tiles are ragged twice.
SIZES = (
    *((16, 100, n) for n in FEATURES),
    *((16, h, 64) for h in WIDTHS if h != 100),
    (1, 8, 1),
    (1, 768, 1000),
    (1, 4096, 128),
    (333, 8, 7),
    (333, 100, 256),
    (333, 768, 16),
)


def without(operator, operands, absent):
    return tuple(None if n in absent else a for n, a in zip(operator.kind.names, operands, strict=True))


# A size has two of the four dtypes, and the next size the other two, as every case compiles two programs.
# `test_every_size` has the full product.
@pytest.mark.parametrize(("m", "h", "n", "dtype"), [(*s, d) for i, s in enumerate(SIZES) for d in DTYPES[i % 2 :: 2]])
def test_sizes(m, h, n, dtype, implementation):
    operator = LINEAR_OPERATORS["layer_norm_linear"]
    check(operator, workbench.arguments(operator, (m, h), dtype, features=(n,)), implementation)


def every_size():
    """Yield the full product of sizes and dtypes, without one of the optional arguments or with all of them.

    Each of the four dtypes of a size lacks another argument, or none. A quarter of the cases, each size in one dtype,
    has "quarter" in its name, as CI has no time for all.
    """
    for i, size in enumerate(itertools.product(ROWS, WIDTHS, FEATURES)):
        for j, dtype in enumerate(DTYPES):
            absent = (*OPTIONAL, None)[(i // 4 + j) % 4]
            name = "-".join(map(str, (*size, dtype)))
            yield pytest.param(*size, dtype, absent, id=f"quarter-{name}" if i % 4 == j else name)


@pytest.mark.heavy
@pytest.mark.parametrize(("m", "h", "n", "dtype", "absent"), list(every_size()))
def test_every_size(m, h, n, dtype, absent, implementation):
    operator = LINEAR_OPERATORS["layer_norm_linear"]
    operands = workbench.arguments(operator, (m, h), dtype, features=(n,))
    check(operator, without(operator, operands, (absent,)), implementation)


# Rows that fit in a tile, aligned, ragged and several of them, with all that a sum can have; that are too wide for one,
# whose total the forward kernel makes again; norms on both sides; and few features, which one kernel multiplies.
AGAIN = [
    ("layer_norm_linear", (150, 127), 300, "float32"),
    ("rms_norm_linear", (33, 1024), 300, "bfloat16"),
    ("rms_norm_linear", (3, 1), 300, "float64"),
    ("add_rms_norm_linear", (37, 256), 300, "bfloat16"),
    ("add_layer_norm_linear", (150, 100), 300, "float16"),
    ("add_layer_norm_linear, x_bias and gate", (33, 1000), 300, "bfloat16"),
    ("add_rms_norm_linear, x_bias and gate", (2, 20000), 300, "float32"),
    ("rms_norm_add_rms_norm_linear", (17, 100), 300, "float32"),
    ("add_layer_norm_linear", (33, 100), 16, "bfloat16"),
]


@pytest.mark.parametrize(("name", "shape", "n", "dtype"), AGAIN, ids=str)
def test_what_the_backward_pass_makes_again(name, shape, n, dtype, implementation):
    """All is as accurate with remat, and gradients in float32 are those of the sum that is kept, which is rounded."""
    operator, parameters = (LINEAR_OPERATORS | workbench.FORMS)[name], "float64" if dtype == "float64" else "float32"
    operands = workbench.arguments(operator, shape, dtype, features=(n,), parameter_dtype=parameters, mean=2.0)
    check(operator, operands, implementation, ours_alone={"remat": True})
    kept, again = (
        workbench.value_and_gradients(
            operator, functools.partial(operator, implementation=implementation, remat=remat), operands
        )
        for remat in (False, True)
    )
    for result, a in kept.items():
        if a.dtype == np.float32:
            np.testing.assert_allclose(again[result], a, rtol=0, atol=1e-5 * np.max(np.abs(a)), err_msg=result)


def with_large_bias(x, scale, offset, kernel, bias, dy):
    """Return operands with a large bias, for which c2 made from a rounded y would have lost its digits."""
    return (x, scale, offset, kernel, bias + 1000), dy


def with_large_offset(x, scale, offset, kernel, bias, dy):
    return (x, scale, offset + 10, kernel, bias), dy


def with_an_outlier_channel(x, scale, offset, kernel, bias, dy):
    """Return operands with one large column of x, as real transformers have.

    For these dscale made as sum_n kernel*G would have lost its digits.
    """
    return (x.at[:, 3].add(1000), scale, offset, kernel, bias), dy


def with_a_large_mean(x, scale, offset, kernel, bias, dy):
    """Return operands with a mean of x of which E[x^2] - E[x]^2 would leave nothing of the variance."""
    return (x + 100, scale, offset, kernel, bias), dy


def with_a_larger_mean(x, scale, offset, kernel, bias, dy):
    return (x + 1000, scale, offset, kernel, bias), dy


def with_first_columns_large(x, scale, offset, kernel, bias, dy):
    """Return operands whose first columns, which the fused forward takes first, tell nothing of the mean."""
    return (x.at[:, :64].add(1000), scale, offset, kernel, bias), dy


def with_first_columns_equal(x, scale, offset, kernel, bias, dy):
    """Return operands whose first columns, which the fused forward takes first, tell nothing of the spread."""
    return (x.at[:, :64].set(0), scale, offset, kernel, bias), dy


def with_a_small_cotangent(x, scale, offset, kernel, bias, dy):
    return (x, scale, offset, kernel, bias), dy * 1e-6


NASTY = (
    with_large_bias,
    with_large_offset,
    with_an_outlier_channel,
    with_a_large_mean,
    with_a_larger_mean,
    with_first_columns_large,
    with_first_columns_equal,
    with_a_small_cotangent,
)
# One size of each strategy.
FUSED, COMPOSED = (130, 300, 16), (16, 768, 1000)


# Only the fused forward treats a row's first columns apart. By default a case runs in two of three dtypes, and the next
# case in another two.
@pytest.mark.parametrize(
    ("data", "m", "h", "n", "dtype"),
    [
        pytest.param(data, *size, dtype, marks=() if kept else pytest.mark.heavy)
        for i, (size, data) in enumerate(itertools.product((FUSED, COMPOSED), NASTY))
        for j, dtype in enumerate(DTYPES[:3])
        for kept in [(i + j) % 3 and not (size == COMPOSED and "first" in data.__name__)]
    ],
)
def test_nasty_data(data, m, h, n, dtype, implementation):
    operator = LINEAR_OPERATORS["layer_norm_linear"]
    operands = workbench.arguments(operator, (m, h), dtype, features=(n,))
    operands, dy = data(*operands, workbench.normal(5, (m, n), dtype))
    check(operator, [a.astype(dtype) for a in operands], implementation, cotangent=dy.astype(dtype))


# 64 features are fused. bfloat16 by XLA is left out, as XLA's product gives dz in bfloat16, as autodiff does.
@pytest.mark.parametrize(
    ("dtype", "implementation"), [("float16", "xla"), ("float16", "triton"), ("bfloat16", "triton")]
)
def test_a_wider_scale_keeps_its_gradients_digits(dtype, implementation):
    """The gradient of a float32 scale keeps the digits of a sum of float32 factors, dz among them.

    Plain jnp's gradient is no such sum, and so no measure.
    """
    if dtype == "bfloat16" and (chip := target_chip()) and (why := missing_fence(chip)):
        pytest.skip(why)  # composed, and XLA's product gives dz in bfloat16
    operator = LINEAR_OPERATORS["layer_norm_linear"]
    x, scale, offset, kernel, bias = workbench.arguments(operator, (37, 100), dtype, features=(64,))
    operands = (x, scale.astype("float32"), offset, kernel, bias)
    dy = workbench.normal(5, (37, 64), dtype)
    ours = functools.partial(operator, implementation=implementation, epsilon=workbench.EPSILON)
    got = workbench.value_and_gradients(operator, ours, operands, dy)["dscale"]
    values, roundings = workbench.truth(operator, operands, dy)
    assert got.dtype == "float32"
    # The roundings are standard deviations of a hundred independent errors.
    assert np.max(np.abs(got - values["dscale"]) / roundings["dscale"]) < 4


@pytest.mark.parametrize("n", [7, 600])
def test_dz_does_not_underflow(n, implementation):
    """The gradient dx in float16 keeps its digits where dz in float16 would underflow.

    dz of 1e-7 has a bit or two in float16; dx, 100 times as large for a spread of 0.01, has eight. Plain jnp rounds dz,
    so the rule of `workbench.check` does not see it.
    """
    operator = LINEAR_OPERATORS["layer_norm_linear"]
    x, scale, offset, kernel, bias = workbench.arguments(operator, (16, 768), "float16", features=(n,))
    operands = (x * 0.01, scale, offset, (kernel / np.sqrt(n)).astype("float16"), bias)
    dy = (workbench.normal(5, (16, n), "float64") * 1e-6).astype("float16")
    ours = functools.partial(operator, implementation=implementation, epsilon=workbench.EPSILON)
    got = workbench.value_and_gradients(operator, ours, operands, dy)
    values, _ = workbench.truth(operator, operands, dy)
    error = got["dx"].astype("float64") - values["dx"]
    assert np.linalg.norm(error) <= 2**-6 * np.linalg.norm(values["dx"])


@pytest.mark.parametrize(
    ("dtype", "bias_dtype", "offset", "bias"),
    [
        ("float16", "float16", 600, -60000),  # the product is 72000, which float16 cannot hold
        ("float16", "float32", 600, -60000),
        ("bfloat16", "float32", 1 + 2**-7, -120.75),  # the product is 120.9375, which rounds to 121
    ],
)
@pytest.mark.parametrize("n", [16, 300])  # one of each strategy
def test_bias_is_added_before_the_rounding(n, dtype, bias_dtype, offset, bias, implementation):
    """The bias is added before the result is rounded, which shows where it cancels most of the product.

    Every term of the product is exactly the offset.
    """
    h = 120
    zeros = jnp.zeros(h, dtype)
    operands = (
        workbench.normal(0, (3, h), dtype),
        zeros,
        zeros + jnp.asarray(offset, dtype),
        jnp.ones((h, n), dtype),
        jnp.full(n, bias, bias_dtype),
    )
    y = jln.layer_norm_linear(*operands, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(y, "float64"), h * offset + bias)
