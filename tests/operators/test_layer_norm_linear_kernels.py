"""Tests of the LayerNorm+Linear launchers against float64, in the interpreter.

Each result is judged by itself, for both strategies.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from workbench import LINEAR_OPERATORS, normal

pytest.importorskip("triton")

from jln._junction.arrays import Arrays, Junction, Norm, Switches
from jln._junction.launches import column_sums
from jln._junction.linears import launches as launcher
from jln._junction.linears import tiles
from jln._triton.chip import CHIPS, Chip
from jln._triton.target import INTERPRETED, Interpreter, Recorder, interpreting
from jln._triton.tile import ceil_div

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")


def settings(*, subtract_mean=True, zero_centered_scale=False, precision=None):
    norm = Norm(-1, workbench.EPSILON, Switches(subtract_mean, zero_centered_scale))
    return Junction(norm, precision=precision, features=(1,), in_one=True)


def arguments(m, h, n, dtype):
    """Return (x, scale, offset, kernel, bias) for x of [m, h] and n features."""
    return workbench.arguments(LINEAR_OPERATORS["layer_norm_linear"], (m, h), dtype, features=(n,))


def results(x, scale, offset, kernel, bias, dy, *, target=None, batch_dims=0, **switches):
    """Return what the launchers make, in the order of the operator's results: y, then gradients."""
    target, chosen = target or Interpreter(), settings(**switches)
    statistic = jnp.promote_types(x.dtype, "float32").name
    mean = statistic if chosen.norm.switches.subtract_mean else None
    dtypes = Arrays(y=(dy.dtype.name,), mean=mean, rstd=statistic)

    def of_rank(parameter):
        """Return the parameter with x's rank, as the launchers take it."""
        lead = range(batch_dims, x.ndim - 1)
        return None if parameter is None else jnp.expand_dims(parameter, lead)

    operands = Arrays(x, scale=of_rank(scale), offset=of_rank(offset), kernel=(kernel,), bias=(bias,))
    forward = launcher.forward(operands, chosen, dtypes, batch_dims, target)
    (y,) = forward.y
    assert y.dtype == dy.dtype
    wanted = jax.tree.map(lambda a: a.dtype.name, operands)
    saved = operands._replace(x=None, bias=None, dy=(dy,), total=x, mean=forward.mean, rstd=forward.rstd)
    gradients = launcher.backward(saved, chosen, wanted, batch_dims, target)
    of_norm = gradients.scale, gradients.offset
    of_norm = (None if d is None else d.reshape(*d.shape[:batch_dims], d.shape[-1]) for d in of_norm)
    return y, gradients.x, *of_norm, *gradients.kernel, *gradients.bias


def launched(operands, dy, **given):
    run = jax.jit(functools.partial(results, **given))
    made = zip(LINEAR_OPERATORS["layer_norm_linear"].results, run(*operands, dy), strict=True)
    return {name: np.asarray(a) for name, a in made if a is not None}


def launches(operands, dy, chip=INTERPRETED, **given):
    """Return the launches by their kernels' names, without making them."""
    recorder = Recorder(chip)
    jax.eval_shape(lambda *a: results(*a, target=recorder, **given), *operands, dy)
    return {r.kernel.fn.__name__: r for r in recorder.launches}


def plain(operands, dy, *, subtract_mean=True, zero_centered_scale=False):
    """Return the results and gradients of plain jnp by autodiff, in the same dtypes."""
    options = {"epsilon": workbench.EPSILON, "zero_centered_scale": zero_centered_scale}
    operator = operator_that(subtract_mean)
    function = functools.partial(operator, module=jln.reference, **options)
    return workbench.value_and_gradients(operator, function, operands, dy)


def operator_that(subtract_mean):
    return LINEAR_OPERATORS["layer_norm_linear" if subtract_mean else "rms_norm_linear"]


def assert_accurate(operands, dy, got=None, *, subtract_mean=True, zero_centered_scale=False, **given):
    """Check `got`, or what the launchers return, by the rule of `workbench.assert_accurate`."""
    switches = {"subtract_mean": subtract_mean, "zero_centered_scale": zero_centered_scale}
    if got is None:
        got = launched(operands, dy, **switches, **given)
    true = workbench.truth(operator_that(subtract_mean), operands, dy, zero_centered_scale=zero_centered_scale)
    workbench.assert_accurate(got, plain(operands, dy, **switches), true)


def is_fused(m, h, n, dtype, chip=INTERPRETED):
    """Return whether the Linear is fused, which it is in both directions or in none."""
    forward, backward = (choose(m, h, n, dtype, chip) for choose in (tiles.forward_tile, tiles.backward_plan))
    assert (forward is None) == (backward is None)
    return forward is not None


# First five tiles of rows over three splits, so that one split's loop is shorter, all ragged; then one row and one
# feature; a ragged tile of rows and two chunks, one of them ragged; whole tiles; more chunks than SMs, where two
# programs share the row sums.
FUSED = [(300, 60, 7), (1, 8, 1), (65, 104, 128), (64, 128, 64), (16, 300, 16)]
# The first two have more features than the fused kernels take, and the second of them has aligned rows. In the third
# the features are not aligned, in the last the rows are not.
COMPOSED = [(33, 100, 300), (16, 256, 257), (9, 64, 130), (9, 100, 72)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("m", "h", "n"), FUSED)
def test_fused(m, h, n, dtype):
    assert is_fused(m, h, n, dtype)
    operands = arguments(m, h, n, dtype)
    assert_accurate(operands, normal(6, (m, n), dtype))


@pytest.mark.parametrize(("m", "h", "n"), [(100, 60, 16), (40, 72, 256)])
def test_fused_for_mma(m, h, n):
    """The fused kernels are right with the tiles of fewer rows that sm_80 and sm_89 take, in several trips each."""
    chip = Chip(INTERPRETED.name, 80, 3)
    assert is_fused(m, h, n, "bfloat16", chip)
    assert tiles.backward_plan(m, h, n, "bfloat16", chip).backward.rows == 16
    assert_accurate(arguments(m, h, n, "bfloat16"), normal(6, (m, n), "bfloat16"), target=Interpreter(chip))


@pytest.mark.parametrize("rows", [2048, 8192])
@pytest.mark.parametrize("h", [768, 1024, 4096, 5120, 8192, 12288])
def test_backward_programs_fill_the_chip(h, rows):
    """The programs of the fused backward pass fill at least 90 % of the rounds that an H200's SMs make.

    This holds however many tiles of columns there are, and at few rows for the programs of the row sums too.
    """
    chip = CHIPS["h200"]
    plan = tiles.backward_plan(rows, h, 256, "bfloat16", chip)
    for programs in (plan.splits * ceil_div(h, plan.backward.columns), plan.row_programs * plan.parts):
        assert programs >= 0.9 * chip.cores * ceil_div(programs, chip.cores)


def test_the_forward_is_fused_where_its_walk_pays():
    """The forward is fused where the model of `tiles.forward_tile` says so: not for few rows of a wide H.

    With few features it is fused for few rows too. 8512 rows are a tile more than 132 SMs take at a time.
    """
    chip = CHIPS["h200"]
    chosen = {
        (rows, h, n): tiles.forward_tile(rows, h, n, "bfloat16", chip) is not None
        for rows, h, n in ((8192, 4096, 256), (64, 4096, 256), (2048, 4096, 256), (8512, 4096, 256), (1, 768, 64))
    }
    assert list(chosen.values()) == [True, False, False, False, True], chosen


def test_many_shares():
    """Fused gradients are right where `parameters_kernel` cannot add up all shares of G and of dbias at a time."""
    m, h, n, chip = 3000, 64, 256, Chip(INTERPRETED.name, 90, 40)
    plan = tiles.backward_plan(m, h, n, "bfloat16", chip)
    assert plan.splits > plan.parameters.rows and plan.row_programs > plan.parameters.rows * plan.parameters.columns
    assert_accurate(arguments(m, h, n, "bfloat16"), normal(6, (m, n), "bfloat16"), target=Interpreter(chip))


def test_many_shares_composed():
    """Gradients are right where dscale and doffset have more than the 32 shares that `reduce_kernel` adds at a time."""
    chip = Chip(INTERPRETED.name, 90, 40)
    operands, dy = arguments(90, 1023, 130, "float32"), normal(6, (90, 130), "float32")
    assert launches(operands, dy, chip)["reduce_kernel"].scalars["programs"] > 32
    assert_accurate(operands, dy, target=Interpreter(chip))


@pytest.mark.parametrize(
    ("x", "kernel"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16"), ("float32", "float32")]
)
def test_fused_in_float32(x, kernel):
    m, h, n = 130, 136, 72
    assert is_fused(m, h, n, "float32") and not is_fused(m, h, 136, "float32")
    given, scale, offset, *linear = arguments(m, h, n, "float32")
    operands = (given.astype(x), scale, offset, *(a.astype(kernel) for a in linear))
    assert_accurate(operands, normal(6, (m, n), "float32"))


def test_fused_of_the_widest():
    """The fused kernels are right with all 256 features, under float32 parameters of the norm."""
    assert is_fused(70, 72, 256, "bfloat16")
    x, scale, offset, *linear = arguments(70, 72, 256, "bfloat16")
    operands = (x, scale.astype("float32"), offset.astype("float32"), *linear)
    assert_accurate(operands, normal(6, (70, 256), "bfloat16"))


def test_programs_that_share_rows_do_not_overwrite_what_others_read():
    """The composed backward pass does not write z in place of dz, of which each of four programs reads whole rows."""
    assert not is_fused(3, 4099, 40, "float32")
    operands = arguments(3, 4099, 40, "float32")
    assert_accurate(operands, normal(6, (3, 40), "float32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize(("m", "h", "n"), COMPOSED)
def test_composed(m, h, n, dtype):
    assert not is_fused(m, h, n, dtype)
    assert_accurate(arguments(m, h, n, dtype), normal(6, (m, n), dtype))


def test_float64_is_composed_at_every_n():
    assert not is_fused(9, 100, 16, "float64")
    assert_accurate(arguments(9, 100, 16, "float64"), normal(6, (9, 16), "float64"))


@pytest.mark.parametrize("n", [16, 300], ids=["fused", "composed"])
@pytest.mark.parametrize(("subtract_mean", "zero_centered_scale"), [(False, False), (False, True), (True, True)])
def test_switches(subtract_mean, zero_centered_scale, n):
    x, scale, offset, kernel, bias = arguments(70, 60, n, "bfloat16")
    given = {"subtract_mean": subtract_mean, "zero_centered_scale": zero_centered_scale}
    offset = offset if subtract_mean else None
    assert_accurate((x + 1, scale, offset, kernel, bias), normal(6, (70, n), "bfloat16"), **given)


def test_leading_axes():
    x, *parameters = arguments(24, 40, 5, "bfloat16")
    dy = normal(6, (24, 5), "bfloat16")
    flat = launched((x, *parameters), dy)
    deep = launched((x.reshape(2, 3, 4, 40), *parameters), dy.reshape(2, 3, 4, 5))
    for name, a in deep.items():
        np.testing.assert_array_equal(a.reshape(flat[name].shape), flat[name])


@pytest.mark.parametrize("shared", ["none", "parameters", "x", "kernel and bias"])
def test_batch(shared):
    """Each example of vmap's axis is as accurate as by itself; shared operands have size 1 along that axis."""
    example = arguments(5, 24, 6, "float32")
    keep_one = {"none": (), "parameters": (1, 2, 3, 4), "x": (0,), "kernel and bias": (3, 4)}[shared]
    operands = tuple(
        jnp.stack([a] if i in keep_one else [a * f for f in (1.0, -0.5, 2.0)]) for i, a in enumerate(example)
    )
    dy = normal(7, (3, 5, 6), "float32")
    got = launched(operands, dy, batch_dims=1)
    assert {len(a) for a in got.values()} == {3}
    for i in range(3):
        one = tuple(a[min(i, len(a) - 1)] for a in operands)
        assert_accurate(one, dy[i], {name: a[i] for name, a in got.items()})


EXTREME_ROWS = {
    "constant": ("float16", lambda row: row * 0 + 80),
    "constant and large": ("bfloat16", lambda row: row * 0 + 1e36),
    "of infinite variance": ("bfloat16", lambda row: row * 1e30),
}


@pytest.mark.parametrize("row", EXTREME_ROWS)
@pytest.mark.parametrize("scaled", ["no scale", "scale", "zero-centred scale"])
def test_extreme_rows(scaled, row):
    """Every result that is finite in plain jnp is finite for rows whose rstd is large or 0.

    Nothing may become 0 * inf: not in the columns past the last one, and not on the way.
    """
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
    """Sums over many rows of integers are exact, although bfloat16 could not count so far.

    Integers give the same sum in every order.
    """
    a = jnp.asarray(np.random.default_rng(0).integers(-3, 5, (2, rows, 5)), "bfloat16")
    sums = jax.jit(column_sums, static_argnums=(1, 2))(a, "float32", 1)
    np.testing.assert_array_equal(sums, np.asarray(a, "float64").sum(1))
    sequences = a[:, : rows // 4 * 4].reshape(2, 4, -1, 5)
    sums = jax.jit(column_sums, static_argnums=(1, 2))(sequences, "float32", 1)
    np.testing.assert_array_equal(sums, np.asarray(sequences, "float64").sum((1, 2)))
    np.testing.assert_array_equal(column_sums(a[0, 0], "float32"), a[0, 0].astype("float32"))  # a row without others


def test_statistics_only_where_asked_for():
    x, scale, offset, kernel, bias = arguments(5, 24, 6, "bfloat16")
    operands = Arrays(x, scale=scale[None], offset=offset[None], kernel=(kernel,), bias=(bias,))
    results = launcher.forward(operands, settings(), Arrays(y=("bfloat16",)), 0, Interpreter())
    assert results.present().keys() == {"y"}
    wanted = Arrays(y=("bfloat16",), rstd="float32")
    results = launcher.forward(operands, settings(subtract_mean=False), wanted, 0, Interpreter())
    assert results.mean is None and results.rstd.shape == (5, 1) and results.rstd.dtype == "float32"


@pytest.mark.parametrize("n", [16, 300], ids=["fused", "composed"])
def test_a_nan_stays_in_its_row(n):
    x, *parameters = arguments(70, 60, n, "bfloat16")
    got = launched((x.at[66, 5].set(jnp.nan), *parameters), normal(6, (70, n), "bfloat16"))
    for name in ("y", "dx"):
        rows = np.isnan(got[name].astype("float32")).any(-1)
        np.testing.assert_array_equal(np.flatnonzero(rows), [66])


@pytest.mark.parametrize("n", [16, 300], ids=["fused", "composed"])
@pytest.mark.parametrize(("x", "residual"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_behind_a_sum(x, residual, n):
    """The rounded sum is what a norm behind a sum normalises and returns, and its own cotangent is added."""
    operator = LINEAR_OPERATORS["add_layer_norm_linear"]
    given, added, *parameters = workbench.arguments(operator, (70, 100), x, features=(n,))
    operands = (given, (added + 300).astype(residual), *parameters)  # in 16 bits a sum's rounding is of x's size

    def of(module, **options):
        return functools.partial(operator, module=module, **options)

    dy = workbench.cotangents(jax.eval_shape(of(jln.reference), *operands))
    workbench.assert_accurate(*judged(operator, of, operands, dy, dy))


@pytest.mark.parametrize("wanted", ["all", "of the offset", "of two results"])
@pytest.mark.parametrize("n", [16, 100], ids=["fused", "composed"])
def test_several(n, wanted):
    """Three Linears behind a norm are accurate, each of n features on two axes and the second without a bias.

    The truth is that of one Linear with the features of all three, each of which has its part.
    """
    operator = LINEAR_OPERATORS["layer_norm_linear"]
    parts = [slice(i * n, (i + 1) * n) for i in range(3)]
    x, scale, offset, kernel, bias = workbench.arguments(operator, (70, 60), "bfloat16", features=(3 * n,))
    used = [True, wanted != "of two results", True]

    def of(module, **options):
        def function(x, scale, offset, kernel, bias):
            kernels = tuple(kernel[:, p].reshape(-1, 2, n // 2) for p in parts)
            first, _, last = (bias[p].reshape(2, n // 2) for p in parts)
            made = module.layer_norm_linear(x, scale, offset, kernels, (first, None, last), **options)
            made = [y if is_used else jax.lax.stop_gradient(y) for y, is_used in zip(made, used, strict=True)]
            return jnp.concatenate([y.reshape(-1, n) for y in made], -1)

        if wanted == "of the offset":
            return lambda *a: function(*(v if i == 2 else jax.lax.stop_gradient(v) for i, v in enumerate(a)))
        return function

    operands = (x, scale, offset, kernel, bias.at[parts[1]].set(0))
    dy = normal(6, (70, 3 * n), "bfloat16")
    got, plain, true = judged(operator, of, operands, dy, dy if all(used) else dy.at[:, parts[1]].set(0))
    true[0]["dbias"][parts[1]] = 0
    if wanted == "of the offset":
        got, plain = ({name: r[name] for name in ("y", "doffset")} for r in (got, plain))
    workbench.assert_accurate(got, plain, true)


def judged(operator, function, operands, dy, effective_dy):
    """Return what the kernels make, what plain jnp makes, and the truth.

    The truth is that under `effective_dy`, the cotangent that comes to count.
    """
    got_by = functools.partial(workbench.value_and_gradients, operator, operands=operands, cotangent=dy)
    got, plain = (got_by(f) for f in (function(jln, implementation="triton"), function(jln.reference)))
    return got, plain, workbench.truth(operator, operands, effective_dy, got.get("total"))
