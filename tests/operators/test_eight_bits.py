"""Norms that quantise: the bits and scales of their results, by XLA and by the kernels."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jln
import workbench
from catalogue import FORMS, sizes
from in_eight_bits import Bits, block_scaled, compare, every_bfloat16, scaled, spread
from jln._triton import chip as chips
from jln._triton import target
from jln._triton.chip import CHIPS

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
NORMS = [name for name, form in FORMS.items() if not form.is_linear]
H = 64


@pytest.fixture(params=["one scale", "blocks"])
def blocks(request):
    return request.param == "blocks"


def quantized(blocks, dtype, scale=0.75):
    return jln.MXFloat8(dtype) if blocks else jln.Float8(scale, dtype)


def numbers_as_norms(numbers, quantize, implementation):
    """`numbers` in eight bits: rows of ones are their own norm, whose scale the numbers are."""
    ones = jnp.ones_like(numbers)
    return jln.rms_norm(ones, numbers, epsilon=0.0, quantize=quantize, implementation=implementation)


@pytest.mark.parametrize("to", DTYPES)
def test_every_number_of_bfloat16(to, blocks, implementation):
    numbers, dtype = every_bfloat16(flushed=True), DTYPES[to]
    got = numbers_as_norms(numbers, quantized(blocks, dtype), implementation)
    compare(got, block_scaled(numbers, dtype) if blocks else scaled(numbers, 0.75, dtype))


@pytest.mark.parametrize("to", DTYPES)
def test_ten_million_numbers_of_float32(to, blocks):
    """Random bits: all exponents, so that most blocks have one number that is large, and normal ones; ties, too."""
    random, dtype = np.random.default_rng(0), DTYPES[to]
    bits = random.integers(0, 2**32, (1250, 1, 4096), np.uint32)
    normal = random.normal(size=(1250, 1, 4096)).astype(np.float32)
    normal[:, :, ::2] = (normal[:, :, ::2] * 64).round() / 64  # ties of what e4m3 and e5m2 can hold
    numbers = np.concatenate([bits.view(np.float32), normal])
    with np.errstate(all="ignore"):
        numbers[np.abs(numbers) < 2.0**-120] = 0  # which a CPU and a GPU may flush
        true = block_scaled(numbers, dtype) if blocks else scaled(numbers, 0.75, dtype)
    compare(numbers_as_norms(numbers, quantized(blocks, dtype), "xla"), true)


def test_of_a_quantisation_by_jax_itself():
    """Blocks have the bits and scales that `jax.nn.scaled_dot_general` makes of the same numbers in float32."""
    from jax._src.cudnn.scaled_matmul_stablehlo import quantize

    x = workbench.normal(0, (64, 256), "float32") * jnp.exp2(jnp.arange(64, dtype="float32") - 32)[:, None]
    y = jln.layer_norm(x, x[0])
    values, scales = quantize(y[None], jax.nn.get_scaled_dot_general_config("mxfp8"))
    got = jln.layer_norm(x, x[0], quantize=jln.MXFloat8())
    np.testing.assert_array_equal(np.asarray(got.values).view("u1"), np.asarray(values[0]).view("u1"))
    np.testing.assert_array_equal(np.asarray(got.scale).view("u1"), np.asarray(scales[0]).view("u1"))


def operands(name, shape, dtype):
    """The operands of a form, in the order of its names."""
    arrays = [a.of(sizes(shape, -1, ()), dtype, dtype) for a in FORMS[name].arguments]
    return [workbench.normal(i, a.shape, a.dtype) for i, a in enumerate(arrays)]


def both(name, shape, blocks, implementation, dtype="bfloat16", **options):
    """The results of an operator in eight bits, and in float32; each with the total."""
    form = FORMS[name]
    results = []
    for how in ({"quantize": quantized(blocks, jnp.float8_e4m3fn, 0.03)}, {"dtype": "float32"}):
        function = form.in_order(getattr(jln, form.name), form.names, implementation=implementation, **how, **options)
        result = function(*operands(name, shape, dtype))
        results.append(result if form.adds else (result, None))
    return results


# One tile of rows, whole and ragged; chunks. 20000 is of so many chunks that a row's largest is found in several.
@pytest.mark.parametrize("shape", [(5, 64), (37, 96), (2, 20000)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_every_norm(name, shape, blocks, implementation):
    (got, total), (y, total_of_y) = both(name, shape, blocks, implementation)
    chex.assert_trees_all_equal(total, total_of_y)
    check(got, y, blocks)


def check(got, y, blocks):
    """Assert that the bits are those of y, but for numbers that its last bits put on another side of a tie."""
    make = block_scaled if blocks else lambda y, dtype: scaled(y, 0.03, dtype)
    low, high = (make(np.asarray(y, "float64") * (1 + d), got.values.dtype) for d in (-1e-6, 1e-6))
    between = [np.asarray(a.values, "float32") * spread(a.scale) for a in (low, high)]
    values = np.asarray(got.dequantized())
    assert np.all(values >= np.minimum(*between)) and np.all(values <= np.maximum(*between))
    assert np.mean(between[0] != between[1]) < 1e-2
    if not blocks:
        np.testing.assert_allclose(got.amax, np.max(np.abs(y)), rtol=2e-6)


@pytest.mark.parametrize("name", ["rms_norm", "add_layer_norm", "rms_norm_add_rms_norm"])
def test_current_scaling(name, implementation):
    """The largest number of the result becomes the largest of the eight bits, if no scale is given."""
    form = FORMS[name]
    given = operands(name, (37, H), "bfloat16")
    function = form.in_order(getattr(jln, form.name), form.names, implementation=implementation, quantize=jln.Float8())
    got, y = function(*given), form.in_order(getattr(jln, form.name), form.names, dtype="float32")(*given)
    if form.adds:
        (got, total), (y, true_total) = got, y
        np.testing.assert_array_equal(*(np.asarray(a, "float32") for a in (total, true_total)))
    np.testing.assert_allclose(got.amax, jnp.max(jnp.abs(y)), rtol=1e-6)
    np.testing.assert_allclose(got.scale, got.amax / 448, rtol=1e-6)
    assert np.max(np.abs(np.asarray(got.values, "float32"))) == 448
    np.testing.assert_allclose(got.dequantized(), y, rtol=2.0**-4, atol=float(got.scale) * 2.0**-10)


@pytest.mark.parametrize("quantize", [jln.Float8(0.02), jln.Float8(), jln.MXFloat8(jnp.float8_e5m2)], ids=str)
def test_no_rows(implementation, quantize):
    """An expert without tokens, and a batch without examples, have results of no rows, and gradients of zero."""
    x, scale, kernel = (jnp.ones(shape, "float32") for shape in ((3, 0, 64), (64,), (64, 96)))
    got = jln.rms_norm(x, scale, quantize=quantize, implementation=implementation)
    assert got.values.shape == x.shape and got.dequantized().shape == x.shape

    def loss(scale, kernel):
        y = jln.rms_norm_linear(x, scale, kernel, quantize=quantize, implementation=implementation)
        return jnp.sum(jax.tree.leaves(y)[0])

    assert all(not jnp.any(d) for d in jax.grad(loss, (0, 1))(scale, kernel))


def test_current_scaling_of_zeros_and_of_nan():
    zeros = jln.rms_norm(jnp.zeros((4, H), "float32"), quantize=jln.Float8())
    assert zeros.scale == 1 and zeros.amax == 0 and not np.any(np.asarray(zeros.values, "float32"))
    nan = jln.rms_norm(jnp.zeros((4, H), "float32").at[2, 3].set(jnp.nan), quantize=jln.Float8())
    assert nan.scale == 1 and np.isnan(nan.amax)
    np.testing.assert_array_equal(np.any(np.isnan(np.asarray(nan.values, "float32")), 1), [False, False, True, False])


@pytest.mark.parametrize(("axis", "implementation"), [(0, "xla"), (1, "xla"), ((2, 1), "xla"), ((2, 1), "triton")])
def test_one_scale_over_other_axes(axis, implementation):
    x = workbench.normal(0, (8, 12, 16), "float32")
    got = jln.layer_norm(x, axis=axis, quantize=jln.Float8(0.02), implementation=implementation)
    y = np.asarray(jln.layer_norm(x, axis=axis, implementation=implementation))
    true = scaled(y, 0.02, ml_dtypes.float8_e4m3fn)
    assert np.mean(np.asarray(got.values).view("u1") != true.values.view("u1")) < 1e-2
    np.testing.assert_allclose(got.amax, true.amax, rtol=1e-6)


def test_a_mean_without_a_scale(blocks, implementation):
    """Columns that only fill a tile are far from a mean of 100, and in no maximum."""
    x = workbench.normal(0, (37, 96), "float32") + 100
    got = jln.layer_norm(x, quantize=quantized(blocks, jnp.float8_e4m3fn, 0.02), implementation=implementation)
    y = jln.layer_norm(x, implementation=implementation)
    true = block_scaled(y, got.values.dtype) if blocks else scaled(y, 0.02, got.values.dtype)
    np.testing.assert_array_equal(np.asarray(got.scale, "float32"), true.scale)
    if not blocks:
        np.testing.assert_allclose(got.amax, true.amax, rtol=1e-5)


@pytest.mark.parametrize("axes", [(0, None), (0, 0), (None, 0)])
def test_vmap(axes, blocks, implementation):
    """Examples have their own bits, scales and largest numbers, and may have scales of their own."""
    x, w = workbench.normal(0, (3, 4, H), "float32"), workbench.normal(1, (3, H), "float32")
    x = x if axes[0] == 0 else x[0]
    scales = jnp.array([0.01, 0.02, 0.03])

    def f(x, w, scale):
        return jln.rms_norm(x, w, quantize=quantized(blocks, jnp.float8_e5m2, scale), implementation=implementation)

    w = w if axes[1] == 0 else w[0]
    got = jax.vmap(f, (*axes, 0))(x, w, scales)
    for i in range(3):
        one = [a if axis is None else jnp.take(a, i, axis) for a, axis in zip((x, w), axes, strict=True)]
        chex.assert_trees_all_equal(jax.tree.map(lambda a, i=i: a[i], got), f(*one, scales[i]))


@pytest.mark.parametrize("axis", [1, 2])
def test_vmap_behind_rows(axis, blocks):
    """XLA has results of such examples as they would be of each by itself, and blocks along the normalised axis."""
    x = workbench.normal(0, (3, 4, H), "float32")

    def f(x):
        return jln.rms_norm(x, quantize=quantized(blocks, jnp.float8_e5m2, 0.02), implementation="xla")

    chex.assert_trees_all_equal(jax.vmap(f, axis)(jnp.moveaxis(x, 0, axis)), jax.vmap(f)(x))


OWN = {"groups of five rows": (3, 4, 1, H), "each row": (3, 4, 5, H), "heads": (1, 1, 5, H)}


@pytest.mark.parametrize("own", OWN)
def test_current_scaling_with_parameters_of_examples(own, implementation):
    """The scale that the first kernel finds is that of all groups in the second."""
    x, w = workbench.normal(0, (3, 4, 5, H), "float32"), workbench.normal(1, OWN[own], "float32")
    got = jln.rms_norm(x, w, quantize=jln.Float8(), implementation=implementation)
    y = jln.rms_norm(x, w, implementation=implementation)
    np.testing.assert_allclose(got.amax, jnp.max(jnp.abs(y)), rtol=1e-6)
    np.testing.assert_allclose(got.dequantized(), y, rtol=2.0**-4, atol=float(got.scale) * 2.0**-10)


@pytest.mark.parametrize("shape", [(3, 1, H), (3, 4, 1, H), (3, 1, 5, H), (1, 1, 5, H)], ids=str)
def test_parameters_of_examples(shape, blocks, implementation):
    """Groups in front, and heads next to H, have addresses of their own for their block scales."""
    x = workbench.normal(0, (3, 4, 5, H) if len(shape) == 4 else (3, 5, H), "float32")
    w = workbench.normal(1, shape, "float32")
    got = jln.rms_norm(x, w, quantize=quantized(blocks, jnp.float8_e4m3fn, 0.02), implementation=implementation)
    y = np.asarray(jln.rms_norm(x, w, implementation=implementation))
    true = block_scaled(y, ml_dtypes.float8_e4m3fn) if blocks else scaled(y, 0.02, ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(got.scale, "float32"), true.scale)
    assert np.mean(np.asarray(got.values).view("u1") != true.values.view("u1")) < 1e-2


@pytest.mark.parametrize(
    ("chip", "triton", "converts"),
    [
        ("a100", (3, 9, 0), False),
        ("l4", (3, 9, 0), True),
        ("l4", (3, 8, 0), False),
        ("h200", (3, 6, 0), True),
        ("mi300x", (3, 9, 0), False),
        ("mi355x", (3, 9, 0), True),
    ],
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


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_where_the_chip_does_not_convert(name, blocks):
    """XLA computes all of it, of examples with scales of their own, too."""
    form, quantize = FORMS[name], quantized(blocks, jnp.float8_e4m3fn, 0.03)
    shared = dict(zip(form.names, operands(name, (3, 5, H), "bfloat16"), strict=True))
    own = shared | {n: jnp.stack([a, 2 * a, -a]) for n, a in shared.items() if n.endswith("scale")}

    def results(**how):
        norm, made = form.in_order(getattr(jln, form.name), form.names, **how), []
        made.append(jax.jit(norm)(*shared.values()))
        for names in ("scale",), ("scale", "x", "residual", "z"):  # that vmap goes over; they share the rest
            in_axes = [0 if n.endswith(names) else None for n in own]
            of_all = jax.jit(jax.vmap(norm, in_axes))(*own.values())
            made += [jax.tree.map(lambda a, i=i: a[i], of_all) for i in range(3)]
        return made if form.adds else [(y, None) for y in made]

    with target.using(target.Recorder(CHIPS["a100"])) as recorder:
        ours = results(implementation="triton", quantize=quantize)
    assert recorder.launches == []
    for (got, total), (y, total_of_y) in zip(ours, results(dtype="float32", implementation="xla"), strict=True):
        chex.assert_trees_all_close(total, total_of_y, rtol=2.0**-8)
        check(got, y, blocks)


@pytest.mark.parametrize("quantize", [jln.Float8(0.03), jln.Float8(), jln.MXFloat8()], ids=str)
def test_gradients_where_the_chip_does_not_convert(quantize):
    """A kernel finds the largest number of a current scale, and gradients are made of the statistics that XLA keeps."""
    given = operands("add_layer_norm", (37, H), "float32")

    def of(implementation):
        def loss(*given):
            y, total = jln.add_layer_norm(*given, quantize=quantize, implementation=implementation)
            return jnp.sum(jnp.sin(y.dequantized())) + jnp.sum(jnp.sin(total)), y._replace(carrier=None)

        return jax.jit(jax.value_and_grad(loss, range(len(given)), has_aux=True))(*given)

    with target.using(target.Interpreter(CHIPS["a100"])):
        got = of("triton")
    chex.assert_trees_all_close(got, of("xla"), rtol=1e-5, atol=1e-5)


WRONG = {
    "a dtype beside it": (ValueError, "dtype", lambda x: jln.rms_norm(x, dtype="float32", quantize=jln.MXFloat8())),
    "another dtype": (
        TypeError,
        "float8_e4m3fn or float8_e5m2",
        lambda x: jln.rms_norm(x, quantize=jln.Float8(1.0, "int8")),
    ),
    "no kind": (TypeError, "jln.Float8", lambda x: jln.rms_norm(x, quantize="mxfp8")),
    "rows of 24": (ValueError, "every 32", lambda x: jln.rms_norm(x[:, :24], quantize=jln.MXFloat8())),
    "another axis": (ValueError, "last, normalised axis", lambda x: jln.rms_norm(x, axis=0, quantize=jln.MXFloat8())),
    "a scale of rows": (ValueError, "must be a number", lambda x: jln.rms_norm(x, quantize=jln.Float8(x[:, 0]))),
    "a scale below float32's normal numbers": (
        ValueError,
        "normal in float32",
        lambda x: jln.rms_norm(x, quantize=jln.Float8(1e-40)),
    ),
    "a scale above float32's numbers": (
        ValueError,
        "normal in float32",
        lambda x: jln.rms_norm(x, quantize=jln.Float8(1e39)),
    ),
    "a scale of zero": (ValueError, "positive", lambda x: jln.rms_norm(x, quantize=jln.Float8(0.0))),
    "float64": (TypeError, "float64", lambda x: jln.rms_norm(x.astype("float64"), quantize=jln.MXFloat8())),
    "forward mode": (ValueError, "forward_mode", lambda x: jln.rms_norm(x, forward_mode=True, quantize=jln.MXFloat8())),
}


@pytest.mark.parametrize(("error", "message", "call"), WRONG.values(), ids=WRONG)
def test_what_is_refused(error, message, call):
    with pytest.raises(error, match=message):
        call(workbench.normal(0, (4, H), "float32"))


def test_scales_are_numbers_of_any_kind():
    x = workbench.normal(0, (4, H), "float32")
    numbers = (0.25, np.float32(0.25), jnp.bfloat16(0.25), np.array(0.25))
    results = [jln.rms_norm(x, quantize=jln.Float8(s)) for s in numbers]
    for result in results[1:]:
        chex.assert_trees_all_equal(result, results[0])
    jitted = jax.jit(lambda x, q: jln.rms_norm(x, quantize=q))(x, jln.Float8(jnp.float32(0.25)))
    chex.assert_trees_all_equal(jitted, results[0])
    assert isinstance(results[0], jln.Quantized) and Bits._fields[:2] == jln.Quantized._fields[:2]


@pytest.mark.parametrize("part", ["values", "scale", "amax"])
@pytest.mark.parametrize("quantize", [jln.Float8(0.02), jln.Float8(), jln.MXFloat8("float8_e5m2")], ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_add_rms_norm"])
def test_a_part_alone(name, quantize, part, implementation):
    """A step that reads a part of the result has the same part, and the others are dead code in it."""
    form = FORMS[name]
    function = form.in_order(getattr(jln, form.name), form.names, implementation=implementation, quantize=quantize)
    given = operands(name, (37, H), "bfloat16")

    def read(*given):
        q = function(*given)[0] if form.adds else function(*given)
        return jnp.zeros([]), getattr(q, part)

    (_, got), _ = jax.jit(jax.value_and_grad(read, has_aux=True))(*given)
    if quantize != jln.MXFloat8("float8_e5m2") or part != "amax":
        np.testing.assert_array_equal(*(np.asarray(a, "float32") for a in (got, read(*given)[1])))
