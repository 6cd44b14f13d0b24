"""Few features: a kernel that normalises and multiplies, and the calls that are left to a norm and a product."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import DotAlgorithmPreset as Preset
from jax.lax import Precision

import jln
import workbench
from jln._junction.arrays import Arrays, Junction, Norm, Switches
from jln._junction.launches import column_sums
from jln._junction.linears import tiles
from jln._triton import target
from jln._triton.chip import Chip
from jln._triton.launch import INTERPRETED
from matrix import loss_by_name
from workbench import LINEAR_OPERATORS

NORM = Norm(-1, workbench.EPSILON, Switches(subtract_mean=True))


def few(dtype, precision=None, n=16, implementation=None, norm=NORM, several=1, **more):
    """Return whether the operator leaves it to the launchers to fuse n features. more: what else there is."""
    operator = LINEAR_OPERATORS["add_layer_norm_linear"]
    given = dict(zip(operator.kind.names, workbench.arguments(operator, (16, 64), dtype, features=(n,)), strict=True))
    given |= {name: (given[name],) * several for name in ("kernel", "bias")}
    given |= {name: given[of] for name, of in more.items()}
    junction = Junction(norm, implementation=implementation, precision=precision, features=(1,) * several)
    return tiles.few_features(Arrays(**given), junction)


@pytest.mark.parametrize(
    ("dtype", "precision", "fused"),
    [
        ("bfloat16", Precision.HIGHEST, True),
        ("bfloat16", Preset.BF16_BF16_BF16, False),
        ("bfloat16", Preset.TF32_TF32_F32, False),
        ("float32", Preset.TF32_TF32_F32, True),
        ("float32", (Precision.HIGHEST, Precision.HIGHEST), False),
        ("float32", Preset.F32_F32_F32, False),
    ],
)
def test_precision(dtype, precision, fused):
    """Precisions that the fused kernels do not have are left to XLA, as float32 of more than a GPU's TF32."""
    assert few(dtype, precision) == fused


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 256), ("float16", 256), ("float32", 128), ("float64", 0)])
def test_few_features(dtype, most):
    """The limit of features depends on the product's dtype. With "xla" nothing is fused."""
    for n in (16, 128, 129, 256, 257):
        assert few(dtype, n=n) == few(dtype, n=n, implementation="triton") == (n <= most)
    assert not few(dtype, implementation="xla")


LEFT = {
    "bias of x": {"x_bias": "scale"},
    "gate": {"gate": "scale"},
    "z": {"z": "x"},
    "parameters of examples": {"norm": dataclasses.replace(NORM, examples=1)},
    "remat": {"norm": dataclasses.replace(NORM, remat=True)},
    "second Linear": {"several": 2},
}


@pytest.mark.parametrize("beside", LEFT)
def test_forms_that_are_left_to_a_norm_and_products(beside):
    assert not few("bfloat16", **LEFT[beside])


# The tiles of fewer rows that sm_80 and sm_89 take, in several trips each. Of 40 cores several programs have shares of
# a tile's columns, and more than are added up at a time: of G and dbias, and composed of dscale and doffset. Of three
# each has several tiles of rows.
@pytest.mark.parametrize(
    ("capability", "cores", "name", "m", "h", "n", "dtype"),
    [
        (80, 3, "layer_norm_linear", 100, 60, 16, "bfloat16"),
        (80, 3, "layer_norm_linear", 40, 72, 256, "bfloat16"),
        (90, 40, "layer_norm_linear", 3000, 64, 256, "bfloat16"),
        (90, 40, "layer_norm_linear", 90, 1023, 130, "float32"),
        (90, 40, "add_layer_norm_linear", 400, 72, 20, "float32"),
        (90, 3, "add_layer_norm_linear", 400, 72, 20, "float32"),
    ],
)
def test_several_programs(capability, cores, name, m, h, n, dtype):
    operator = LINEAR_OPERATORS[name]
    with target.using(target.Interpreter(Chip(INTERPRETED.name, capability, cores))):
        workbench.check(operator, workbench.arguments(operator, (m, h), dtype, features=(n,)), "triton")


# Two tiles of rows, the second ragged; two chunks of columns, the second ragged.
def given_arrays(name):
    return workbench.named(name, (3, 30, 72), "float32", features=(2, 10))


def launched(function, given):
    """Return the results of a function of arrays, and by kernels' names the results of those that multiply, too."""
    with target.recording() as launches:
        jax.jit(lambda a: function(a)).lower(given)
    kernels = {run.kernel.fn.__name__: {*run.results} for run in launches if "with_linear" in run.kernel.fn.__module__}
    return jax.jit(lambda a: function(a))(given), kernels


def assert_close(got, true):
    """Hold that float32 results are those in float64, but for rounding sums of 90 rows and 72 elements, twice."""
    chex.assert_trees_all_equal_shapes(got, true)
    chex.assert_trees_all_close(got, true, rtol=1e-4, atol=1e-3)


def wide(tree):
    return jax.tree.map(lambda a: a.astype("float64"), tree)


@pytest.mark.parametrize("absent", [(), ("scale",), ("offset", "bias")], ids=str)
@pytest.mark.parametrize(
    "name", ["layer_norm_linear", "rms_norm_linear", "add_layer_norm_linear", "add_rms_norm_linear"]
)
def test_values_and_every_gradient(name, absent):
    """Values, gradients together and each alone are the reference's, by the kernels that normalise and multiply."""
    given = {n: a for n, a in given_arrays(name).items() if n not in absent}
    absent = {n: None for n in absent if n in ("scale", "offset")}

    def all_at_once(module, a, **options):
        function = functools.partial(getattr(module, name), **absent, **options)
        alone = {n: jax.grad(lambda v: loss_by_name(function)(a | {n: v}))(a[n]) for n in a}  # noqa: B023
        results, pullback = jax.vjp(lambda a: function(**a), a)
        return results, pullback(workbench.cotangents(results))[0], alone

    got, kernels = launched(lambda a: all_at_once(jln, a, implementation="triton"), given)
    assert kernels.keys() == {"forward_kernel", "row_sums_kernel", "backward_kernel", "parameters_kernel"}
    assert_close(got, jax.jit(lambda a: all_at_once(jln.reference, a))(wide(given)))


@pytest.mark.parametrize("mapped", ["x", "x and scale", "kernel", "all"])
def test_vmap(mapped):
    """Rows of examples that share the parameters are those of the kernel; other examples are right, too."""
    given = given_arrays("layer_norm_linear")
    names = tuple(given) if mapped == "all" else tuple(mapped.split(" and "))
    stacked = given | {n: jnp.stack([given[n] * f for f in (1, -0.5, 2)]) for n in names}
    axes = ({n: 0 if n in names else None for n in given},)

    def run(function, arrays):
        def of_one(a):
            y, pullback = jax.vjp(function, a)
            return y, pullback(jnp.sin(y))[0]

        return jax.vmap(function, axes)(arrays), jax.vmap(of_one, axes)(arrays)

    def ours(a):
        return jln.layer_norm_linear(**a, implementation="triton")

    _, kernels = launched(jax.vmap(ours, axes), stacked)  # without statistics, which only a derivative needs
    assert kernels == ({"forward_kernel": {"r.y"}} if mapped == "x" else {})
    got = jax.jit(lambda a: run(ours, a))(stacked)
    assert_close(got, jax.jit(lambda a: run(lambda a: jln.reference.layer_norm_linear(**a), a))(wide(stacked)))


@pytest.mark.parametrize("rows", [4096, 6144, 2049], ids=["two groups", "three", "not divisible"])
def test_column_sums_of_many_rows(rows):
    """Sums over many rows of integers are exact, although bfloat16 could not count so far.

    Integers give the same sum in every order.
    """
    a = jnp.asarray(np.random.default_rng(0).integers(-3, 5, (2, rows, 5)), "bfloat16")
    sequences = a[:, : rows // 4 * 4].reshape(2, 4, -1, 5)
    for given in (a, sequences):
        true = np.asarray(given, "float64").sum(tuple(range(1, given.ndim - 1)))
        np.testing.assert_array_equal(column_sums(given, "float32", 1), true)
