"""Empty arrays, the documented guarantees and the kernels' sums, for both implementations."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from jln._junction import launches as launcher
from jln._junction import tiles
from jln._junction.arrays import Arrays, Norm, Switches
from jln._junction.kernels import backward as kernels
from jln._triton import target
from jln._triton.chip import CHIPS
from jln._triton.launch import launch
from junctions import bound, made
from workbench import assert_rows_are_independent

LINEAR = "add_layer_norm_linear"


OF_EXAMPLES = [("add_layer_norm", ()), ("the gate first", ()), (LINEAR, (5,))]


# Of which axes there is nothing: rows, features, both; features of several axes; rows whose parameters are examples'.
@pytest.mark.parametrize(
    ("form", "features", "shape", "varies"),
    [(LINEAR, (5,), (0, 3, 8), "shared"), (LINEAR, (0,), (2, 8), "shared"), (LINEAR, (0,), (0, 8), "shared")]
    + [(LINEAR, (2, 0), (4, 8), "shared")]
    + [(*of, shape, "by example") for of in OF_EXAMPLES for shape in [(0, 4, 8), (3, 0, 8)]],
)
def test_nothing_of_an_axis(form, features, shape, varies, implementation):
    """Results have the right shapes, and every gradient is zero, where an axis of rows or of features is empty."""
    given, options = made(form, gate="by example", varies=varies, shape=shape)
    if features:
        given |= {"kernel": jnp.ones((8, *features)), "bias": jnp.ones(features)}
        del given["gate"]
    results, pullback = jax.vjp(lambda a: bound(form, options, implementation=implementation)(**a), given)
    y, *total = jax.tree.leaves(results)
    assert y.shape == (*shape[:-1], *(features or shape[-1:])) and all(a.shape == shape for a in total)
    (gradients,) = pullback(jax.tree.map(jnp.zeros_like, results))
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, given))


# Several rows a tile; chunks of a row. One of each strategy of a product: float32 is composed,
# whatever the features.
GUARANTEED = {
    "whole rows": ("layer_norm", "float32", (70, 24), ()),
    "chunks": ("layer_norm", "float32", (7, 20000), ()),
    "fused": ("layer_norm_linear", "bfloat16", (70, 130), (16,)),
    "composed": ("layer_norm_linear", "bfloat16", (7, 8), (600,)),
    "composed, float32": ("layer_norm_linear", "float32", (7, 8), (16,)),
}


@pytest.mark.parametrize("case", GUARANTEED)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_stays_a_row_and_runs_repeat(bad, case, implementation):
    """A NaN or an infinity in one row of x changes no bit of the y and dx of the other rows, nor does a second run.

    All runs have the same number of rows, and the bad row has the same place. Where there is a GPU this holds for its
    kernels and for the products that XLA chose.
    """
    name, dtype, shape, features = GUARANTEED[case]
    operands = workbench.named(name, shape, dtype, features=features)

    @jax.jit
    def run(operands):
        y, pullback = jax.vjp(lambda a: getattr(jln, name)(**a, implementation=implementation), operands)
        return y, *pullback(workbench.normal(9, y.shape, y.dtype))

    (y, gradients), x = run(operands), operands["x"]
    chex.assert_trees_all_equal(run(operands), (y, gradients))
    dirty_y, dirty_gradients = run(operands | {"x": x.at[3, 2].set(bad)})
    others = np.arange(len(x)) != 3
    for clean, dirty in ((y, dirty_y), (gradients["x"], dirty_gradients["x"])):
        assert np.isnan(dirty[3]).any()
        np.testing.assert_array_equal(clean[others], dirty[others])


# A tile of several rows, a row a tile, a row shared by programs; chunks, of which test_tiles.py has shorter rows.
@pytest.mark.parametrize(
    ("width", "rows"), [(20, 23), (3000, 15), (12000, 11), pytest.param(16500, 11, marks=pytest.mark.heavy)]
)
def test_rows_do_not_depend_on_each_other(width, rows):
    """The kernels are batch invariant: a row has the same bits of y and dx by itself as among others.

    "xla" is left out, as on the CPU XLA's own sums depend on how it splits them.
    """
    assert_rows_are_independent(rows, width)


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
