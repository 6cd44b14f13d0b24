"""Norms that quantise: the bits and scales of their results, by XLA and by the kernels, and their gradients."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jln
import workbench
from catalogue import FORMS, sizes
from in_eight_bits import block_scaled, compare, every_bfloat16, scaled, spread
from jln._triton import chip as chips
from jln._triton import target
from jln._triton.chip import CHIPS

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
NORMS = [name for name, form in FORMS.items() if not form.is_linear]
KINDS = ["one scale", "blocks", "current scale"]
H = 64


@pytest.fixture(params=KINDS[:2])
def how(request):
    return request.param


def quantized(how, dtype=DTYPES["e4m3"], scale=0.03):
    if how == "blocks":
        return jln.MXFloat8(dtype)
    return jln.Float8(scale if how == "one scale" else None, dtype)


@pytest.mark.parametrize("to", DTYPES)
def test_every_number_of_bfloat16(to, how, implementation):
    """Rows of ones are their own norm, whose scale the numbers are."""
    numbers, by = every_bfloat16(flushed=True), {"quantize": quantized(how, DTYPES[to], 0.75), "epsilon": 0.0}
    true = block_scaled(numbers, DTYPES[to]) if how == "blocks" else scaled(numbers, 0.75, DTYPES[to])
    compare(jln.rms_norm(jnp.ones_like(numbers), numbers, implementation=implementation, **by), true)


def check(got, y):
    """Assert that the result is y in eight bits, but for numbers that y's last bits put on another side of a tie."""
    make = block_scaled if got.amax is None else lambda y, dtype: scaled(y, got.scale, dtype)
    low, high = (make(np.asarray(y, "float64") * (1 + d), got.values.dtype) for d in (-1e-6, 1e-6))
    scale = np.asarray(got.scale, "float32")
    assert np.all(low.scale <= scale) and np.all(scale <= high.scale)
    between = [np.asarray(a.values, "float32") * spread(a.scale) for a in (low, high)]
    values = np.asarray(got.dequantized())
    assert np.all(values >= np.minimum(*between)) and np.all(values <= np.maximum(*between))
    assert np.mean(between[0] != between[1]) < 1e-2
    if got.amax is not None:
        np.testing.assert_allclose(got.amax, np.max(np.abs(y)), rtol=2e-6)


def test_of_a_quantisation_by_jax_itself():
    """Blocks have the bits and scales that `jax.nn.scaled_dot_general` makes of the same numbers in float32."""
    from jax._src.cudnn.scaled_matmul_stablehlo import quantize

    x = workbench.normal(0, (64, 256), "float32") * jnp.exp2(jnp.arange(64, dtype="float32") - 32)[:, None]
    y = jln.layer_norm(x, x[0])
    values, scales = quantize(y[None], jax.nn.get_scaled_dot_general_config("mxfp8"))
    got = jln.layer_norm(x, x[0], quantize=jln.MXFloat8())
    np.testing.assert_array_equal(np.asarray(got.values).view("u1"), np.asarray(values[0]).view("u1"))
    np.testing.assert_array_equal(np.asarray(got.scale).view("u1"), np.asarray(scales[0]).view("u1"))


def operands(name, shape, dtype, parameter_dtype=None):
    """The operands of a form, in the order of its names."""
    arrays = [a.of(sizes(shape, -1, ()), dtype, parameter_dtype or dtype) for a in FORMS[name].arguments]
    return [workbench.normal(i, a.shape, a.dtype) for i, a in enumerate(arrays)]


def function(name, **options):
    """The operator of a form, of its operands in order: y, and the total or None."""
    form = FORMS[name]
    operator = form.in_order(getattr(jln, form.name), form.names, **options)
    return operator if form.adds else lambda *a: (operator(*a), None)


# A ragged tile of rows; so many chunks that a row's largest is found in several, and whose statistics grow on the way.
@pytest.mark.parametrize("shape", [(37, 96), (2, 20000)], ids=str)
@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("name", NORMS)
def test_every_norm(name, how, shape, implementation):
    """The bits are those of the norm in float32, and every gradient is that of the norm, bit for bit.

    The same kernel makes it of the same x, statistics and cotangents, that of the total too.
    """
    given, by = operands(name, shape, "bfloat16", "float32"), {"implementation": implementation}
    dy = workbench.cotangents(jax.eval_shape(function(name, **by), *given))

    @jax.jit
    def quantised(given):
        def numbers(*given):
            q, total = function(name, quantize=quantized(how), **by)(*given)
            return (q.dequantized(q.carrier.dtype), total), (q._replace(carrier=None), total)

        _, pullback, results = jax.vjp(numbers, *given, has_aux=True)
        return results, pullback(dy)

    @jax.jit
    def plain(given):
        _, pullback = jax.vjp(function(name, **by), *given)
        return function(name, dtype="float32", **by)(*given), pullback(dy)

    ((got, total), gradients), ((y, true_total), true_gradients) = quantised(given), plain(given)
    chex.assert_trees_all_equal((total, gradients), (true_total, true_gradients))
    check(got, y)
    if how == "one scale":
        assert got.scale == np.float32(0.03)
    if how == "current scale":
        np.testing.assert_allclose(got.scale, got.amax / 448, rtol=1e-6)
        assert np.max(np.abs(np.asarray(got.values, "float32"))) == 448


@pytest.mark.parametrize("quantize", [jln.Float8(0.02), jln.Float8(), jln.MXFloat8(jnp.float8_e5m2)], ids=str)
def test_no_rows(implementation, quantize):
    """An expert without tokens, and a batch without examples, have results of no rows, and gradients of zero."""
    x, by = jnp.ones((3, 0, H), "float32"), {"quantize": quantize, "implementation": implementation}
    got = jax.jit(lambda x: jln.rms_norm(x, **by))(x)
    assert got.values.shape == got.dequantized().shape == x.shape
    loss = lambda *a: jnp.sum(jax.tree.leaves(jln.rms_norm_linear(x, *a, **by))[0])  # noqa: E731
    gradients = jax.jit(jax.grad(loss, (0, 1)))(jnp.ones(H, "float32"), jnp.ones((H, 96), "float32"))
    assert all(not jnp.any(d) for d in gradients)


def test_current_scaling_of_zeros_and_of_nan():
    zeros = jln.rms_norm(jnp.zeros((4, H), "float32"), quantize=jln.Float8())
    assert zeros.scale == 1 and zeros.amax == 0 and not np.any(np.asarray(zeros.values, "float32"))
    nan = jln.rms_norm(jnp.zeros((4, H), "float32").at[2, 3].set(jnp.nan), quantize=jln.Float8())
    assert nan.scale == 1 and np.isnan(nan.amax)
    np.testing.assert_array_equal(np.any(np.isnan(np.asarray(nan.values, "float32")), 1), [False, False, True, False])


@pytest.mark.parametrize(("axis", "implementation"), [(0, "xla"), ((2, 1), "triton")])
def test_one_scale_over_other_axes(axis, implementation):
    x, by = workbench.normal(0, (8, 12, 16), "float32"), {"axis": axis, "implementation": implementation}
    check(jln.layer_norm(x, quantize=jln.Float8(0.02), **by), jln.layer_norm(x, **by))


def test_a_mean_without_a_scale(how, implementation):
    """Columns that only fill a tile are far from a mean of 100, and in no maximum."""
    x = workbench.normal(0, (37, 96), "float32") + 100
    got = jln.layer_norm(x, quantize=quantized(how, scale=0.02), implementation=implementation)
    y = jln.layer_norm(x, implementation=implementation)
    if how == "blocks":
        np.testing.assert_array_equal(np.asarray(got.scale, "float32"), block_scaled(y, got.values.dtype).scale)
    else:
        np.testing.assert_allclose(got.amax, np.max(np.abs(y)), rtol=1e-5)


@pytest.mark.parametrize("axes", [(0, None), (0, 0), (None, 0)])
def test_vmap(axes, how, implementation):
    """Examples have their own bits, largest numbers and scales, of which some are given."""
    x, w = workbench.normal(0, (3, 4, H), "float32"), workbench.normal(1, (3, H), "float32")
    x, w = (a if axis == 0 else a[0] for a, axis in zip((x, w), axes, strict=True))
    scales = jnp.array([0.01, 0.02, 0.03])

    def f(x, w, scale):
        return jln.rms_norm(x, w, quantize=quantized(how, DTYPES["e5m2"], scale), implementation=implementation)

    def each(x, w):
        found = [f(x[i] if axes[0] == 0 else x, w[i] if axes[1] == 0 else w, scales[i]) for i in range(3)]
        return jax.tree.map(lambda *a: jnp.stack(a), *found)

    expected = jax.jit(each)(x, w)
    chex.assert_trees_all_equal(jax.jit(jax.vmap(f, (*axes, 0)))(x, w, scales), expected)


OWN = {"groups": (3, 4, 1, H), "each row": (3, 4, 5, H), "heads": (1, 1, 5, H), "heads of groups": (3, 1, 5, H)}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("how", KINDS)
def test_parameters_of_examples(how, own, implementation):
    """Block scales of groups and heads have addresses of their own; a current scale is that of all of them."""
    x, w = workbench.normal(0, (3, 4, 5, H), "float32"), workbench.normal(1, OWN[own], "float32")
    got = jln.rms_norm(x, w, quantize=quantized(how), implementation=implementation)
    check(got, jln.rms_norm(x, w, implementation=implementation))
    if how == "current scale":
        np.testing.assert_allclose(got.scale, got.amax / 448, rtol=1e-6)


@pytest.mark.parametrize(
    ("chip", "triton", "converts"),
    [("a100", (3, 9, 0), False), ("l4", (3, 9, 0), True), ("l4", (3, 8, 0), False), ("mi300x", (3, 9, 0), False)],
)
def test_chips_that_do_not_convert_have_eight_bits_by_xla(chip, triton, converts, monkeypatch):
    """No kernel makes them where Triton does not round once by one instruction; one finds the maximum on every chip."""
    monkeypatch.setattr(chips, "triton_version", lambda: triton)
    x, found = jax.ShapeDtypeStruct((64, 1024), "bfloat16"), CHIPS[chip]

    def written(quantize):
        with target.using(target.Recorder(found)) as recorder:
            step = jax.jit(lambda x: jln.rms_norm(x, quantize=quantize, implementation="triton"))
            step.trace(x).lower(lowering_platforms=(found.platform,))
        return [
            {name.removeprefix("r."): a.dtype.name for name, a in launch.results.items()}
            for launch in recorder.launches
        ]

    y, amax = {"y": "float8_e4m3fn"}, {"y_max": "float32"}
    assert written(jln.MXFloat8()) == [y | {"block_scale": "uint8"}] * converts
    assert written(jln.Float8(0.5)) == [y | amax] * converts
    assert written(jln.Float8()) == [amax] + [y] * converts


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("name", ["add_layer_norm", "rms_norm_gated", "rms_norm_add_rms_norm"])
def test_where_the_chip_does_not_convert(name, how):
    """A kernel finds the largest number, XLA computes the rest: gradients, and examples with scales of their own."""
    names, given = FORMS[name].names, operands(name, (3, 5, H), "float32")
    own = [jnp.stack([a, 2 * a, -a]) for a in given]

    def of(implementation):
        norm = function(name, quantize=quantized(how), implementation=implementation)

        def loss(*given):
            q, total = norm(*given)
            used = [jnp.sum(jnp.sin(a)) for a in (q.dequantized(), total) if a is not None]
            return sum(used), (q._replace(carrier=None), total)

        def everything(given, own):
            made = [jax.value_and_grad(loss, range(len(given)), has_aux=True)(*given)]
            for ends in ("scale",), ("scale", "x", "residual", "z"):  # of what vmap goes over; the rest is shared
                is_own = [n.endswith(ends) for n in names]
                mixed = [a if yes else b for a, b, yes in zip(own, given, is_own, strict=True)]
                made.append(jax.vmap(lambda *a: loss(*a)[1], [0 if yes else None for yes in is_own])(*mixed))
            return made

        return jax.jit(everything)(given, own)

    with target.using(target.Interpreter(CHIPS["a100"])):
        got = of("triton")
    chex.assert_trees_all_close(got, of("xla"), rtol=1e-5, atol=1e-5)


X = workbench.normal(0, (4, H), "float32")
WRONG = {
    "a dtype beside it": (ValueError, "dtype", {"dtype": "float32", "quantize": jln.MXFloat8()}),
    "another dtype": (TypeError, "float8_e4m3fn or float8_e5m2", {"quantize": jln.Float8(1.0, "int8")}),
    "no kind": (TypeError, "jln.Float8", {"quantize": "mxfp8"}),
    "rows of 24": (ValueError, "every 32", {"x": X[:, :24], "quantize": jln.MXFloat8()}),
    "another axis": (ValueError, "last, normalised axis", {"axis": 0, "quantize": jln.MXFloat8()}),
    "a scale of rows": (ValueError, "must be a number", {"quantize": jln.Float8(X[:, 0])}),
    "a scale below float32's normal numbers": (ValueError, "normal in float32", {"quantize": jln.Float8(1e-40)}),
    "a scale of zero": (ValueError, "positive", {"quantize": jln.Float8(0.0)}),
    "float64": (TypeError, "float64", {"x": X.astype("float64"), "quantize": jln.MXFloat8()}),
    "forward mode": (ValueError, "forward_mode", {"forward_mode": True, "quantize": jln.MXFloat8()}),
}


@pytest.mark.parametrize(("error", "message", "given"), WRONG.values(), ids=WRONG)
def test_what_is_refused(error, message, given):
    with pytest.raises(error, match=message):
        jln.rms_norm(**{"x": X} | given)


@pytest.mark.parametrize("part", ["values", "scale", "amax"])
@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_add_rms_norm"])
def test_a_part_alone(name, how, part, implementation):
    """A step that reads a part of the result has the same part, and the others are dead code in it."""
    if (how, part) == ("blocks", "amax"):
        part = "values"  # blocks tell no largest number
    given = operands(name, (37, 96), "bfloat16")
    norm = function(name, quantize=quantized(how, DTYPES["e5m2"]), implementation=implementation)

    def read(*given):
        return jnp.zeros([]), getattr(norm(*given)[0], part)

    (_, got), _ = jax.jit(jax.value_and_grad(read, has_aux=True))(*given)
    whole, _ = jax.jit(norm)(*given)
    np.testing.assert_array_equal(*(np.asarray(a, "float32") for a in (got, getattr(whole, part))))
