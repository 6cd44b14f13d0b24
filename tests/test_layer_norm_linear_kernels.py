"""The LayerNorm+Linear launchers against float64, in the interpreter: both strategies, each result by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from workbench import normal

pytest.importorskip("triton")

from jln._triton import config, launch, layer_norm_linear

pytestmark = pytest.mark.skipif(not launch.interpreting(), reason="kernels are compiled here")

EPSILON = 1e-6
NAMES = ("y", "dx", "dscale", "doffset", "dkernel", "dbias")


def options(**given):
    defaults = {"subtract_mean": True, "zero_centered_scale": False, "batch_dims": 0}
    return {"epsilon": EPSILON, "precision": None, "chip": config.INTERPRETER} | defaults | given


def arguments(m, h, n, dtype, parameter_dtype=None):
    """(x, scale, offset, kernel, bias), kernel as a layer initialises it."""
    parameter_dtype = parameter_dtype or dtype
    return (
        normal(0, (m, h), dtype),
        normal(2, (h,), parameter_dtype, 1.0),
        normal(3, (h,), parameter_dtype),
        (normal(4, (h, n), "float64") / np.sqrt(h)).astype(dtype),
        normal(5, (n,), dtype),
    )


def results(x, scale, offset, kernel, bias, dy, **given):
    """What the launchers return, in the order of NAMES."""
    chosen = options(**given)
    y, mean, rstd = layer_norm_linear.forward(x, scale, offset, kernel, bias, save_statistics=True, **chosen)
    dbias_dtype = None if bias is None else bias.dtype
    gradients = layer_norm_linear.backward(dy, x, scale, offset, kernel, mean, rstd, dbias_dtype=dbias_dtype, **chosen)
    return y, *gradients


def launched(operands, dy, **given):
    return {n: np.asarray(a) for n, a in zip(NAMES, results(*operands, dy, **given), strict=True) if a is not None}


def launches(operands, dy, **given):
    """{kernel's name: its launch}, none made."""
    with launch.recording() as recorded:
        jax.eval_shape(lambda *a: results(*a, **given), *operands, dy)
    return {r.kernel.fn.__name__: r for r in recorded}


def plain(operands, dy, subtract_mean=True, zero_centered_scale=False):
    """The same by autodiff of plain jnp, in the same dtypes."""
    product = jnp.promote_types(operands[0].dtype, operands[3].dtype)

    def layer_norm_linear(x, scale, offset, kernel, bias):
        x = x.astype(jnp.promote_types(x.dtype, "float32"))
        mean = x.mean(-1, keepdims=True) if subtract_mean else 0
        z = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + EPSILON)
        if scale is not None:
            z = z * (scale.astype(x.dtype) + zero_centered_scale)[None]
        if offset is not None:
            z = z + offset.astype(x.dtype)[None]
        y = z.astype(product) @ kernel.astype(product)
        return y if bias is None else (y + bias[None]).astype(product)

    y, pullback = jax.vjp(layer_norm_linear, *operands)
    return {n: np.asarray(a) for n, a in zip(NAMES, (y, *pullback(dy)), strict=True) if a is not None}


def truth(operands, dy, subtract_mean=True, zero_centered_scale=False):
    """In NumPy, one precision up, with what one rounding of each intermediate may change: `(values, roundings)`."""
    wide = np.longdouble if operands[0].dtype == np.float64 else np.float64
    eps = float(jnp.finfo(jnp.promote_types(operands[0].dtype, "float32")).eps)
    x, scale, offset, k, bias = (None if a is None else np.asarray(a).astype(wide) for a in operands)
    s = np.ones(x.shape[1]) if scale is None else scale + zero_centered_scale
    b = np.zeros(x.shape[1]) if offset is None else offset
    dy = np.asarray(dy).astype(wide)
    centred = x - x.mean(-1, keepdims=True) if subtract_mean else x
    rstd = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + wide(EPSILON))
    x_hat = centred * rstd
    x_hat_rounding = eps * (np.abs(x).max(-1, keepdims=True) * rstd + np.abs(x_hat).max(-1, keepdims=True))
    z = x_hat * s + b
    dz = dy @ k.T
    g = dz * s
    c1 = g.mean(-1, keepdims=True) if subtract_mean else 0
    c2 = (g * x_hat).mean(-1, keepdims=True)
    dbias = dy.sum(0)
    values = {
        "y": z @ k + (0 if bias is None else bias),
        "dx": rstd * (g - c1 - x_hat * c2),
        "dscale": (dz * x_hat).sum(0),
        "doffset": k @ dbias,
        "dkernel": z.T @ dy,
        "dbias": dbias,
    }
    # Of a sum of products, the root of the sum of squares: errors of its terms and of its partial sums are independent.
    dz_rounding = eps * np.sqrt(dy**2 @ k.T**2)
    largest = (np.abs(g) + dz_rounding / eps * np.abs(s)).max(-1, keepdims=True)
    root = np.sqrt(len(x))
    roundings = {
        "y": np.sqrt((x_hat_rounding * s + eps * z) ** 2 @ k**2) + eps * np.abs(values["y"]),
        "dx": rstd * largest * (eps + x_hat_rounding) * (1 + np.abs(x_hat)),
        "dscale": np.sqrt(((dz * x_hat_rounding) ** 2 + len(x) * (dz_rounding * x_hat) ** 2).sum(0)),
        "doffset": eps * root * np.sqrt((dz_rounding**2).sum(0) / eps**2),
        "dkernel": np.sqrt((x_hat_rounding * s + eps * root * z).T ** 2 @ dy**2),
        "dbias": eps * root * np.sqrt((dy**2).sum(0)),
    }
    return values, roundings


def assert_accurate(operands, dy, **given):
    """Each result's error is at most twice that of plain jnp in the same dtype, plus one rounding."""
    got = launched(operands, dy, **given)
    given.pop("chip", None)
    simple, (values, roundings) = plain(operands, dy, **given), truth(operands, dy, **given)
    assert got.keys() == simple.keys()
    for name, a in got.items():
        t = values[name]
        assert a.dtype == simple[name].dtype and a.shape == simple[name].shape, name
        last = float(jnp.finfo(a.dtype).eps) * np.abs(t) + float(jnp.finfo(a.dtype).smallest_subnormal)
        plain_error = np.max(np.abs(simple[name].astype(t.dtype) - t))
        excess = np.abs(a.astype(t.dtype) - t) - (2 * plain_error + roundings[name] + last)
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        assert excess[worst] <= 0, (
            f"{name}{list(map(int, worst))}: {a[worst]} for {t[worst]}, {float(excess[worst]):.3e} too much; plain "
            f"jnp's largest error is {float(plain_error):.3e}"
        )


def is_fused(m, h, n, dtype, chip=config.INTERPRETER):
    """In both directions; false where it is in none."""
    forward, backward = (choose(m, h, n, dtype, chip) for choose in (config.fused_forward, config.fused_backward))
    assert (forward is None) == (backward is None)
    return forward is not None


# Five tiles of rows over three splits, one loop shorter than the others, all ragged; then one element of everything;
# a ragged row tile and two ragged chunks; whole tiles; more chunks than SMs, and two programs that share the row sums.
FUSED = [(300, 60, 7), (1, 8, 1), (65, 104, 128), (64, 128, 64), (16, 300, 16)]
# Past the fused kernels' features, the second with aligned rows; features, then rows, that are not aligned.
COMPOSED = [(33, 100, 300), (16, 256, 257), (9, 64, 130), (9, 100, 72)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("m", "h", "n"), FUSED)
def test_fused(m, h, n, dtype):
    assert is_fused(m, h, n, dtype)
    operands = arguments(m, h, n, dtype)
    assert_accurate(operands, normal(6, (m, n), dtype))


@pytest.mark.parametrize(("m", "h", "n"), [(100, 60, 16), (40, 72, 256)])
def test_fused_for_mma(m, h, n):
    """The tiles of fewer rows that sm_80 and sm_89 take, in several trips each."""
    chip = config.Chip(config.INTERPRETER.name, 80, 3)
    assert is_fused(m, h, n, "bfloat16", chip)
    assert config.fused_backward(m, h, n, "bfloat16", chip).backward.rows == 16
    assert_accurate(arguments(m, h, n, "bfloat16"), normal(6, (m, n), "bfloat16"), chip=chip)


def test_many_shares():
    """A chip on which the shares of G and of dbias are more than `parameters_kernel` adds at a time."""
    m, h, n, chip = 3000, 64, 256, config.Chip(config.INTERPRETER.name, 90, 40)
    plan = config.fused_backward(m, h, n, "bfloat16", chip)
    assert plan.splits > plan.parameters.rows and plan.row_programs > plan.parameters.rows * plan.parameters.columns
    assert_accurate(arguments(m, h, n, "bfloat16"), normal(6, (m, n), "bfloat16"), chip=chip)


def test_many_shares_composed():
    """More than the 32 of dscale and doffset that `reduce_kernel` adds at a time."""
    chip = config.Chip(config.INTERPRETER.name, 90, 40)
    operands, dy = arguments(90, 1023, 3, "float32"), normal(6, (90, 3), "float32")
    assert launches(operands, dy, chip=chip)["reduce_kernel"].arguments[2] > 32
    assert_accurate(operands, dy, chip=chip)


@pytest.mark.parametrize(
    ("precision", "fused"),
    [
        (None, True),
        (jax.lax.Precision.HIGHEST, True),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_F32, True),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_BF16, False),
        (jax.lax.DotAlgorithmPreset.F16_F16_F32, False),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32, False),
    ],
)
def test_precision(precision, fused):
    """An algorithm that the fused kernels do not have is XLA's, to run or refuse."""
    made = launches(arguments(16, 64, 16, "bfloat16"), normal(6, (16, 16), "bfloat16"), precision=precision)
    assert ("parameters_kernel" in made) == fused


def test_fused_of_the_widest():
    """All 256 features, under float32 norm parameters."""
    assert is_fused(70, 72, 256, "bfloat16")
    assert_accurate(arguments(70, 72, 256, "bfloat16", "float32"), normal(6, (70, 256), "bfloat16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize(("m", "h", "n"), COMPOSED)
def test_composed(m, h, n, dtype):
    assert not is_fused(m, h, n, dtype)
    assert_accurate(arguments(m, h, n, dtype), normal(6, (m, n), dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_dtypes_are_composed_at_every_n(dtype):
    assert not is_fused(9, 100, 16, dtype)
    assert_accurate(arguments(9, 100, 16, dtype), normal(6, (9, 16), dtype))


NASTY = {
    "bias 1000": lambda x, s, b, k, c, dy: (x, s, b, k, c + 1000, dy),
    "offset 10": lambda x, s, b, k, c, dy: (x, s, b + 10, k, c, dy),
    "outlier channel": lambda x, s, b, k, c, dy: (x.at[:, 3].set(1000 + 8 * x[:, 3]), s, b, k, c, dy),
    "mean 100 times the spread": lambda x, s, b, k, c, dy: (x + 100, s, b, k, c, dy),
    "mean 1000 times the spread": lambda x, s, b, k, c, dy: (x + 1000, s, b, k, c, dy),
    # What the fused forward takes first tells nothing of the mean, or of the spread.
    "first columns large": lambda x, s, b, k, c, dy: (x.at[:, :64].add(1000), s, b, k, c, dy),
    "first columns equal": lambda x, s, b, k, c, dy: (x.at[:, :64].set(0), s, b, k, c, dy),
    "dy 1e-6": lambda x, s, b, k, c, dy: (x, s, b, k, c, (dy.astype("float32") * 1e-6).astype(dy.dtype)),
}


@pytest.mark.parametrize("n", [16, 300], ids=["fused", "composed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("data", NASTY)
def test_nasty_data(data, dtype, n):
    m, h = 130, 300
    assert is_fused(m, h, n, dtype) == (n == 16)
    *operands, dy = NASTY[data](*arguments(m, h, n, dtype), normal(6, (m, n), dtype))
    assert_accurate(tuple(operands), dy)


@pytest.mark.parametrize("n", [16, 300], ids=["fused", "composed"])
def test_small_cotangents_of_small_rows(n):
    """rstd is 1000, dy 1e-6: dx is an ordinary number, which a dz rounded to float16 would leave with 4 bits."""
    x, *parameters = arguments(70, 60, n, "float16")
    dy = (normal(6, (70, n), "float32") * 1e-6).astype("float16")
    operands = ((x * 1e-3).astype("float16"), *parameters)
    values, _ = truth(operands, dy)
    error = np.abs(launched(operands, dy)["dx"].astype("float64") - values["dx"])
    assert error.max() <= 2e-3 * np.abs(values["dx"]).max()


ABSENT = {"scale": (1,), "offset": (2,), "bias": (4,), "offset and bias": (2, 4), "all": (1, 2, 4)}


@pytest.mark.parametrize("n", [16, 300], ids=["fused", "composed"])
@pytest.mark.parametrize("absent", ABSENT)
def test_absent_arguments(absent, n):
    operands = tuple(None if i in ABSENT[absent] else a for i, a in enumerate(arguments(70, 60, n, "bfloat16")))
    assert_accurate(operands, normal(6, (70, n), "bfloat16"))


@pytest.mark.parametrize("n", [16, 300], ids=["fused", "composed"])
@pytest.mark.parametrize(("subtract_mean", "zero_centered_scale"), [(False, False), (False, True), (True, True)])
def test_switches(subtract_mean, zero_centered_scale, n):
    x, scale, offset, kernel, bias = arguments(70, 60, n, "bfloat16")
    given = {"subtract_mean": subtract_mean, "zero_centered_scale": zero_centered_scale}
    offset = offset if subtract_mean else None
    assert_accurate((x + 1, scale, offset, kernel, bias), normal(6, (70, n), "bfloat16"), **given)


def test_mixed_dtypes():
    """bfloat16 x with float32 parameters: products and y in float32."""
    x, *parameters = arguments(9, 64, 16, "float32")
    operands = (x.astype("bfloat16"), *parameters)
    assert_accurate(operands, normal(6, (9, 16), "float32"))
    assert launched(operands, normal(6, (9, 16), "float32"))["dx"].dtype == "bfloat16"


def test_leading_axes():
    x, *parameters = arguments(24, 40, 5, "bfloat16")
    dy = normal(6, (24, 5), "bfloat16")
    flat = launched((x, *parameters), dy)
    deep = launched((x.reshape(2, 3, 4, 40), *parameters), dy.reshape(2, 3, 4, 5))
    for name, a in deep.items():
        np.testing.assert_array_equal(a.reshape(flat[name].shape), flat[name])


@pytest.mark.parametrize("shared", ["none", "parameters", "x", "kernel and bias"])
def test_batch(shared):
    """vmap's axis, with operands of size 1 where they are shared: what one example after another gives."""
    example = arguments(5, 24, 6, "float32")
    keep_one = {"none": (), "parameters": (1, 2, 3, 4), "x": (0,), "kernel and bias": (3, 4)}[shared]
    operands = tuple(
        jnp.stack([a] if i in keep_one else [a * f for f in (1.0, -0.5, 2.0)]) for i, a in enumerate(example)
    )
    dy = normal(7, (3, 5, 6), "float32")
    got = launched(operands, dy, batch_dims=1)
    for i in range(3):
        one = launched(tuple(a[min(i, len(a) - 1)] for a in operands), dy[i])
        for name, a in got.items():
            assert a.shape == (3, *one[name].shape), name
            np.testing.assert_allclose(a[i], one[name], rtol=1e-5, atol=1e-5)


EXTREME_ROWS = {
    "constant": ("float16", lambda row: row * 0 + 80),
    "constant and large": ("bfloat16", lambda row: row * 0 + 1e36),
    "of infinite variance": ("bfloat16", lambda row: row * 1e30),
}


@pytest.mark.parametrize("row", EXTREME_ROWS)
@pytest.mark.parametrize("scaled", ["no scale", "scale", "zero-centred scale"])
def test_extreme_rows(scaled, row):
    """rstd is large or 0: nothing may become 0 * inf, not in the columns past the last one, and not on the way."""
    dtype, change = EXTREME_ROWS[row]
    x, scale, offset, kernel, bias = arguments(70, 100, 16, dtype)
    operands = (x.at[5].set(change(x[5])), None if scaled == "no scale" else scale, offset, kernel, bias)
    dy = normal(6, (70, 16), dtype)
    given = {"zero_centered_scale": scaled == "zero-centred scale"}
    simple = plain(operands, dy, **given)
    for name, a in launched(operands, dy, **given).items():
        assert np.isfinite(a[np.isfinite(simple[name])]).all(), name


@pytest.mark.parametrize("rows", [4096, 6144, 2048, 2049], ids=["two groups", "three", "one", "not divisible"])
def test_column_sums_of_many_rows(rows):
    """Integers, so that every order of adding gives the same; beyond what bfloat16 could count."""
    a = jnp.asarray(np.random.default_rng(0).integers(-3, 5, (2, rows, 5)), "bfloat16")
    sums = jax.jit(layer_norm_linear._column_sums, static_argnums=1)(a, "float32")
    np.testing.assert_array_equal(sums, np.asarray(a, "float64").sum(1))


def test_statistics_only_where_asked_for():
    operands = arguments(5, 24, 6, "bfloat16")
    _, mean, rstd = layer_norm_linear.forward(*operands, save_statistics=False, **options())
    assert mean is None and rstd is None
    _, mean, rstd = layer_norm_linear.forward(*operands, save_statistics=True, **options(subtract_mean=False))
    assert mean is None and rstd.shape == (5, 1) and rstd.dtype == "float32"


@pytest.mark.parametrize("n", [16, 300], ids=["fused", "composed"])
def test_a_nan_stays_in_its_row(n):
    x, *parameters = arguments(70, 60, n, "bfloat16")
    got = launched((x.at[66, 5].set(jnp.nan), *parameters), normal(6, (70, n), "bfloat16"))
    for name in ("y", "dx"):
        rows = np.isnan(got[name].astype("float32")).any(-1)
        np.testing.assert_array_equal(np.flatnonzero(rows), [66])
