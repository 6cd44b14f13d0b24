"""A norm that feeds several Linears, and a residual in front of it, against the separate layers of each framework."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("haiku")
import haiku as hk
from flax import linen, nnx, serialization
from flax.errors import NameInUseError

import jln
from jln import haiku as jln_haiku
from parity import (
    SHAPE,
    every_equation,
    named,
    normal,
    noting,
    pairwise_parameters,
    randomised,
)
from separate import ONE, WITH_LINEARS, layers, parity, qkv

FUSED = "all arguments are the operator's"

CASES = {
    "norm": ["LayerNorm", "RMSNorm"],
    "x": ["float32", "bfloat16"],
    "residual": [None, "float32", "bfloat16"],
    "use_scale": [True, False],
    "precision": [None, jax.lax.Precision.HIGHEST],
}
FLAX_CASES = CASES | {
    "dtype": [None, "bfloat16", "float32"],
    "param_dtype": ["float32", "bfloat16"],
    "q": [6, (2, 3), 300],  # 300 features are too many for one kernel
}
TABLES = {"linen": FLAX_CASES, "nnx": FLAX_CASES, "haiku": CASES}


@pytest.mark.parametrize(
    ("framework", "case"),
    [
        pytest.param(framework, *case.values, id=f"{framework} {case.id}", marks=case.marks)
        for framework, table in TABLES.items()
        for case in pairwise_parameters(table)
    ],
)
def test_values_and_gradients_are_those_of_the_separate_layers(framework, case):
    case = dict(case)
    norm, q = case.pop("norm"), case.pop("q", 6)
    x, residual = normal(1, SHAPE, case.pop("x")), case.pop("residual")
    x = x if residual is None else (x, normal(2, SHAPE, residual))
    path = parity(framework, norm, (("q", q), *qkv()[1:]), x, **case)
    assert path in ("fused", "norm")
    if case.get("dtype") is None and case.get("param_dtype", "float32") == "float32":
        assert path == "fused"


@pytest.mark.parametrize("framework", WITH_LINEARS)
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_one_linear_with_a_residual(framework, norm):
    x = normal(1, SHAPE, "float32"), normal(2, SHAPE, "float32")
    assert parity(framework, norm, ((ONE[framework], 6),), x) == "fused"


@pytest.mark.parametrize("framework", ["linen", "nnx"])
@pytest.mark.parametrize("adds", [False, True])
def test_where_one_operator_would_round_differently_all_are_called(framework, adds):
    x = normal(1, SHAPE, "float32")
    x = (x, normal(2, SHAPE, "float32")) if adds else x
    theirs, ours = layers(framework, "LayerNorm", qkv(), dtype="bfloat16")
    variables = randomised(theirs.init(x))
    with noting() as routes:
        got = ours.apply(variables, x)
    assert [route.path for route in routes] == ["plain", "norm"]
    assert routes[0].why == (
        "one operator would round differently: x is float32, the norm bfloat16, the product bfloat16"
    )
    # products of 8 terms in bfloat16
    close = functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=2e-2)
    jax.tree.map(close, got, theirs.apply(variables, x))


def test_a_haiku_linear_of_another_dtype_has_all_called():
    """All Linears are called as Haiku's where one has parameters of another dtype, as a checkpoint may hold them."""
    x = normal(1, SHAPE, "bfloat16")
    theirs, ours = layers("haiku", "LayerNorm", qkv())
    variables = randomised(theirs.init(x))
    variables["layer_norm_linear/k"] = jax.tree.map(lambda a: a.astype("float32"), variables["layer_norm_linear/k"])
    with noting() as routes:
        got = ours.apply(variables, x)
    assert [r.path for r in routes] == ["plain", "norm"]
    assert routes[0].why == (
        "one operator would round differently: x is bfloat16, the norm bfloat16, the product float32"
    )
    assert (
        [y.dtype for y in got] == [y.dtype for y in theirs.apply(variables, x)] == ["bfloat16", "float32", "bfloat16"]
    )


NORMS = ["jln_norm_backward", "jln_norm_forward"]


@pytest.mark.parametrize("framework", WITH_LINEARS)
@pytest.mark.parametrize("adds", [False, True])
def test_explain_and_the_operations_of_a_call(framework, adds):
    """A call has one operation of a norm forward and one backward, and XLA multiplies."""
    x = normal(1, SHAPE, "float32")
    x = (x, normal(2, SHAPE, "float32")) if adds else x
    for n in (6, 300):
        _, ours = layers(framework, "RMSNorm", (("q", n), *qkv()[1:]))
        variables = ours.init(x)
        (route,) = jln.explain(ours.apply, variables, x)
        assert (route.path, route.why) == ("fused", FUSED)
        assert route.layer.startswith(f"jln.{framework}.RMSNorm{'Dense' if framework == 'linen' else 'Linear'}")

        def loss(variables, apply=ours.apply):
            return sum(map(jnp.sum, jax.tree.leaves(apply(variables, x))))

        equations = list(every_equation(jax.make_jaxpr(jax.grad(loss))(variables)))
        seen = {e.primitive.name: e for e in equations if e.primitive.name.startswith("jln_norm")}
        assert sorted(seen) == sorted(e.primitive.name for e in equations if e.primitive.name.startswith("jln_norm"))
        assert sorted(seen) == NORMS
        assert (seen[NORMS[1]].params["request"].dtypes.total is not None) is adds


@pytest.mark.parametrize("framework", WITH_LINEARS)
def test_a_file_of_the_separate_layers_is_read(framework):
    """A file of the separate layers is read in its order, which matters as k and v have the same size."""
    x = normal(0, SHAPE, "float32")
    theirs, ours = layers(framework, "LayerNorm", qkv())
    written = randomised(theirs.init(x))
    read = serialization.from_bytes(ours.init(x), serialization.to_bytes(written))
    assert named(read).keys() == named(written).keys()
    for got, wanted in zip(ours.apply(read, x), theirs.apply(written, x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)  # for sums of 8 float32 products


def made(framework, linears, norm="LayerNorm"):
    """Return our module of these Linears with its initial parameters, ready to be called."""
    if framework == "linen":
        module = getattr(jln.linen, f"{norm}Dense")(linears)
        return module.bind(module.init(jax.random.key(0), jnp.ones((2, 8))))
    if framework == "nnx":
        return getattr(jln.nnx, f"{norm}Linear")(8, linears, rngs=nnx.Rngs(0))

    def apply(*arguments, **options):
        module = hk.without_apply_rng(
            hk.transform(lambda *a, **k: getattr(jln_haiku, f"{norm}Linear")(linears)(*a, **k))
        )
        return module.apply(module.init(jax.random.key(0), *arguments, **options), *arguments, **options)

    apply(jnp.ones((2, 8)))
    return apply


@pytest.mark.parametrize("framework", WITH_LINEARS)
def test_linears_that_cannot_be_made(framework):
    for linears in ({}, {3: 4}):
        with pytest.raises((TypeError, ValueError, IndexError, AttributeError)):
            made(framework, linears)(jnp.ones((2, 8)))


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_no_linear_takes_the_norms_name(framework):
    with pytest.raises((ValueError, NameInUseError)):
        made(framework, {"q": 3, "norm": 4})


@pytest.mark.parametrize("framework", WITH_LINEARS)
def test_a_mapping_of_one_gives_a_tuple_of_one(framework):
    (y,) = made(framework, {ONE[framework]: 3})(jnp.ones(8, "float32"))
    assert y.shape == (3,)


def test_linen_modules_of_another_order_are_others():
    """Modules with their Linears in another order are unequal, as JAX finds a compiled program by their equality."""
    x = normal(0, (4, 8), "float32")
    one, other = (jln.linen.LayerNormDense(dict(items)) for items in ([("q", 3), ("k", 5)], [("k", 5), ("q", 3)]))
    variables = one.init(jax.random.key(0), x)
    assert one != other
    assert one == jln.linen.LayerNormDense({"q": 3, "k": 5}) == one.clone()
    for module, sizes in ((one, [3, 5]), (other, [5, 3])):
        assert [y.shape[-1] for y in jax.jit(module.apply)(variables, x)] == sizes
        assert [
            y.shape[-1] for y in jax.jit(jln.linen.LayerNormDense.apply, static_argnums=0)(module, variables, x)
        ] == sizes


def block(layer, carry):
    (a, b), total = layer(carry[0], residual=carry[1])
    return jnp.sin(a) * b, total


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, carry, _):
        return block(jln.linen.RMSNormDense({"b": 8, "a": 8}), carry), None


def scanned(framework, carry):
    """Return the result of three layers in a scan, each under checkpoint, and the layers as functions of the carry."""
    if framework == "linen":
        stacked = linen.scan(
            linen.remat(LinenBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )()
        variables = stacked.init(jax.random.key(0), carry, None)
        each = [jax.tree.map(lambda a, i=i: a[i], variables) for i in range(3)]
        return stacked.apply(variables, carry, None)[0], [
            lambda c, v=v: LinenBlock().apply(v, c, None)[0] for v in each
        ]
    make = nnx.vmap(lambda rngs: jln.nnx.RMSNormLinear(8, {"b": 8, "a": 8}, rngs=rngs))
    stacked = make(nnx.Rngs(0).split(3))
    run = nnx.scan(lambda c, layer: nnx.remat(block)(layer, c), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    graphdef, state = nnx.split(stacked)
    each = [nnx.merge(graphdef, jax.tree.map(lambda a, i=i: a[i], state)) for i in range(3)]
    return run(carry, stacked), [functools.partial(block, layer) for layer in each]


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_stacked_layers_in_a_scan(framework):
    carry = normal(0, (4, 8), "float32"), normal(1, (4, 8), "float32")
    got, each = scanned(framework, carry)
    for layer in each:
        carry = layer(carry)
    # the tolerance for three layers in float32
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, carry)


@pytest.mark.parametrize("features", [{}, {"k": {"out_features": 16, "use_bias": False}}], ids=["none", "arguments"])
@pytest.mark.parametrize("framework", WITH_LINEARS)
def test_features_that_are_none_say_what_to_write(framework, features):
    def make():
        if framework == "nnx":
            return jln.nnx.LayerNormLinear(8, features, rngs=nnx.Rngs(0))
        if framework == "linen":
            return jln.linen.LayerNormDense(features).init(jax.random.key(0), jnp.zeros(SHAPE))
        return hk.transform(lambda x: jln_haiku.LayerNormLinear(features)(x)).init(None, jnp.zeros(SHAPE))

    with pytest.raises(ValueError, match=r"several a mapping; got \{.*jln.fuse\(loss, linears=True\)"):
        make()
