"""Few features behind a gated sum, and with parameters of each example: a kernel that normalises and multiplies."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_junction import results_and_gradients

import jln
import workbench
from jln._junction.linears.tiles import backward_plan
from jln._triton import target
from jln._triton.chip import CHIPS, Chip
from jln._triton.launch import INTERPRETED
from jln._triton.tile import ceil_div
from junctions import made

# Three examples of two tiles of rows, the second ragged; of two chunks of columns, the second ragged.
ROWS = (3, 70)
H = 72
# The name, the gate, along what parameters vary, axes of rows.
CASES = [
    ("add_layer_norm_linear", "no gate", "shared", ROWS),
    ("add_layer_norm_linear", "H", "shared", ROWS),
    ("add_rms_norm_linear", "rows", "shared", ROWS),
    ("add_layer_norm_linear", "by example", "by example", ROWS),
    ("add_rms_norm_linear", "rows", "by example", ROWS),
    ("add_layer_norm_linear", "by example", "shared", ROWS),
    ("layer_norm_linear", "no gate", "by example", ROWS),
    ("rms_norm_linear", "no gate", "by example", (1, 70)),
    ("layer_norm_linear", "no gate", "apart", (2, 3, 70)),
]


def arguments(name, gate, varies, rows, dtype="float32"):
    given, options = made(name, gate=gate, varies=varies, shape=(*rows, H), dtype=dtype)
    kernel, bias = given["kernel"][..., :20], given["bias"][..., :20]  # 40 features, which all forms take
    return given | {"kernel": kernel / np.sqrt(H).astype(dtype), "bias": bias}, options


def by_kernels(function, *arrays):
    """Return the results of a function of arrays, and which of the kernels that normalise and multiply it launches."""
    with target.recording() as launches:
        jax.jit(lambda *a: function(*a)).lower(*arrays)
    kernels = {run.kernel.fn.__name__ for run in launches if "kernels.with_linear" in run.kernel.fn.__module__}
    return jax.jit(lambda *a: function(*a))(*arrays), kernels


def assert_close(got, true):
    """Hold that float32 results are those in float64, but for rounding sums of 350 rows and 72 elements, twice."""
    chex.assert_trees_all_equal_shapes(got, true)
    chex.assert_trees_all_close(got, true, rtol=1e-4, atol=1e-3)


def wide(tree):
    return jax.tree.map(lambda a: a.astype("float64"), tree)


def all_at_once(module, name, given, **options):
    """Return the results, and all gradients under random cotangents, of one program."""
    function = functools.partial(getattr(module, name), **options)
    cotangent = workbench.cotangents(jax.eval_shape(lambda a: function(**a), given))
    results, pullback = jax.vjp(lambda a: function(**a), given)
    return results, pullback(cotangent)[0]


@pytest.mark.parametrize(("name", "gate", "varies", "rows"), CASES, ids=str)
def test_values_and_every_gradient(name, gate, varies, rows):
    """Values and gradients are those of the reference in float64."""
    given, options = arguments(name, gate, varies, rows)
    got, kernels = by_kernels(lambda a: all_at_once(jln, name, a, implementation="triton", **options), given)
    assert kernels == {"forward_kernel", "row_sums_kernel", "backward_kernel", "parameters_kernel"}
    assert_close(got, jax.jit(lambda a: all_at_once(jln.reference, name, a, **options))(wide(given)))


@pytest.mark.parametrize(("gate", "varies"), [("rows", "by example"), ("by example", "shared")])
def test_each_gradient_alone(gate, varies):
    """Each gradient that is wanted alone is that of the reference."""
    given, options = arguments("add_layer_norm_linear", gate, varies, ROWS)
    ours = functools.partial(jln.add_layer_norm_linear, implementation="triton", **options)
    plain = functools.partial(jln.reference.add_layer_norm_linear, **options)
    got, true = (jax.jit(lambda a, f=f: results_and_gradients(f, a)[2]) for f in (ours, plain))
    assert_close(got(given), true(wide(given)))


# Of 40 cores several programs have shares of an example's rows. Of six, three programs take five examples in turns.
@pytest.mark.parametrize(("cores", "rows"), [(40, (2, 400)), (6, (5, 40))])
@pytest.mark.parametrize(("gate", "varies"), [("by example", "by example"), ("H", "shared")])
def test_several_programs(gate, varies, cores, rows):
    """Sums over rows are added up where several programs have shares of them, or have examples of their own."""
    given, options = arguments("add_layer_norm_linear", gate, varies, rows)
    name = "add_layer_norm_linear"
    with target.using(target.Interpreter(Chip(INTERPRETED.name, 90, cores))):
        got = jax.jit(lambda a: all_at_once(jln, name, a, implementation="triton", **options))(given)
    assert_close(got, jax.jit(lambda a: all_at_once(jln.reference, name, a, **options))(wide(given)))


def test_programs_of_many_examples():
    """Every program takes its turn at whole examples, or has a share of one, and an H200's SMs are busy."""
    chip = CHIPS["h200"]
    for groups in (1, 2, 8, 32, 100, 256):
        for h in (768, 1024, 4096):
            plan = backward_plan(8192 // groups * groups, h, 64, "bfloat16", chip, groups)
            assert plan is not None and plan.splits % plan.programs == 0 and plan.splits // plan.programs <= groups
            programs = plan.splits * ceil_div(h, plan.backward.columns)
            assert programs >= 0.7 * chip.cores * ceil_div(programs, chip.cores), (groups, h)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_accuracy_of_16_bits(dtype, remat):
    """Each result's largest error is at most twice plain jnp's and a rounding, under a large offset."""
    given, _ = arguments("layer_norm_linear", "no gate", "by example", ROWS, dtype)
    given["offset"] = given["offset"] * 30
    cotangent = workbench.normal(9, jax.eval_shape(lambda a: jln.layer_norm_linear(**a), given).shape, dtype)

    def run(module, arrays, cotangent, **options):
        y, pullback = jax.vjp(lambda a: module.layer_norm_linear(**a, **options), arrays)
        return pullback(cotangent)[0] | {"y": y}

    ours = functools.partial(run, jln, implementation="triton", remat=remat)
    got, plain = (jax.jit(f)(given, cotangent) for f in (ours, functools.partial(run, jln.reference)))
    true = jax.jit(functools.partial(run, jln.reference))(wide(given), wide(cotangent))
    for n, t in true.items():
        error, of_plain = (np.max(np.abs(a[n].astype("float64") - t)) for a in (got, plain))
        assert error <= 2 * of_plain + float(jnp.finfo(dtype).eps) * np.max(np.abs(t)), n


@pytest.mark.parametrize("mapped", ["x", "x and scale", "scale", "all"])
def test_vmap(mapped):
    """Rows of examples that share the Linear are those of the forward kernel; other examples are right, too."""
    given, _ = arguments("layer_norm_linear", "no gate", "by example", ROWS)
    names = tuple(given) if mapped == "all" else tuple(mapped.split(" and "))
    stacked = given | {n: jnp.stack([given[n] * f for f in (1, -0.5, 2)]) for n in names}
    axes = ({n: 0 if n in names else None for n in given},)

    def of(module, **options):
        return lambda a: module.layer_norm_linear(**a, **options)

    def run(function, arrays):
        def of_one(a):
            y, pullback = jax.vjp(function, a)
            return y, pullback(jnp.sin(y))[0]

        return jax.vmap(function, axes)(arrays), jax.vmap(of_one, axes)(arrays)

    ours = of(jln, implementation="triton")
    _, kernels = by_kernels(jax.vmap(ours, axes), stacked)
    assert kernels == ({"forward_kernel"} if mapped in ("x", "x and scale") else set())
    got, true = jax.jit(lambda a: run(ours, a))(stacked), jax.jit(lambda a: run(of(jln.reference), a))(wide(stacked))
    assert_close(got, true)


def test_columns_that_are_not_there_in_a_row_gates_gradient():
    """Results are finite where plain jnp's are, of a row whose mean over its rstd is no number that float32 has."""
    given, _ = arguments("add_layer_norm_linear", "rows", "shared", (1, 70), "bfloat16")
    large = {n: given[n].at[0, 5].set(0) for n in ("x", "residual")}
    given |= large | {"residual": large["residual"].at[0, 5].set(1e36)}
    got, plain = (
        jax.jit(lambda a, m=m, o=o: all_at_once(m, "add_layer_norm_linear", a, **o))(given)
        for m, o in ((jln, {"implementation": "triton"}), (jln.reference, {}))
    )
    for ours, of_plain in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
        assert jnp.isfinite(ours[jnp.isfinite(of_plain)]).all()


def test_what_is_left_to_the_norm_and_a_product():
    """Products are XLA's where examples fill less than half of their tiles of rows, and of heads."""
    for varies, rows, fused in (
        ("by example", (4, 32), True),
        ("by example", (4, 31), False),
        ("over an axis in the middle", (70, 3), False),
    ):
        given, _ = arguments("rms_norm_linear", "no gate", varies, rows)
        _, kernels = by_kernels(lambda a: jln.rms_norm_linear(**a, implementation="triton"), given)
        assert kernels == ({"forward_kernel"} if fused else set())
