"""Several Linears behind one norm, as a tuple of kernels: values, gradients, transformations, errors and what is kept.

Other tests hold each product by itself. These hold what the tuple adds: z and dz are shared, every array is treated by
itself, and nothing is counted twice.
"""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from jln.testing.operators import Judge, step
from matrix import loss_by_name
from workbench import LINEAR_OPERATORS

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
# Three Linears, with features of one axis and of two; and a tuple of one, whose result is a tuple too.
DTYPES = ("float16", "bfloat16", "float32", "float64")
FEATURES = {"three": ((300,), (8,), (2, 4)), "one": ((7,),)}


@pytest.mark.parametrize(
    ("number", "dtype"), [*(("three", d) for d in DTYPES), ("one", "bfloat16"), ("one", "float64")]
)
@pytest.mark.parametrize("name", LINEAR_OPERATORS)
def test_every_result_against_float64(name, number, dtype, implementation):
    operands = workbench.named(name, (37, 100), dtype, features=FEATURES[number])

    def of(module, **options):
        def by_name(*arrays):
            made = getattr(module, name)(**dict(zip(operands, arrays, strict=True)), **options)
            return dict(zip(("y", "total"), made if LINEAR_OPERATORS[name].adds else [made], strict=False))

        return by_name

    arrays = [*operands.values()]
    cotangents = workbench.cotangents(jax.eval_shape(of(jln.reference), *arrays))
    got, plain = (step(f, operands) for f in (of(jln, implementation=implementation), of(jln.reference)))
    judge = Judge(plain, plain(arrays, cotangents), (arrays, cotangents), dtype)
    errors = judge.errors(got(arrays, cotangents))
    assert len(errors) == len(jax.tree.leaves((operands, cotangents)))
    assert not [str(e) for e in errors if not e.ok]


def both(transformed, name, implementation, operands, **options):
    """Assert that a transformation of the operator has the reference's results, as programs of both."""
    ours = functools.partial(getattr(jln, name), implementation=implementation, **options)
    got, true = (jax.jit(lambda a, f=f: transformed(f, a))(operands) for f in (ours, getattr(jln.reference, name)))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, true)
    chex.assert_trees_all_close(got, true, **CLOSE)


def gradient(f, a):
    return jax.grad(loss_by_name(f))(a)


def along(f, a):
    """The results' derivative along a direction of all operands."""
    return jax.jvp(lambda a: f(**a), (a,), (jax.tree.map(jnp.cos, a),))[1]


def stacked(a, n=3):
    return jax.tree.map(lambda a: jnp.stack([a * (1 + i / 7) for i in range(n)]), a)


def of_one_kernel(f, a):
    def loss(a, kernels):
        return jnp.sum(jax.vmap(lambda k: loss_by_name(f)(a | {"kernel": (*a["kernel"][:-1], k)}))(kernels))

    return jax.grad(loss, (0, 1))(a, stacked(a["kernel"][-1]))


def of_one_cotangent(f, a):
    results, pullback = jax.vjp(lambda a: jax.tree.leaves(f(**a)), a)
    first, *others = map(jnp.cos, results)
    return jax.vmap(lambda last: pullback([first, *others[:1], last, *others[2:]]))(stacked(others[1]))


TRANSFORMATIONS = {
    "forward mode": along,
    "grad(forward mode)": lambda f, a: jax.grad(lambda a: sum(map(jnp.sum, jax.tree.leaves(along(f, a)))))(a),
    "hvp": lambda f, a: jax.jvp(functools.partial(gradient, f), (a,), (jax.tree.map(jnp.cos, a),)),
    "vmap of x": lambda f, a: jax.vmap(lambda x: gradient(f, a | {"x": x}))(stacked(a["x"])),
    "vmap of all": lambda f, a: jax.vmap(functools.partial(gradient, f))(stacked(a)),
    "grad(vmap) of all": lambda f, a: jax.grad(lambda s: jnp.sum(jax.vmap(loss_by_name(f))(s)))(stacked(a)),
    "grad(vmap) of one kernel": of_one_kernel,
    "vmap of one cotangent": of_one_cotangent,
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("name", ["add_layer_norm_linear", "rms_norm_linear"])
def test_transformations(name, transformation, implementation):
    operands = workbench.named(name, (2, 3, 9), "float64", features=FEATURES["three"])
    mode = {"forward_mode": "forward" in transformation}
    both(TRANSFORMATIONS[transformation], name, implementation, operands, **mode)


@pytest.mark.parametrize("forward_mode", [False, True])
def test_frozen_arguments(forward_mode, implementation):
    """The gradient of each array alone, of a Linear's where another's result is used, of all where some results are."""
    operands = workbench.named("add_layer_norm_linear", (6, 9), "float64", features=FEATURES["three"])

    def transformed(f, operands):
        leaves, tree = jax.tree.flatten(operands)  # the first bias, a second one, then the first kernel
        every = dict(enumerate(leaves))

        def loss(wanted, used):
            results = f(**tree.unflatten([wanted.get(i, a) for i, a in every.items()]))
            return sum(jnp.sum(jnp.sin(a)) for i, a in enumerate(jax.tree.leaves(results)) if i in used)

        alone = [({i: a}, range(4)) for i, a in every.items()]
        of_another = [({i: every[i]}, (1,)) for i in (0, 2)]
        return [jax.grad(loss)(*case) for case in [*alone, *of_another, (every, (0, 2)), (every, (3,))]]

    both(transformed, "add_layer_norm_linear", implementation, operands, forward_mode=forward_mode)


# More products than a kernel adds up; rows that fit in no tile, in float64 beyond 2048 elements; and x of one axis.
@pytest.mark.parametrize(
    ("name", "shape", "features"),
    [
        ("add_layer_norm_linear", (6, 9), ((300,), (8,), (2, 4), (5,))),
        ("add_layer_norm_linear", (3, 2100), ((130,), (140,))),
        ("rms_norm_add_rms_norm_linear", (3, 2100), ((130,), (140,))),
        ("add_layer_norm_linear", (9,), ((6,), (2, 3, 2))),
    ],
    ids=["four", "a wide row", "both sides of a wide row", "one axis"],
)
def test_what_products_pull_back_is_added_up(name, shape, features, implementation):
    both(gradient, name, implementation, workbench.named(name, shape, "float64", features=features))


# The shapes of the offset; beside a scale of examples the second is read by row.
@pytest.mark.parametrize("own", [(2, 1, 9), (1, 3, 9)], ids=["of examples", "of places"])
def test_parameters_of_examples(own, implementation):
    operands = workbench.named("layer_norm_linear", (2, 3, 9), "float64", features=FEATURES["three"])
    operands |= {"offset": workbench.normal(5, own, "float64"), "scale": workbench.normal(6, (2, 1, 9), "float64")}

    def transformed(f, operands):
        return gradient(f, operands), jax.grad(lambda v: loss_by_name(f)(operands | {"offset": v}))(operands["offset"])

    both(transformed, "layer_norm_linear", implementation, operands)


@pytest.mark.parametrize(
    ("x", "dtypes"),
    [
        ("bfloat16", ("bfloat16", "float32")),
        ("bfloat16", ("float32", "bfloat16")),
        ("bfloat16", ("float16", "bfloat16")),
        ("float32", ("bfloat16", "float32")),
    ],
)
def test_kernels_of_several_dtypes(x, dtypes, implementation):
    """Each y has the dtype that x and its own kernel promote to, and each gradient has its argument's dtype.

    What is in float32 has all of its digits, whatever its neighbours' dtypes: z is not made again in theirs.
    """
    operands = workbench.named("layer_norm_linear", (37, 100), x, features=FEATURES["three"])
    operands["kernel"] = tuple(k.astype(d) for k, d in zip(operands["kernel"], itertools.cycle(dtypes)))

    @functools.partial(jax.jit, static_argnums=0)
    def run(f, operands):
        y, pullback = jax.vjp(lambda a: f(**a), operands)
        return y, pullback(workbench.cotangents(y))[0]

    ours = functools.partial(jln.layer_norm_linear, implementation=implementation)
    (y, gradients), plain = run(ours, operands), run(jln.reference.layer_norm_linear, operands)
    assert [a.dtype for a in y] == [jnp.promote_types(x, k.dtype) for k in operands["kernel"]]
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, operands)
    wide = functools.partial(jax.tree.map, lambda a: np.asarray(a, "float64"))
    chex.assert_trees_all_close(wide((y, gradients)), wide(plain), rtol=0.02, atol=0.3)
    exact = [i for i, k in enumerate(operands["kernel"]) if k.dtype == y[i].dtype == jnp.float32]
    of_exact = [([g["kernel"][i] for i in exact], g["x"] if x == "float32" else None) for g in (gradients, plain[1])]
    tolerance = 0.3 if jax.default_backend() == "gpu" else 1e-3  # a GPU multiplies float32 in TF32, of ten bits
    chex.assert_trees_all_close(*of_exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_only_the_total_is_kept_of_its_size(features, forward_mode, implementation):
    """No array of the total's size is kept for the backward pass except the total itself, which is returned too.

    Beside it are kept scale and offset in the rank of x, the kernels as they are, mean and rstd.
    """
    operands = workbench.named("add_layer_norm_linear", (64, 32), "bfloat16", features=features)
    options = {"implementation": implementation, "forward_mode": forward_mode}

    def held(a):
        return jax.tree.leaves(jax.vjp(lambda a: jln.add_layer_norm_linear(**a, **options), a)[1])

    jaxpr = jax.make_jaxpr(held)(operands).jaxpr
    made = [a.aval.shape for a in jaxpr.outvars if a not in jaxpr.invars and a.aval.size]
    assert sorted(made) == [(1, 32), (1, 32), (64, 1), (64, 1), (64, 32)]
    assert [a.aval.shape for a in jaxpr.outvars].count((64, 32)) == 1


K = jnp.ones((8, 3), "float32")
X = jnp.ones((4, 8), "float32")
ERRORS = {
    "a list": (TypeError, r"kernel must be an array; got list", [K, K], None),
    "nothing": (ValueError, r"kernel must have at least one array; got \(\)", (), None),
    "another H": (ValueError, r"kernel\[1\] must have shape \(8, \*features\).*got float32\[9,3\]",
                  (K, jnp.ones((9, 3), "float32")), None),
    "an integer kernel": (TypeError, r"kernel\[1\] must have one of the dtypes", (K, K.astype("int32")), None),
    "fewer biases": (ValueError, r"bias must have an array or None for each of 2 kernels; got 1", (K, K), (None,)),
    "a bias for all": (TypeError, r"bias must be None or a tuple of arrays and Nones.*got ArrayImpl",
                       (K, K), jnp.ones(3, "float32")),
    "another bias": (ValueError, r"bias\[1\] must have shape \(3,\), that of kernel\[1\]'s axes after the first",
                     (K, K), (None, jnp.ones(4))),
    "several biases of one kernel": (TypeError, r"bias must be an array; got tuple", K, (jnp.ones(3),)),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "kernel", "bias"), ERRORS.values(), ids=ERRORS)
def test_bad_arguments(error, message, kernel, bias):
    with pytest.raises(error, match=message):
        jln.rms_norm_linear(X, None, kernel, bias)
