"""Dtypes, axes, optional arguments and the documented guarantees, for both implementations."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import catalogue
import jln
import workbench
from invariance import assert_rows_are_independent
from jln._junction import launches as launcher
from jln._junction import tiles
from jln._junction.arrays import Arrays, Norm, Switches
from jln._junction.kernels import backward as kernels
from jln._triton import target
from jln._triton.chip import CHIPS
from jln._triton.launch import launch
from workbench import OPERATORS


def gradients(function, operands):
    """Return the outputs of a function and the gradients of all operands, under random cotangents."""

    @jax.jit
    def run(operands):
        outputs, pullback = jax.vjp(function, *operands)
        return outputs, pullback(workbench.cotangents(outputs))

    return run(operands)


# (2, 1): the scale's axes the other way round. (0, 2): not adjacent. (0, 1, 2): one row. -2: counted from the end.
@pytest.mark.parametrize("axis", [0, 1, 2, -2, (1,), (1, 2), (2, 1), (0, 2), (2, 0), (0, 1, 2), [-1]])
@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm"])
def test_axes(name, axis, implementation):
    """Kernels take the last axes, in any order, and XLA all."""
    operator = OPERATORS[name]
    axes = tuple(axis) if isinstance(axis, list) else axis
    operands = workbench.arguments(operator, (4, 6, 5), "float64", axis=axes)

    def by_kernels_or_xla():
        return gradients(lambda *a: operator(*a, implementation=implementation, axis=axis), operands)

    if implementation == "triton" and axis in (0, 1, -2, (1,), (0, 2), (2, 0)):
        with pytest.raises(ValueError, match="takes rows whose elements lie side by side"):
            by_kernels_or_xla()
        return
    reference = gradients(lambda *a: operator(*a, module=jln.reference, axis=axes), operands)
    chex.assert_trees_all_close(by_kernels_or_xla(), reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scale_of_a_lower_precision_is_not_what_x_is_rounded_to(dtype, implementation):
    """The product with a bfloat16 scale is rounded once, to x's dtype at the store, and not to bfloat16 before that."""
    x = workbench.normal(0, (4, 64), dtype)
    y = jln.layer_norm(x, jnp.full(64, 1.0, "bfloat16"), implementation=implementation)
    np.testing.assert_array_equal(y, jln.layer_norm(x, implementation=implementation))


# No rows; no features; neither; features of several axes, one of them empty.
@pytest.mark.parametrize(
    ("rows", "features"), [((0, 3), (5,)), ((2, 3), (0,)), ((0,), (0,)), ((4,), (2, 0, 3)), ((0, 3), ())], ids=str
)
def test_nothing_of_an_axis(rows, features, implementation):
    """Results have the right shapes, and every gradient is zero, where an axis of rows or of features is empty."""
    name = "add_layer_norm_linear" if features else "add_layer_norm"
    operands = workbench.named(name, (*rows, 8), "bfloat16", features=features, parameter_dtype="float32")
    function = functools.partial(getattr(jln, name), implementation=implementation)
    (y, total), pullback = jax.vjp(lambda a: function(**a), operands)
    assert y.shape == (*rows, *(features or (8,))) and total.shape == (*rows, 8)
    (gradients,) = pullback((y, jnp.zeros_like(total)))
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, operands))


# Several rows a tile; chunks of a row. One of each strategy of a product: float32 is composed,
# whatever the features.
GUARANTEED = {
    "whole rows": ("layer_norm", "float32", (7, 24), ()),
    "chunks": ("layer_norm", "float32", (7, 20000), ()),
    "fused": ("layer_norm_linear", "bfloat16", (7, 8), (16,)),
    "composed": ("layer_norm_linear", "bfloat16", (7, 8), (600,)),
    "composed, float32": ("layer_norm_linear", "float32", (7, 8), (16,)),
}


@pytest.mark.parametrize("case", GUARANTEED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_stays_a_row(bad, case, implementation):
    """A NaN or an infinity in one row of x changes no bit of the y and dx of the other rows.

    Both runs have the same number of rows, and the bad row has the same place.
    """
    name, dtype, shape, features = GUARANTEED[case]
    operands = workbench.named(name, shape, dtype, features=features)

    @jax.jit
    def run(x):
        function = functools.partial(getattr(jln, name), implementation=implementation)
        y, pullback = jax.vjp(lambda x: function(**operands | {"x": x}), x)
        return y, *pullback(workbench.normal(9, y.shape, y.dtype))

    x = operands["x"]
    others = np.arange(len(x)) != 3
    for clean, dirty in zip(run(x), run(x.at[3, 2].set(bad)), strict=True):
        assert np.isnan(dirty[3]).any()
        np.testing.assert_array_equal(clean[others], dirty[others])


@pytest.mark.parametrize(
    ("name", "dtype", "features"),
    [
        ("add_layer_norm", "float32", ()),
        ("layer_norm_linear", "bfloat16", (16,)),
        ("layer_norm_linear", "bfloat16", (600,)),
        ("layer_norm_linear", "float32", (16,)),
    ],
)
def test_gradients_repeat_bit_for_bit(name, dtype, features, implementation):
    """One compiled program gives the same outputs and gradients in every run, bit for bit.

    Where there is a GPU this holds for its kernels and for the products that XLA chose.
    """
    operands = workbench.named(name, (300, 130), dtype, features=features)
    function = functools.partial(getattr(jln, name), implementation=implementation)
    run = jax.jit(lambda a: gradients(lambda a: function(**a), (a,)))
    first = run(operands)
    for _ in range(3):
        chex.assert_trees_all_equal(run(operands), first)


# A tile of several rows, a row a tile, a row shared by programs; chunks, of which test_tuned_tiles.py has shorter rows.
@pytest.mark.parametrize(
    ("width", "rows"), [(20, 23), (3000, 15), (12000, 11), pytest.param(16500, 11, marks=pytest.mark.heavy)]
)
def test_rows_do_not_depend_on_each_other(width, rows):
    """The kernels are batch invariant: a row has the same bits of y and dx by itself as among others.

    "xla" is left out, as on the CPU XLA's own sums depend on how it splits them.
    """
    assert_rows_are_independent(rows, width)


@pytest.mark.parametrize("width", [5000, 8192])
@pytest.mark.parametrize("name", ["add_layer_norm_linear", "add_rms_norm_linear"])
def test_rows_of_float32_that_no_tile_holds_beside_another_cotangent(name, width):
    """The cotangent of a sum has its row sums where y is made again, too, in rows of 4097 to 8192 of float32."""
    operator = workbench.LINEAR_OPERATORS[name]
    operands = workbench.arguments(operator, (3, width), "float32", features=(512,))

    def function(**options):
        return lambda *given: operator(*given, **options)

    by = function(implementation="triton")
    cotangent = workbench.cotangents(jax.eval_shape(by, *operands))
    got = workbench.value_and_gradients(operator, by, operands, cotangent)
    plain = workbench.value_and_gradients(operator, function(module=jln.reference), operands, cotangent)
    workbench.assert_accurate(got, plain, workbench.truth(operator, operands, cotangent, got.get("total")))


@pytest.mark.parametrize("groups", [1, 3])
def test_forward_programs_have_several_rows(groups):
    """Programs of LayerNorm's forward that hold scale and offset have every so many rows of their group.

    Rows are not a multiple of programs, so that some have a row less.
    """
    x = workbench.normal(0, (groups, 67, 1024), "bfloat16")
    scale, offset = (workbench.normal(i, (groups, 1024), "float32") for i in (1, 2))

    @jax.vmap
    def norm(x, scale, offset):
        return jln.layer_norm(x, scale, offset, implementation="triton")

    with target.recording() as launches:
        jax.jit(norm).lower(x, scale, offset)
    assert launches[0].tile.stages > 1 and launches[0].programs < 67 * groups
    x, scale, offset = (np.asarray(a, "float64") for a in (x, scale, offset))
    centred = x - x.mean(-1, keepdims=True)
    true = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-6) * scale[:, None] + offset[:, None]
    got = np.asarray(norm(jnp.asarray(x, "bfloat16"), *(jnp.asarray(a, "float32") for a in (scale, offset))), "float64")
    assert (np.abs(got - true) <= 2.0**-8 * np.abs(true) + 1e-5).all()  # one rounding, and that of the arithmetic


@pytest.mark.parametrize("programs", [1, 129, 528])  # fewer than a block of partial sums, one more, an H200's
def test_reduction_of_many_partial_sums(programs):
    """The reduction kernel adds up one partial sum as well as hundreds.

    The interpreter's few SMs leave few partial sums in the other tests; a GPU's leave hundreds.
    """
    partial = workbench.normal(0, (2, programs, 40), "float32")
    where = target.Interpreter() if target.interpreting() else target.Gpu(target.target_chip())

    @jax.jit
    def run(partial):
        tile, result = tiles.reduce_tile(40), jax.ShapeDtypeStruct((2, 40), "float32")
        return launch(
            where,
            kernels.reduce_kernel,
            {"shares": jnp.stack([partial, -partial]), "groups": 2, "programs": programs},
            {"d": Arrays(scale=result, offset=result)},
            programs=2 * 2 * (-(-40 // tile.columns)),
            tile=tile,
            compute=jnp.dtype("float32"),
            H=40,
            SUMS=("scale", "offset"),
        )["d"]

    dscale, doffset = (getattr(run(partial), name) for name in ("scale", "offset"))
    np.testing.assert_allclose(dscale, np.asarray(partial, "float64").sum(1), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(doffset, -dscale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_partial_sums_are_not_rounded(dtype):
    """The partial sums [P, H] of dscale and doffset are in float32, or in float64 for float64.

    They are so for parameters in 16 bits, too. P is the number of programs.
    """
    x, p = jax.ShapeDtypeStruct((1000, 64), dtype), jax.ShapeDtypeStruct((1, 64), dtype)
    statistic = jax.ShapeDtypeStruct((1000, 1), jnp.promote_types(dtype, "float32"))
    norm = Norm(axis=-1, epsilon=0.0, switches=Switches(subtract_mean=True))
    where = target.Recorder(CHIPS["h200"])
    operands = Arrays(dy=x, total=x, scale=p, mean=statistic, rstd=statistic)
    wanted = Arrays(x=dtype, scale=dtype, offset=dtype)
    jax.eval_shape(lambda o: launcher.backward(o, norm, wanted, 0, where), operands)
    backward, reduction = where.launches
    shares = backward.results["shares"]
    assert shares.dtype == statistic.dtype
    assert shares.shape == (2, 1, reduction.scalars["programs"], 64)


def test_columns_that_are_not_there_cannot_overflow(implementation):
    """The masked columns beyond H bring no NaN into dx where mean * rstd is infinite."""
    x = jnp.full((2, 7), 1e36, "float32")
    dy = jnp.arange(14, dtype="float32").reshape(2, 7)
    dx = jax.grad(lambda x: jnp.sum(jln.layer_norm(x, implementation=implementation) * dy))(x)
    assert np.isfinite(dx).all()


def test_unused_results_have_no_gradient(implementation):
    """All gradients are right where only y or only the sum is used, so that the other's cotangent is zero."""
    operator = OPERATORS["add_layer_norm"]
    operands = workbench.arguments(operator, (5, 12), "float64")
    for used in (0, 1):
        ours, reference = (
            jax.grad(lambda *a, o=o, used=used: (operator(*a, **o)[used] ** 2).sum(), argnums=(0, 1, 2, 3))(*operands)
            for o in ({"implementation": implementation}, {"module": jln.reference})
        )
        chex.assert_trees_all_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_what_was_not_used_cannot_spoil_what_was(implementation):
    """An infinity in a row spoils no gradient where only the sum is used, and the norm's backward does not run."""
    x = jnp.ones((2, 4)).at[0, 0].set(jnp.inf)

    def loss(x, scale):
        return jnp.sum(2 * jln.add_layer_norm(x, x, scale, implementation=implementation)[1])

    dx, dscale = jax.grad(loss, argnums=(0, 1))(x, jnp.ones(4))
    np.testing.assert_array_equal(dx, np.full((2, 4), 4.0))
    np.testing.assert_array_equal(dscale, np.zeros(4))
    assert "jln_norm_backward" not in str(jax.make_jaxpr(jax.grad(loss))(x, jnp.ones(4)))


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("name", catalogue.OPERATORS)
def test_strict_promotion(name, implementation, forward_mode):
    """Operators run under strict dtype promotion with x in bfloat16 and all other arguments in float32.

    Of two kernels one is in float32 and one in bfloat16. Each gradient has its argument's dtype.
    """
    operator = catalogue.OPERATORS[name]
    sizes = catalogue.sizes((3, 8), -1, (4,))
    given = {a.name: jnp.ones(a.of(sizes, "float32", "float32").shape) for a in operator.arguments}
    given |= {"x": given["x"].astype("bfloat16")}

    def loss(given):
        return sum(jnp.sum(a.astype("float32")) for a in jax.tree.leaves(operator.function(**given, **options)))

    if "kernel" in given:
        kernel, bias = given["kernel"], given.pop("bias", None)
        given |= {"kernel": (kernel, kernel.astype("bfloat16")), "bias": (bias, None)}
    options = {"implementation": implementation, "forward_mode": forward_mode}
    with jax.numpy_dtype_promotion("strict"):
        gradients = jax.jit(jax.grad(loss))(given)
    chex.assert_trees_all_equal_dtypes(gradients, given)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("name", catalogue.OPERATORS)
def test_references_under_strict_promotion(name, dtype):
    """References run under strict dtype promotion as without it, with x in another dtype than the other arguments."""
    operator = catalogue.OPERATORS[name]
    sizes = catalogue.sizes((3, 8), -1, (4,))
    given = {a.name: jnp.ones(a.of(sizes, "float32", "float32").shape) for a in operator.arguments}
    given |= {"x": given["x"].astype(dtype)}

    def loss(given):
        return sum(jnp.sum(a.astype("float32")) for a in jax.tree.leaves(operator.reference(**given)))

    with jax.numpy_dtype_promotion("strict"):
        strict = jax.jit(jax.value_and_grad(loss))(given)
    chex.assert_trees_all_equal(strict, jax.jit(jax.value_and_grad(loss))(given))


def test_weak_types_promote_as_arrays_do(implementation):
    weak = jax.lax.broadcast(jnp.asarray(1.5), (3, 8))
    assert weak.weak_type
    residual = jnp.ones((3, 8), "bfloat16")
    ours = jln.add_layer_norm(weak, residual, implementation=implementation)
    chex.assert_trees_all_equal_dtypes(ours, jln.reference.add_layer_norm(weak, residual))


def test_objects_that_stand_for_arrays(implementation):
    """An object with `__jax_array__`, such as `flax.nnx.Param`, is taken for the array that it gives."""

    class Parameter:
        def __jax_array__(self):
            return jnp.full(8, 2.0, "float32")

    x = workbench.normal(0, (3, 8), "float32")
    y = jln.rms_norm(x, Parameter(), implementation=implementation)
    np.testing.assert_array_equal(y, jln.rms_norm(x, jnp.full(8, 2.0, "float32"), implementation=implementation))
