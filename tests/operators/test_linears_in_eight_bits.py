"""Norms and the Linears behind them in eight bits: beside float64 with the same recipe, and what holds of any Linears.

The recipe is written here once more, in numpy, of what each product sums over.
"""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_straight_through import requests

import jln
import workbench
from eight_bit_products import multiply_on_a_cpu
from in_eight_bits import block_scaled, scaled, spread
from jln._junction.linears import eight_bits
from jln._triton import target
from jln._triton.chip import chip_by_name
from workbench import LINEAR_OPERATORS

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
QUANTIZE = {
    "blocks": jln.MXFloat8(),
    "blocks of e5m2": jln.MXFloat8(E5M2),
    "current scale": jln.Float8(),
    "given scale": jln.Float8(0.01),
    "given scale of e5m2": jln.Float8(0.001, E5M2),
}
# Rows and features that blocks fill, and that they do not; features of one axis and of two.
SIZES = {
    "whole blocks": ((3, 64), (96,)),
    "parts of blocks": ((3, 11), (2, 20)),
    "blocks over axes of rows": ((8, 4), (4, 8)),
    "a row without others": ((), (96,)),
}
# How far off results may be. XLA's CPU backend of jaxlib 0.12 adds up a product over two axes of rows in bfloat16.
ALLOWED = {"float32": 2e-3, "bfloat16": 2e-2, "float16": 4e-3}
CASES = [*((sizes, "float32") for sizes in SIZES), ("whole blocks", "bfloat16"), ("whole blocks", "float16")]
H = 96
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


def in_eight_bits(a, axes, dtype, blocks, scale=None):
    """The numbers in float64 that `a` is taken for where a product sums over `axes`, which lie side by side."""
    a = np.asarray(a, np.float64)
    if not blocks:
        scale = np.max(np.abs(a)) / float(ml_dtypes.finfo(dtype).max) if scale is None else scale
        made = scaled(a, scale, dtype)
        return made.values.astype(np.float64) * spread(made.scale)
    n = math.prod(a.shape[i] for i in axes)
    other = [i for i in range(a.ndim) if i not in axes]
    rows = np.transpose(a, (*other, *axes)).reshape(-1, n)
    made = block_scaled(np.pad(rows, ((0, 0), (0, -n % 32))), dtype)
    numbers = (made.values.astype(np.float64) * spread(made.scale))[:, :n]
    numbers = numbers.reshape([a.shape[i] for i in (*other, *axes)])
    return np.transpose(numbers, np.argsort([*other, *axes]))


def in_float64(tree):
    return jax.tree.map(lambda a: jnp.asarray(a, "float64"), tree)


def recipe(name, operands, dy, dtotal, quantize):
    """The results and the gradients by the recipe, of kernels and biases in tuples, in float64: `((y, total), ...)`."""
    blocks, scale = isinstance(quantize, jln.MXFloat8), getattr(quantize, "scale", None)
    of_dy = E4M3 if blocks else E5M2
    kernels, biases = operands["kernel"], operands["bias"]
    of_norm = in_float64({n: a for n, a in operands.items() if n not in ("kernel", "bias")})
    norm = getattr(jln.reference, name.removesuffix("_linear"))
    result, pullback = jax.vjp(lambda a: norm(**a, epsilon=workbench.EPSILON), of_norm)
    z, total = result if dtotal is not None else (result, None)
    z, rows = np.asarray(z), tuple(range(z.ndim - 1))
    of_z = in_eight_bits(z, (z.ndim - 1,), quantize.dtype, blocks, scale)
    z_of_rows = in_eight_bits(z, rows, quantize.dtype, blocks, scale)
    y, dz, dkernel, dbias = [], 0, [], []
    for kernel, bias, d in zip(kernels, biases, dy, strict=True):
        kernel, d = np.asarray(kernel, np.float64), np.asarray(d, np.float64)
        features = kernel.ndim - 1
        product = np.tensordot(of_z, in_eight_bits(kernel, (0,), E4M3, blocks), 1)
        y.append(product if bias is None else product + np.asarray(bias, np.float64))
        d_of_features = in_eight_bits(d, tuple(range(d.ndim - features, d.ndim)), of_dy, blocks)
        k_of_features = in_eight_bits(kernel, tuple(range(1, kernel.ndim)), E4M3, blocks)
        dz = dz + np.tensordot(d_of_features, np.moveaxis(k_of_features, 0, -1), features)
        dkernel.append(np.tensordot(z_of_rows, in_eight_bits(d, rows, of_dy, blocks), (rows, rows)))
        dbias.append(None if bias is None else d.sum(rows))
    (pulled,) = pullback(jnp.asarray(dz) if dtotal is None else (jnp.asarray(dz), in_float64(dtotal)))
    return (tuple(y), total), {**pulled, "kernel": tuple(dkernel), "bias": tuple(dbias)}


def found(name, operands, dy, dtotal, **options):
    """The same of the operator, and the largest `|z|` where it is told."""
    function = getattr(jln, name)

    @jax.jit
    def run(operands, dy, dtotal):
        def values(operands):
            result = function(**operands, epsilon=workbench.EPSILON, **options)
            y, total = (result, None) if dtotal is None else result
            amax = y.amax if isinstance(y, jln.Scaled) else None
            return (y.y if isinstance(y, jln.Scaled) else y, total), amax

        outputs, pullback, amax = jax.vjp(values, operands, has_aux=True)
        return outputs, pullback((dy, dtotal))[0], amax

    return run(operands, dy, dtotal)


def off(got, true):
    """The distance of each array from the true one, relative to all of it."""
    got, true = (jax.tree.map(lambda a: np.asarray(a, np.float64), tree) for tree in (got, true))
    return jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), got, true)


def given(name, rows, features, dtype="float32"):
    operands = workbench.named(name, (*rows, H), dtype, features=features)
    ys = [(*rows, *f) for f in features]
    dy = tuple(workbench.normal(40 + i, shape, dtype) for i, shape in enumerate(ys))
    dtotal = workbench.normal(50, (*rows, H), dtype) if LINEAR_OPERATORS[name].adds else None
    return operands, dy, dtotal


@pytest.mark.parametrize(("sizes", "dtype"), CASES)
@pytest.mark.parametrize("how", QUANTIZE)
@pytest.mark.parametrize("name", LINEAR_OPERATORS)
def test_values_and_gradients_by_the_recipe(name, how, sizes, dtype, implementation):
    """Results in float32 are those of the recipe in float64, but where a number lies between two of eight bits.

    One such number of some thousands is taken for the other; another recipe is off by more than 1e-2.
    """
    rows, features = SIZES[sizes]
    arrays = given(name, rows, (features, (64,)), dtype)
    results, gradients, amax = found(name, *arrays, quantize=QUANTIZE[how], implementation=implementation)
    assert {a.dtype.name for a in jax.tree.leaves((results, gradients))} == {dtype}
    errors = off((results, gradients), recipe(name, *arrays, QUANTIZE[how]))
    assert max(jax.tree.leaves(errors)) < ALLOWED[dtype]
    assert (amax is None) == (not how.startswith("given"))


def loss(quantize, **options):
    def of(x, scale, offset, kernel, bias):
        y = jln.layer_norm_linear(x, scale, offset, kernel, bias, quantize=quantize, **options)
        return jnp.sum(jnp.sin(y.y if isinstance(y, jln.Scaled) else y))

    return of


ARRAYS = [workbench.normal(i, shape, "float32") for i, shape in enumerate([(4, 2, 32, H), (H,), (H,), (H, 64), (64,)])]
EVERY = tuple(range(5))
KINDS = ["blocks", "current scale", "given scale"]


@pytest.mark.parametrize("how", KINDS)
def test_vmap_is_a_loop(how, implementation):
    """Each example has a scale and blocks of its own, inside of a derivative and around one, shared kernels and own."""
    f = loss(QUANTIZE[how], implementation=implementation)
    gradient, shared = jax.grad(f, EVERY), (0, *[None] * 4)
    x, scale, offset, kernel, bias = ARRAYS
    kernels = jnp.stack([kernel * (1 + i / 3) for i in range(3)])

    @jax.jit
    def run(*arrays):
        inside = jax.grad(lambda *a: jnp.sum(jax.vmap(f, shared)(*a)), EVERY)(*arrays)
        return jax.vmap(gradient, shared)(*arrays), inside

    of_one = jax.jit(gradient)
    around, inside = run(*ARRAYS)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *[of_one(a, scale, offset, kernel, bias) for a in x])
    chex.assert_trees_all_close(around, stacked, **CLOSE)
    summed = (stacked[0], *[jnp.sum(a, 0) for a in stacked[1:]])
    chex.assert_trees_all_close(inside, summed, rtol=2e-3, atol=2e-3)

    def of_kernels(x, kernels):
        return jnp.sum(jax.vmap(lambda k: f(x, scale, offset, k, bias))(kernels))

    dx, dkernels = jax.jit(jax.grad(of_kernels, (0, 1)))(x[0], kernels)
    each = [of_one(x[0], scale, offset, k, bias) for k in kernels]
    chex.assert_trees_all_close(dkernels, jnp.stack([g[3] for g in each]), **CLOSE)
    assert off(dx, sum(g[0] for g in each)) < 2e-2


@pytest.mark.parametrize("how", KINDS)
def test_transformations(how):
    """A checkpoint and a frozen argument change no gradient."""
    f = loss(QUANTIZE[how])

    @jax.jit
    def run(*arrays):
        return jax.grad(jax.checkpoint(f), EVERY)(*arrays), tuple(jax.grad(f, i)(*arrays) for i in EVERY)

    expected = jax.jit(jax.grad(f, EVERY))(*ARRAYS)
    chex.assert_trees_all_close(run(*ARRAYS), (expected, expected), **CLOSE)


def test_delayed_scaling():
    """The largest |z| is told, has no derivative, and makes the next scale; a traced scale compiles nothing anew."""
    operands, *_ = given("layer_norm_linear", (2, 32), ((64,),))

    @jax.jit
    def step(scale):
        def of(x, scale):
            made = jln.layer_norm_linear(**operands | {"x": x}, quantize=jln.Float8(scale))
            return made.amax, made

        return jax.value_and_grad(of, (0, 1), has_aux=True)(operands["x"], scale)

    z = jln.layer_norm(operands["x"], operands["scale"], operands["offset"])
    (amax, _), gradients = step(jnp.float32(1))
    np.testing.assert_allclose(amax, jnp.max(jnp.abs(z)), rtol=1e-6)
    assert not any(map(np.any, gradients))
    (_, second), _ = step(amax / 448)
    chex.assert_trees_all_close(second.y, jln.layer_norm_linear(**operands, quantize=jln.Float8()), **CLOSE)
    assert step._cache_size() == 1


@pytest.mark.parametrize("how", ["blocks", "current scale"])
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_what_is_no_number_is_seen(how, bad):
    """A cotangent that overflowed makes no gradient that looks right."""
    dy = jnp.ones((4, 2, 32, 64), "float32").at[1, 0, 3, 5].set(bad)
    call = lambda *a: jln.layer_norm_linear(*a, quantize=QUANTIZE[how])  # noqa: E731
    dx, _, _, dkernel, _ = jax.jit(lambda *a: jax.vjp(call, *a)[1](dy))(*ARRAYS)
    assert not np.isfinite(dx[1, 0, 3]).any()
    assert not np.isfinite(dkernel[:, 5]).any()


@pytest.mark.parametrize("how", KINDS)
def test_zeros(how):
    gradients = jax.jit(jax.grad(loss(QUANTIZE[how]), EVERY))(*map(jnp.zeros_like, ARRAYS))
    assert all(np.isfinite(a).all() for a in gradients)


@pytest.mark.parametrize("sizes", SIZES)
def test_layouts_for_cudnn(sizes):
    """Operands in the layouts that cuDNN reads, multiplied on another device, and its own product in their place."""
    rows, features = SIZES[sizes]
    arrays = given("layer_norm_linear", rows, (features, (64,)))
    how = {"quantize": jln.MXFloat8(), "implementation": "xla"}
    expected = found("layer_norm_linear", *arrays, **how)
    with target.using(target.Gpu(chip_by_name("b200"))):
        got = found("layer_norm_linear", *arrays, **how)
    chex.assert_trees_all_close(got, expected, **CLOSE)


def test_examples_of_a_product_by_cudnn(monkeypatch):
    """Products of a vmap's examples, which share one side, are one, and right."""
    sizes = []

    def by_hand(a, b, *rest, **how):
        sizes.append((a.shape, b.shape))
        return multiply_on_a_cpu(a, b, *rest, **how)

    monkeypatch.setattr(jax.nn, "scaled_matmul", by_hand)
    product = eight_bits.cudnn_product("float32")
    a, b = (workbench.normal(n, (5, 2, n, 64), "float32").astype(E4M3) for n in (7, 9))
    a_scale, b_scale = (np.random.default_rng(n).integers(120, 134, (5, 2, n, 2), "uint8") for n in (7, 9))
    got = jax.vmap(product, (0, 0, None, None))(a, a_scale, b[0], b_scale[0])
    assert sizes[-1] == ((10, 7, 64), (10, 9, 64))
    loop = [product(a[i], a_scale[i], b[0], b_scale[0]) for i in range(5)]
    chex.assert_trees_all_close(got, jnp.stack(loop), rtol=1e-5, atol=1e-5)


def test_errors():
    x, scale, offset, kernel, bias = ARRAYS
    call = functools.partial(jln.layer_norm_linear, quantize=jln.MXFloat8())
    with pytest.raises(ValueError, match="precision='highest'"):
        call(*ARRAYS, precision="highest")
    with pytest.raises(TypeError, match="kernel in float64"):
        call(x, scale, offset, kernel.astype("float64"), bias)
    with pytest.raises(TypeError, match="no derivatives"):
        jax.grad(lambda k: jnp.sum(jax.grad(loss(jln.MXFloat8()))(x, scale, offset, k, bias)))(kernel)


@pytest.mark.parametrize("how", KINDS)
def test_xla_makes_z_again_where_it_quantises_it(how, implementation):
    """The norm's backward operation makes z where it makes the statistics again, and nowhere else.

    It is in float32: in front of eight bits 16 would round it twice, and hold no large scale.
    """
    arrays = [a.astype("float16") for a in ARRAYS]
    for remat in (False, True):
        f = loss(QUANTIZE[how], implementation=implementation, remat=remat)
        _, backward = requests(jax.grad(f, EVERY), *arrays)
        assert [r.dtypes.y for r in backward] == ["float32" if remat else None]
