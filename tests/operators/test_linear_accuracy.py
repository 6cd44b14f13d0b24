"""Linears behind a norm against float64, by each strategy, in the interpreter and by XLA."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from jln._junction.linears.tiles import missing_fence
from jln._triton.target import target_chip
from workbench import LINEAR_OPERATORS, check

DTYPES = ("float16", "bfloat16", "float32", "float64")
LINEAR = LINEAR_OPERATORS["layer_norm_linear"]
BOTH = pytest.mark.parametrize("n", [16, 300], ids=["fused", "composed"])

# Rows, H and features: every tile of features of the fused kernels, their most features, and more.
SIZES = (
    (300, 60, 7),  # five tiles of rows over three programs, so that one's loop is shorter, all ragged
    (333, 100, 256),
    (64, 128, 64),  # whole tiles
    (65, 104, 128),  # a ragged tile of rows, and two chunks, one of them ragged
    (16, 300, 16),  # more chunks than SMs, where two programs share the row sums
    (1, 8, 1),
    (33, 100, 300),
    (9, 64, 130),  # features that are not aligned
    (333, 8, 7),
    (16, 256, 257),  # aligned rows, and a feature more than are fused
    (3, 4099, 40),  # of four programs each reads whole rows, which none may have written over
    (9, 100, 72),  # rows that are not aligned
    (1, 4096, 128),
    (16, 768, 1000),
)


def arguments(m, h, n, dtype, operator=LINEAR, **options):
    return workbench.arguments(operator, (m, h), dtype, features=(n,), **options)


# A size has two of the four dtypes, and the next size the other two, as every case compiles two programs.
@pytest.mark.parametrize(("m", "h", "n", "dtype"), [(*s, d) for i, s in enumerate(SIZES) for d in DTYPES[i % 2 :: 2]])
def test_sizes(m, h, n, dtype, implementation):
    check(LINEAR, arguments(m, h, n, dtype), implementation)


def every_size():
    """Yield the full product of sizes and dtypes; each size in one dtype has "quarter" in its name, for CI."""
    sizes = itertools.product((1, 16, 333), (8, 100, 768, 1024, 4096), (1, 7, 16, 64, 128, 256, 1000))
    for i, size in enumerate(sizes):
        for j, dtype in enumerate(DTYPES):
            name = "-".join(map(str, (*size, dtype)))
            yield pytest.param(*size, dtype, id=f"quarter-{name}" if i % 4 == j else name)


@pytest.mark.heavy
@pytest.mark.parametrize(("m", "h", "n", "dtype"), list(every_size()))
def test_every_size(m, h, n, dtype, implementation):
    check(LINEAR, arguments(m, h, n, dtype), implementation)


@BOTH
@pytest.mark.parametrize("name", ["layer_norm_linear", "rms_norm_linear"])
def test_a_zero_centred_scale(name, n):
    operands = arguments(70, 60, n, "bfloat16", LINEAR_OPERATORS[name], mean=1.0)
    check(LINEAR_OPERATORS[name], operands, "triton", zero_centered_scale=True)


@BOTH
@pytest.mark.parametrize(("x", "residual"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_behind_a_sum(x, residual, n):
    """The rounded sum is what a norm behind a sum normalises and returns, and its own cotangent is added."""
    operator = LINEAR_OPERATORS["add_layer_norm_linear"]
    given, added, *parameters = arguments(70, 100, n, x, operator)
    added = (added + 300).astype(residual)  # in 16 bits a sum's rounding is of x's size
    check(operator, (given, added, *parameters), "triton")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_extreme_rows(dtype):
    """Every result that is finite in plain jnp is finite for rows whose rstd is large or 0.

    Nothing may become 0 * inf: not in the columns past the last one, and not on the way.
    """
    x, scale, offset, kernel, bias = arguments(70, 100, 16, dtype)
    rows = [x[5] * 0 + 80] if dtype == "float16" else [x[5] * 0 + 1e36, x[5] * 1e30]  # constant; of infinite variance
    x = x.at[5 : 5 + len(rows)].set(jnp.stack(rows).astype(dtype))
    operands = (x, scale, offset, kernel, bias)
    got, plain = (
        workbench.value_and_gradients(LINEAR, functools.partial(LINEAR, zero_centered_scale=True, **by), operands)
        for by in ({"implementation": "triton"}, {"module": jln.reference})
    )
    for name, a in got.items():
        assert np.isfinite(a[np.isfinite(plain[name])]).all(), name


# Rows that fit in a tile, aligned, ragged and several of them, with all that a sum can have; that are too wide for one,
# whose total the forward kernel makes again; norms on both sides; and few features, which one kernel multiplies.
AGAIN = [
    ("rms_norm_linear", (3, 1), 300, "float64"),
    ("add_rms_norm_linear", (37, 256), 300, "bfloat16"),
    ("add_layer_norm_linear, x_bias and gate", (33, 1000), 300, "bfloat16"),
    ("add_rms_norm_linear, x_bias and gate", (2, 16500), 260, "float32"),
    ("rms_norm_add_rms_norm_linear", (17, 100), 300, "float32"),
    ("add_layer_norm_linear", (33, 100), 16, "float16"),
]


@pytest.mark.parametrize(("name", "shape", "n", "dtype"), AGAIN, ids=str)
def test_what_the_backward_pass_makes_again(name, shape, n, dtype, implementation):
    """All is as accurate with remat, and gradients in float32 are those of the sum that is kept, which is rounded."""
    operator, parameters = (LINEAR_OPERATORS | workbench.FORMS)[name], "float64" if dtype == "float64" else "float32"
    operands = arguments(*shape, n, dtype, operator, parameter_dtype=parameters, mean=2.0)
    epsilon = {"epsilon": workbench.EPSILON}
    dy = workbench.cotangents(jax.eval_shape(operator, *operands))
    plain, kept, again = (
        workbench.value_and_gradients(operator, functools.partial(operator, **epsilon, **how), operands, dy)
        for how in ({"module": jln.reference}, *({"implementation": implementation, "remat": r} for r in (False, True)))
    )
    workbench.assert_accurate(again, plain, workbench.truth(operator, operands, dy, total=again.get("total")))
    for result, a in kept.items():
        if a.dtype == np.float32:
            np.testing.assert_allclose(again[result], a, rtol=0, atol=1e-5 * np.max(np.abs(a)), err_msg=result)


NASTY = {
    "a large bias, for which c2 made from a rounded y would lose its digits": {"bias": lambda b: b + 1000},
    "a large offset": {"offset": lambda o: o + 10},
    # As real transformers have. For these dscale made as sum_n kernel*G would lose its digits.
    "an outlier channel": {"x": lambda x: x.at[:, 3].add(1000)},
    "a mean of which E[x^2] - E[x]^2 leaves nothing": {"x": lambda x: x + 1000},
    # Of the first columns, which the fused forward takes first.
    "first columns that do not tell the mean": {"x": lambda x: x.at[:, :64].add(1000)},
    "first columns that do not tell the spread": {"x": lambda x: x.at[:, :64].set(0)},
    "a small cotangent": {"dy": lambda dy: dy * 1e-6},
}


# Each has two of three dtypes, and only the fused forward treats a row's first columns apart.
@pytest.mark.parametrize(
    ("data", "n", "dtype"),
    [
        (data, n, dtype)
        for (i, data), n, (j, dtype) in itertools.product(enumerate(NASTY), (16, 1000), enumerate(DTYPES[:3]))
        if (i + j) % 3 and (n == 16 or "first" not in data)
    ],
)
def test_nasty_data(data, n, dtype, implementation):
    given = dict(zip(LINEAR.kind.names, arguments(130 if n == 16 else 16, 300, n, dtype), strict=True))
    given["dy"] = workbench.normal(5, (len(given["x"]), n), dtype)
    given |= {name: change(given[name]).astype(dtype) for name, change in NASTY[data].items()}
    dy = given.pop("dy")
    check(LINEAR, [*given.values()], implementation, cotangent=dy)


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
    x, scale, *rest = arguments(37, 100, 64, dtype)
    operands, dy = (x, scale.astype("float32"), *rest), workbench.normal(5, (37, 64), dtype)
    ours = functools.partial(LINEAR, implementation=implementation, epsilon=workbench.EPSILON)
    got = workbench.value_and_gradients(LINEAR, ours, operands, dy)["dscale"]
    values, roundings = workbench.truth(LINEAR, operands, dy)
    assert got.dtype == "float32"
    # The roundings are standard deviations of a hundred independent errors.
    assert np.max(np.abs(got - values["dscale"]) / roundings["dscale"]) < 4


@pytest.mark.parametrize("n", [7, 600])
def test_dz_does_not_underflow(n, implementation):
    """The gradient dx in float16 keeps its digits where dz in float16 would underflow.

    dz of 1e-7 has a bit or two in float16; dx, 100 times as large for a spread of 0.01, has eight. Plain jnp rounds dz,
    so the rule of `workbench.check` does not see it.
    """
    x, scale, offset, kernel, bias = arguments(16, 768, n, "float16")
    operands = (x * 0.01, scale, offset, (kernel / np.sqrt(n)).astype("float16"), bias)
    dy = (workbench.normal(5, (16, n), "float64") * 1e-6).astype("float16")
    ours = functools.partial(LINEAR, implementation=implementation, epsilon=workbench.EPSILON)
    got = workbench.value_and_gradients(LINEAR, ours, operands, dy)
    values, _ = workbench.truth(LINEAR, operands, dy)
    error = got["dx"].astype("float64") - values["dx"]
    assert np.linalg.norm(error) <= 2**-6 * np.linalg.norm(values["dx"])


@pytest.mark.parametrize(
    ("dtype", "bias_dtype", "offset", "bias"),
    [
        ("float16", "float16", 600, -60000),  # the product is 72000, which float16 cannot hold
        ("bfloat16", "float32", 1 + 2**-7, -120.75),  # the product is 120.9375, which rounds to 121
    ],
)
@BOTH
def test_bias_is_added_before_the_rounding(n, dtype, bias_dtype, offset, bias, implementation):
    """The bias is added before the result is rounded, which shows where it cancels most of the product.

    Every term of the product is exactly the offset.
    """
    h = 120
    x, zeros = workbench.normal(0, (3, h), dtype), jnp.zeros(h, dtype)
    of_linear = (jnp.ones((h, n), dtype), jnp.full(n, bias, bias_dtype))
    y = jln.layer_norm_linear(x, zeros, zeros + jnp.asarray(offset, dtype), *of_linear, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(y, "float64"), h * offset + bias)


@pytest.mark.parametrize("precision", ["highest", ("high", "default"), jax.lax.Precision.HIGH, "BF16_BF16_F32", None])
def test_precision_is_that_of_every_product(precision):
    """The precision is that of the forward's product and of the backward's two, and there is no other product."""
    operands = arguments(4, 9, 6, "float32")

    def asked(f, **options):
        def step(*operands):
            y, pullback = jax.vjp(lambda *a: f(*a, precision=precision, **options), *operands)
            return pullback(y)

        text = jax.jit(step).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        return sorted(line.split(", precision")[-1].split(" :")[0] for line in text.splitlines() if "dot_gen" in line)

    ours = asked(jln.layer_norm_linear, implementation="xla")
    assert len(ours) == 3 and ours == asked(jln.reference.layer_norm_linear)


def test_precision_may_be_the_default_of_the_moment():
    with jax.default_matmul_precision("highest"):
        text = str(jax.make_jaxpr(jln.layer_norm_linear)(*arguments(4, 9, 6, "float32")))
    assert "HIGHEST" in text
