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
from matrix import loss_by_name
from workbench import LINEAR_OPERATORS

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
# In float64 XLA multiplies however few features there are; in float32 few features are one operation with the norm.
# (A GPU multiplies float32 in TF32, of ten bits.)
TOLERANCE = 3e-2 if jax.default_backend() == "gpu" else 1e-4
CLOSE_IN = {"float64": CLOSE, "float32": {"rtol": TOLERANCE, "atol": TOLERANCE}}
# Three Linears whose features, of one axis and of two, one kernel multiplies. Three where XLA multiplies, as the first
# alone is too wide for that kernel. A tuple of one, whose result is a tuple too.
FEATURES = (((16,), (2, 3), (5,)), ((300,), (8,), (2, 4)), ((7,),))


def ids(features):
    return "+".join("x".join(map(str, f)) for f in features)


# Cases take turns: every second pair of an operator and features has the other two dtypes.
@pytest.mark.parametrize(
    ("name", "features", "dtype"),
    [
        (name, features, dtype)
        for i, (name, features) in enumerate(itertools.product(LINEAR_OPERATORS, FEATURES))
        for dtype in (("bfloat16", "float32"), ("float16", "float64"))[i % 2]
    ],
)
def test_every_result_against_float64(name, features, dtype, implementation):
    """Several Linears are as accurate as one Linear whose kernel has all their columns.

    Each y is a part of its y, and each kernel's gradient a part of its kernel's gradient.
    """
    operands = workbench.named(name, (37, 100), dtype, features=features)
    operator = LINEAR_OPERATORS[name]

    def run(module, **options):
        function = functools.partial(getattr(module, name), epsilon=workbench.EPSILON, **options)

        @jax.jit
        def results_and_gradients(operands):
            result, pullback = jax.vjp(lambda a: function(**a), operands)
            y, total = result if operator.adds else (result, None)
            dtotal = () if total is None else (workbench.normal(9, total.shape, total.dtype),)
            dy = tuple(workbench.normal(20 + i, a.shape, a.dtype) for i, a in enumerate(y))
            return y, total, dy, dtotal, *pullback((dy, *dtotal) if dtotal else dy)

        y, total, dy, dtotal, gradients = results_and_gradients(operands)
        rows = len(operands["x"])
        return {
            "y": np.concatenate([np.asarray(a).reshape(rows, -1) for a in y], -1),
            **({} if total is None else {"total": np.asarray(total)}),
            **{f"d{n}": np.asarray(gradients[n]) for n in gradients if n not in ("kernel", "bias")},
            "dkernel": np.concatenate([np.asarray(a).reshape(len(a), -1) for a in gradients["kernel"]], -1),
            "dbias": np.concatenate([np.asarray(a).ravel() for a in gradients["bias"] if a is not None]),
        }, (np.concatenate([np.asarray(a).reshape(rows, -1) for a in dy], -1), *map(np.asarray, dtotal))

    got, cotangent = run(jln, implementation=implementation)
    plain, _ = run(jln.reference)
    kernel = np.concatenate([np.asarray(k).reshape(len(k), -1) for k in operands["kernel"]], -1)
    pairs = list(zip(operands["kernel"], operands["bias"], strict=True))
    bias = np.concatenate([np.zeros(k[0].size, k.dtype) if b is None else np.asarray(b).ravel() for k, b in pairs])
    whole = operands | {"kernel": kernel, "bias": bias}
    named = tuple(whole.get(n) for n in operator.kind.names)
    true = workbench.truth(operator, named, cotangent if operator.adds else cotangent[0], total=got.get("total"))
    has_bias = np.concatenate([np.full(k[0].size, b is not None) for k, b in pairs])
    for of_bias in true:  # values, and what roundings may change of them
        of_bias["dbias"] = of_bias["dbias"][has_bias]
    workbench.assert_accurate(got, plain, true)


def both(transformed, name, implementation, operands, dtype, **options):
    """Compare `transformed(function, operands)`, as one program, of our operator and of the reference."""
    function = functools.partial(getattr(jln, name), implementation=implementation, **options)
    ours = jax.jit(lambda a: transformed(function, a))(operands)
    reference = jax.jit(lambda a: transformed(getattr(jln.reference, name), a))(operands)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, reference)
    chex.assert_trees_all_close(ours, reference, **CLOSE_IN[dtype])


def stacked(a, n=3):
    return jnp.stack([a * (1 + i / 7) for i in range(n)])


def of_one_cotangent(results, pullback):
    first, *others = map(jnp.cos, results)
    return jax.vmap(lambda last: pullback([first, *others[:1], last, *others[2:]]))(stacked(others[1]))


TRANSFORMATIONS = {
    "grad": lambda f, a: jax.grad(loss_by_name(f))(a),
    "forward mode": lambda f, a: jax.jvp(lambda a: f(**a), (a,), (jax.tree.map(jnp.cos, a),)),
    "grad(forward mode)": lambda f, a: jax.grad(
        lambda a: sum(map(jnp.sum, jax.tree.leaves(jax.jvp(lambda a: f(**a), (a,), (jax.tree.map(jnp.cos, a),))[1])))
    )(a),
    "hvp": lambda f, a: jax.jvp(jax.grad(loss_by_name(f)), (a,), (jax.tree.map(jnp.cos, a),)),
    "vmap of x": lambda f, a: jax.vmap(lambda x: jax.grad(loss_by_name(f))(a | {"x": x}))(stacked(a["x"])),
    "grad(vmap of x), forward mode": lambda f, a: jax.grad(
        lambda a, x: jnp.sum(jax.vmap(lambda x: loss_by_name(f)(a | {"x": x}))(x)), (0, 1)
    )(a, stacked(a["x"])),
    "grad(vmap of all rows), forward mode": lambda f, a: jax.grad(
        lambda a, rows: jnp.sum(jax.vmap(lambda rows: loss_by_name(f)(a | rows))(rows)), (0, 1)
    )(a, {n: stacked(a[n]) for n in ("x", "residual") if n in a}),
    "vmap of one kernel": lambda f, a: jax.vmap(
        lambda k: jax.grad(loss_by_name(f))(a | {"kernel": (*a["kernel"][:-1], k)})
    )(stacked(a["kernel"][-1])),
    "grad(vmap) of all": lambda f, a: jax.grad(lambda s: jnp.sum(jax.vmap(loss_by_name(f))(s)))(
        jax.tree.map(stacked, a)
    ),
    "grad(vmap) of one kernel": lambda f, a: jax.grad(
        lambda k, a: jnp.sum(jax.vmap(lambda k: loss_by_name(f)(a | {"kernel": (*a["kernel"][:-1], k)}))(k)), (0, 1)
    )(stacked(a["kernel"][-1]), a),
    "grad(vmap) of one kernel, forward mode": lambda f, a: jax.grad(
        lambda k, a: jnp.sum(jax.vmap(lambda k: loss_by_name(f)(a | {"kernel": (*a["kernel"][:-1], k)}))(k)), (0, 1)
    )(stacked(a["kernel"][-1]), a),
    "vmap of one cotangent": lambda f, a: of_one_cotangent(*jax.vjp(lambda a: jax.tree.leaves(f(**a)), a)),
    "checkpoint": lambda f, a: jax.grad(loss_by_name(jax.checkpoint(lambda **a: f(**a))))(a),
    "dots saved": lambda f, a: jax.grad(
        loss_by_name(jax.checkpoint(lambda **a: f(**a), policy=jln.checkpoint_policies.dots_saveable))
    )(a),
}  # fmt: skip


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize(("features", "dtype"), [(FEATURES[0], "float32"), (FEATURES[1], "float64")])
@pytest.mark.parametrize("name", ["add_layer_norm_linear", "rms_norm_linear"])
def test_transformations(name, features, dtype, transformation, implementation):
    operands = workbench.named(name, (2, 3, 9), dtype, features=features)
    mode = {"forward_mode": "forward" in transformation}
    both(TRANSFORMATIONS[transformation], name, implementation, operands, dtype, **mode)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 2), ("total",), (1, "total")], ids=str)
@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(("features", "dtype"), [(FEATURES[0], "float32"), (FEATURES[1], "float64")])
def test_results_that_are_not_used(features, dtype, forward_mode, used, implementation):
    """Kernels of unused results have gradients of zero, and do not change the gradients of the others."""
    operands = workbench.named("add_layer_norm_linear", (6, 9), dtype, features=features)

    def transformed(f, operands):
        def chosen(a):
            y, total = f(**a)
            return sum(jnp.sum(jnp.sin(total if i == "total" else y[i])) for i in used)

        return jax.grad(chosen)(operands)

    both(transformed, "add_layer_norm_linear", implementation, operands, dtype, forward_mode=forward_mode)


@pytest.mark.parametrize("wanted", ["kernel", "bias"])
@pytest.mark.parametrize(("features", "dtype"), [(FEATURES[0], "float32"), (FEATURES[1], "float64")])
def test_the_gradient_of_an_unused_product_alone(features, dtype, wanted, implementation):
    """Zeros are returned, though another product is used."""
    operands = workbench.named("layer_norm_linear", (6, 9), dtype, features=features)

    def used(own):
        a = operands | {wanted: (own, *operands[wanted][1:])}
        return jnp.sum(jln.layer_norm_linear(**a, implementation=implementation)[1])

    assert not np.any(jax.jit(jax.grad(used))(operands[wanted][0]))


def test_the_offsets_gradient_alone_is_rounded_once():
    """Shares of three Linears, of which each cancels what another has, are added up wide in forward mode."""
    kernel = workbench.normal(0, (16, 300), "float32")
    kernels = (kernel, kernel * 1.01, kernel * -2)
    x, scale, offset = workbench.normal(1, (8, 16), "float32"), jnp.ones(16), jnp.zeros(16, "float16")
    dy = workbench.normal(2, (8, 300), "float32")

    def loss(offset):
        products = jln.layer_norm_linear(x, scale, offset, kernels, forward_mode=True)
        return sum(jnp.sum(y * dy) for y in products)

    true = sum(np.sum(np.asarray(dy, "float64") @ np.asarray(k, "float64").T, 0) for k in kernels)
    np.testing.assert_allclose(jax.grad(loss)(offset), true, rtol=float(jnp.finfo("float16").eps), atol=1e-4)


# More products than a kernel adds up; and rows that fit in no tile, in float64 beyond 2048 elements.
@pytest.mark.parametrize(
    ("name", "shape", "features"),
    [
        ("add_layer_norm_linear", (6, 9), ((300,), (8,), (2, 4), (5,))),
        ("add_layer_norm_linear", (3, 2100), ((130,), (140,))),
        ("rms_norm_add_rms_norm_linear", (3, 2100), ((130,), (140,))),
    ],
    ids=["four", "a wide row", "both sides of a wide row"],
)
def test_what_products_pull_back_is_added_up(name, shape, features, implementation):
    operands = workbench.named(name, shape, "float64", features=features)
    both(TRANSFORMATIONS["grad"], name, implementation, operands, "float64")


OWN = {"of examples": (2, 1, 9), "of places": (1, 3, 9)}  # the offset's; beside a scale of examples it is read by row


@pytest.mark.parametrize("wanted", [("offset",), ("x", "scale", "offset", "kernel")], ids=str)
@pytest.mark.parametrize("own", OWN)
def test_parameters_of_examples(own, wanted, implementation):
    operands = workbench.named("layer_norm_linear", (2, 3, 9), "float64", features=FEATURES[1])
    of_norm = {"offset": workbench.normal(5, OWN[own], "float64"), "scale": workbench.normal(6, (2, 1, 9), "float64")}
    operands |= of_norm

    def transformed(f, operands):
        return jax.grad(lambda some: loss_by_name(f)(operands | some))({n: operands[n] for n in wanted})

    both(transformed, "layer_norm_linear", implementation, operands, "float64")


FROZEN = ("x", "residual", "scale", "offset", "kernel", "bias", "first kernel", "last kernel")


@pytest.mark.parametrize("wanted", [(a,) for a in FROZEN] + [("scale", "last kernel"), ("x", "bias")], ids=str)
@pytest.mark.parametrize(
    ("features", "dtype", "forward_mode"),
    [(FEATURES[0], "float32", False), (FEATURES[0], "float32", True), (FEATURES[1], "float64", False)],
)
def test_frozen_arguments(features, dtype, forward_mode, wanted, implementation):
    operands = workbench.named("add_layer_norm_linear", (6, 9), dtype, features=features)

    def transformed(f, operands):
        kernels = operands["kernel"]
        parts = operands | {"first kernel": kernels[0], "last kernel": kernels[-1]}

        def of(wanted):
            a = operands | {n: v for n, v in wanted.items() if " " not in n}
            first, last = wanted.get("first kernel", a["kernel"][0]), wanted.get("last kernel", a["kernel"][-1])
            return loss_by_name(f)(a | {"kernel": (first, *a["kernel"][1:-1], last)})

        return jax.grad(of)({n: parts[n] for n in wanted})

    both(transformed, "add_layer_norm_linear", implementation, operands, dtype, forward_mode=forward_mode)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")])
@pytest.mark.parametrize("features", FEATURES[:2], ids=ids)
def test_kernels_of_several_dtypes(features, dtypes, implementation):
    """Each y has the dtype that x and its own kernel promote to, and each gradient has its argument's dtype."""
    operands = workbench.named("layer_norm_linear", (37, 100), "bfloat16", features=features)
    kernels = tuple(k.astype(d) for k, d in zip(operands["kernel"], itertools.cycle(dtypes)))
    operands |= {"kernel": kernels}

    def run(module, **options):
        @jax.jit
        def step(operands):
            y, pullback = jax.vjp(lambda a: module.layer_norm_linear(**a, **options), operands)
            return y, pullback(tuple(workbench.normal(i, a.shape, a.dtype) for i, a in enumerate(y)))[0]

        return step(operands)

    (y, gradients), (plain, plain_gradients) = run(jln, implementation=implementation), run(jln.reference)
    assert [a.dtype for a in y] == [jnp.promote_types("bfloat16", k.dtype) for k in kernels]
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, operands)
    wide = functools.partial(jax.tree.map, lambda a: np.asarray(a, "float64"))
    chex.assert_trees_all_close(wide((y, gradients)), wide((plain, plain_gradients)), rtol=0.02, atol=0.3)
    # A float32 gradient has all of its digits, whatever its neighbours' dtypes: z is not made again in theirs.
    exact = [i for i, k in enumerate(kernels) if k.dtype == y[i].dtype == jnp.float32]
    dkernel, plain_dkernel = ([g["kernel"][i] for i in exact] for g in (gradients, plain_gradients))
    chex.assert_trees_all_close(dkernel, plain_dkernel, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)


def test_one_kernel_of_several_dtypes(implementation):
    """No kernel or bias is rounded to the dtype of its neighbours where each product is in float32."""
    operands = workbench.named("layer_norm_linear", (37, 100), "float32", features=((16,), (8,), (5,)))
    narrow = lambda a: None if a is None else a.astype("bfloat16")  # noqa: E731
    (k, *kernels), (b, *biases) = operands["kernel"], operands["bias"]
    operands |= {"kernel": (narrow(k), *kernels), "bias": (narrow(b), *biases)}

    def step(f, **options):
        def of_x(x):
            return f(**operands | {"x": x}, **options)

        return jax.jit(lambda x: (of_x(x), jax.vjp(of_x, x)[1](tuple(map(jnp.sin, of_x(x))))))(operands["x"])

    got = step(jln.layer_norm_linear, implementation=implementation)
    chex.assert_trees_all_close(got, step(jln.reference.layer_norm_linear), **CLOSE_IN["float32"])


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("features", FEATURES[:2], ids=ids)
def test_only_the_total_is_kept_of_its_size(features, forward_mode, implementation):
    """No array of the total's size is kept for the backward pass except the total itself, which is returned too.

    Beside it are kept scale and offset in the rank of x, the kernels as they are, mean and rstd.
    """
    operands = workbench.named("add_layer_norm_linear", (64, 32), "bfloat16", features=features)
    options = {"implementation": implementation, "forward_mode": forward_mode}

    def held(a):
        return jax.tree.leaves(jax.vjp(lambda a: jln.add_layer_norm_linear(**a, **options), a)[1])

    large = [a for a in jax.eval_shape(held, operands) if a.size >= 64 * 32]
    jaxpr = jax.make_jaxpr(held)(operands).jaxpr
    made = [a.aval.shape for a in jaxpr.outvars if a not in jaxpr.invars and a.aval.size]
    assert sorted(made) == [(1, 32), (1, 32), (64, 1), (64, 1), (64, 32)]
    assert [a.shape for a in large].count((64, 32)) == 1


K = jnp.ones((8, 3), "float32")
X = jnp.ones((4, 8), "float32")
ERRORS = {
    "a list": (TypeError, r"kernel must be an array; got list", [K, K], None),
    "nothing": (ValueError, r"kernel must have at least one array; got \(\)", (), None),
    "a tuple in a tuple": (TypeError, r"kernel\[1\] must be an array; got tuple", (K, (K, K)), None),
    "None": (TypeError, r"kernel\[0\] must be an array; got NoneType", (None, K), None),
    "another H": (ValueError, r"kernel\[1\] must have shape \(8, \*features\).*got float32\[9,3\]",
                  (K, jnp.ones((9, 3), "float32")), None),
    "an integer kernel": (TypeError, r"kernel\[1\] must have one of the dtypes", (K, K.astype("int32")), None),
    "fewer biases": (ValueError, r"bias must have an array or None for each of 2 kernels; got 1", (K, K), (None,)),
    "a bias for all": (TypeError, r"bias must be None or a tuple of arrays and Nones.*got ArrayImpl",
                       (K, K), jnp.ones(3, "float32")),
    "a list of biases": (TypeError, r"bias must be None or a tuple.*got list", (K, K), [None, None]),
    "another bias": (ValueError, r"bias\[1\] must have shape \(3,\), that of kernel\[1\]'s axes after the first",
                     (K, K), (None, jnp.ones(4))),
    "several biases of one kernel": (TypeError, r"bias must be an array; got tuple", K, (jnp.ones(3),)),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_bad_arguments(case):
    error, message, kernel, bias = ERRORS[case]
    with pytest.raises(error, match=message):
        jln.rms_norm_linear(X, None, kernel, bias)
    with pytest.raises(error, match=message):
        jln.add_layer_norm_linear(X, X, None, None, kernel, bias)


def test_a_residual_of_another_shape():
    with pytest.raises(ValueError, match=r"residual must have shape \(4, 8\), that of x; got float32\[8\]"):
        jln.add_rms_norm_linear(X, X[0], None, K)
    with pytest.raises(TypeError, match=r"residual must be an array; got str"):
        jln.add_rms_norm_linear(X, "none", None, K)


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])  # in one operation, and by XLA
def test_more_linears_than_an_array_has_axes(dtype, forward_mode):
    """Linears of 40 experts or tasks have the reference's gradients: of the last kernel alone, and of all kernels."""
    x = workbench.normal(0, (3, 4), dtype)
    kernels = tuple(workbench.normal(i, (4, 2), dtype) for i in range(40))

    def gradients(f, **options):
        def loss(last, others):
            return sum(jnp.sum(jnp.sin(y)) for y in f(x, None, (*others, last), **options))

        return jax.jit(lambda *a: (jax.grad(loss)(*a), jax.grad(loss, (0, 1))(*a)))(kernels[-1], kernels[:-1])

    got = gradients(jln.rms_norm_linear, forward_mode=forward_mode)
    chex.assert_trees_all_close(got, gradients(jln.reference.rms_norm_linear), **CLOSE_IN[dtype])


@pytest.mark.parametrize("rows", [(0,), (3, 0)], ids=str)
def test_no_rows(rows, implementation):
    x = jnp.ones((*rows, 8))
    (y, z), total = jln.add_rms_norm_linear(x, x, None, (K, jnp.ones((8, 2, 2))), implementation=implementation)
    assert (y.shape, z.shape, total.shape) == ((*rows, 3), (*rows, 2, 2), (*rows, 8))
