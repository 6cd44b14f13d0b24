"""Few features: a kernel that normalises and multiplies, and the calls that are left to a norm and a product."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_junction import results_and_gradients

import jln
import workbench
from jln._junction.arrays import Arrays, Junction, Norm, Switches
from jln._junction.linears.tiles import backward_plan, few_features
from jln._triton import target
from jln._triton.chip import CHIPS, Chip
from jln._triton.launch import INTERPRETED
from jln._triton.tile import ceil_div
from junctions import made
from workbench import LINEAR_OPERATORS

NORM = Norm(-1, workbench.EPSILON, Switches(subtract_mean=True))


def arguments(m, h, n, dtype):
    """Return (x, scale, offset, kernel, bias) for x of [m, h] and n features."""
    return workbench.arguments(LINEAR_OPERATORS["layer_norm_linear"], (m, h), dtype, features=(n,))


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
    """Algorithms of a product that the fused kernels do not have are left to XLA, to run or to refuse."""
    assert few("bfloat16", precision) == fused


@pytest.mark.parametrize(
    ("precision", "fused"),
    [
        (None, True),
        ((jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT), True),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32, True),
        ((jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST), False),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, False),
    ],
)
def test_precision_of_float32(precision, fused):
    """Float32 products that need more than TF32 are left to XLA, as on a GPU the fused kernels multiply in TF32."""
    assert few("float32", precision) == fused


def few(dtype, precision, n=16, implementation=None):
    """Return whether the operator leaves it to the launchers to fuse n features."""
    x, scale, offset, kernel, bias = arguments(16, 64, n, dtype)
    operands = Arrays(x, scale=scale, offset=offset, kernel=(kernel,), bias=(bias,))
    junction = Junction(NORM, implementation=implementation, precision=precision, features=(1,))
    return few_features(operands, junction)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 256), ("float16", 256), ("float32", 128), ("float64", 0)])
def test_few_features(dtype, most):
    """The limit of features depends on the product's dtype. With "xla" nothing is fused."""
    for n in (16, 128, 129, 256, 257):
        assert few(dtype, None, n) == few(dtype, None, n, "triton") == (n <= most)
    assert not few(dtype, None, implementation="xla")


@pytest.mark.parametrize(
    "beside",
    [
        {"x_bias": "scale"},
        {"gate": "scale"},
        {"z": "x"},
        {"norm": dataclasses.replace(NORM, examples=1)},
        {"norm": dataclasses.replace(NORM, remat=True)},
        {"kernel": 2},
    ],
    ids=lambda beside: ", ".join(beside),
)
def test_forms_that_are_left_to_a_norm_and_products(beside):
    """One kernel takes a sum, and no gate, bias of x, parameters of examples, second Linear, nor what is made again."""
    x, scale, offset, kernel, bias = arguments(16, 64, 16, "bfloat16")
    operands = Arrays(x, residual=x, scale=scale, offset=offset, kernel=(kernel,), bias=(bias,))
    assert few_features(operands, Junction(NORM, features=(1,)))
    norm = beside.get("norm", NORM)
    if "kernel" in beside:
        operands = operands._replace(kernel=(kernel, kernel), bias=(bias, bias))
    more = {name: getattr(operands, of) for name, of in beside.items() if isinstance(of, str)}
    assert not few_features(operands._replace(**more), Junction(norm, features=(1,) * len(operands.kernel)))


# Two tiles of rows, the second ragged; two chunks of columns, the second ragged.
ROWS, H = (3, 30), 72


def given_arrays(name, dtype="float32", rows=ROWS):
    """Return the operator's arrays, of 20 features, by name."""
    given, _ = made(name, gate="no gate", varies="shared", shape=(*rows, H), dtype=dtype)
    given.pop("x_bias", None)
    kernel, bias = given["kernel"][..., :10], given["bias"][..., :10]
    return given | {"kernel": kernel / np.sqrt(H).astype(dtype), "bias": bias}


def launched(function, *arrays):
    """Return the results of a function of arrays, and which of the kernels that normalise and multiply it launches."""
    with target.recording() as launches:
        jax.jit(lambda *a: function(*a)).lower(*arrays)
    kernels = {run.kernel.fn.__name__ for run in launches if "kernels.with_linear" in run.kernel.fn.__module__}
    return jax.jit(lambda *a: function(*a))(*arrays), kernels


def assert_close(got, true):
    """Hold that float32 results are those in float64, but for rounding sums of 90 rows and 72 elements, twice."""
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


NAMES = ["layer_norm_linear", "rms_norm_linear", "add_layer_norm_linear", "add_rms_norm_linear"]


@pytest.mark.parametrize("absent", [(), ("scale",), ("offset", "bias")], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_every_gradient(name, absent):
    """Values and gradients are those of the reference in float64, by the kernels that normalise and multiply."""
    given = {n: None if n in absent else a for n, a in given_arrays(name).items()}
    got, kernels = launched(lambda a: all_at_once(jln, name, a, implementation="triton"), given)
    assert kernels == {"forward_kernel", "row_sums_kernel", "backward_kernel", "parameters_kernel"}
    assert_close(got, jax.jit(lambda a: all_at_once(jln.reference, name, a))(wide(given)))


@pytest.mark.parametrize("name", NAMES)
def test_each_gradient_alone(name):
    """Each gradient that is wanted alone is that of the reference."""
    ours = functools.partial(getattr(jln, name), implementation="triton")
    functions = (ours, getattr(jln.reference, name))
    got, true = (jax.jit(lambda a, f=f: results_and_gradients(f, a)[2]) for f in functions)
    given = given_arrays(name)
    assert_close(got(given), true(wide(given)))


# Of 40 cores several programs have shares of a tile's columns; of three each has several tiles of rows.
@pytest.mark.parametrize("cores", [3, 40])
def test_several_programs(cores):
    """Sums over rows are added up where several programs have shares of them."""
    given, name = given_arrays("add_layer_norm_linear", rows=(2, 200)), "add_layer_norm_linear"
    with target.using(target.Interpreter(Chip(INTERPRETED.name, 90, cores))):
        got = jax.jit(lambda a: all_at_once(jln, name, a, implementation="triton"))(given)
    assert_close(got, jax.jit(lambda a: all_at_once(jln.reference, name, a))(wide(given)))


def test_programs_are_as_many_as_cores():
    """An H200's SMs are busy in the backward pass, be there few columns or many."""
    chip = CHIPS["h200"]
    for h in (768, 1024, 4096):
        plan = backward_plan(8192, h, 64, "bfloat16", chip)
        programs = plan.splits * ceil_div(h, plan.backward.columns)
        assert programs >= 0.7 * chip.cores * ceil_div(programs, chip.cores), h


@pytest.mark.parametrize("mapped", ["x", "x and scale", "scale", "all"])
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

    _, kernels = launched(jax.vmap(ours, axes), stacked)
    assert kernels == ({"forward_kernel"} if mapped == "x" else set())
    got = jax.jit(lambda a: run(ours, a))(stacked)
    assert_close(got, jax.jit(lambda a: run(lambda a: jln.reference.layer_norm_linear(**a), a))(wide(stacked)))
