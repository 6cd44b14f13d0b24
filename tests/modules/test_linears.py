"""A norm and the Linears behind it as one module, beside the framework's own layers one after the other."""

import functools

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.errors import NameInUseError

import jln
from frameworks import FRAMEWORKS, WITH_LINEARS, made_apart, made_together, parity, with_linears
from parity import SHAPE, every_equation, normal, noting, pairwise, randomised

QKV = {"q": 6, "k": 3, "v": 3}  # k and v, of one size, may be confused
COMMON = {
    "name": ["LayerNorm", "RMSNorm"],
    "x": ["float32", "bfloat16"],
    "residual": [None, "float32", "bfloat16"],
    "features": [16, QKV],
    "epsilon": [1e-6, 1e-2],
    "use_scale": [True, False],
    "use_offset": [True, False],
    "use_bias": [True, False],
    "precision": [None, jax.lax.Precision.HIGHEST],
}
FLAX = COMMON | {
    "features": [16, QKV, (2, 3), (5,), {"q": (2, 3), "k": 300}],
    "dtype": [None, "bfloat16", "float32"],
    "param_dtype": ["float32", "bfloat16"],
    "kernel_init": [nnx.initializers.lecun_normal(), nnx.initializers.normal(1.0)],
    "scale_init": [nnx.initializers.ones, nnx.initializers.normal(1.0)],
    "offset_init": [nnx.initializers.zeros, nnx.initializers.normal(1.0)],
    "bias_init": [nnx.initializers.zeros, nnx.initializers.normal(1.0)],
}
INITIALISERS = [None, hk.initializers.RandomNormal()]
HAIKU = COMMON | dict.fromkeys(("kernel_init", "scale_init", "offset_init", "bias_init"), INITIALISERS)
HAIKU["x"] = ["float32", "bfloat16", "float64"]


@pytest.mark.parametrize(("framework", "case"), pairwise({"linen": FLAX, "nnx": FLAX, "haiku": HAIKU}))
def test_values_and_every_gradient(framework, case):
    case = dict(case)
    x, residual = normal(1, SHAPE, case.pop("x")), case.pop("residual")
    x = x if residual is None else (x, normal(2, SHAPE, residual))
    path = parity(with_linears, framework, case, x)
    assert path in ("fused", "norm")
    if case.get("dtype") is None and case.get("param_dtype", "float32") == "float32":
        assert path == "fused"


@pytest.mark.parametrize("framework", WITH_LINEARS)
def test_where_one_operator_would_round_differently_all_are_called(framework):
    of_haiku = framework == "haiku"
    x, dtype = normal(1, SHAPE, "bfloat16" if of_haiku else "float32"), {} if of_haiku else {"dtype": "bfloat16"}
    theirs, ours = with_linears(framework, features=QKV, **dtype)
    variables = randomised(theirs.init(x))
    if of_haiku:  # Parameters of another dtype, as a checkpoint may hold them.
        variables["layer_norm_linear/k"] = jax.tree.map(lambda a: a.astype("float32"), variables["layer_norm_linear/k"])
    with noting() as routes:
        got = jax.jit(ours.apply)(variables, x)
    assert [route.path for route in routes] == ["plain", "norm"]
    product = "float32" if of_haiku else "bfloat16"
    assert routes[0].why.endswith(f"differently: x is {x.dtype}, the norm bfloat16, the product {product}")
    wanted = jax.jit(theirs.apply)(variables, x)
    assert [y.dtype for y in got] == [y.dtype for y in wanted] == ["bfloat16", product, "bfloat16"]
    chex.assert_trees_all_close(got, wanted, rtol=2e-2, atol=2e-2)  # products of 8 terms in bfloat16


@pytest.mark.parametrize("framework", WITH_LINEARS)
def test_precision_reaches_every_product(framework):
    """Forward and backward, which no number tells on a CPU."""
    x, highest = normal(0, SHAPE, "float32"), jax.lax.Precision.HIGHEST
    _, layer = with_linears(framework, precision=highest)
    jaxpr = jax.make_jaxpr(jax.grad(lambda variables: jnp.sum(layer.apply(variables, x))))(layer.init(x))
    operators = [e for e in every_equation(jaxpr) if e.primitive.name.startswith("jln_norm_linear")]
    products = [e for e in every_equation(jaxpr) if e.primitive.name == "dot_general"]
    assert (len(operators), len(products)) in ((2, 0), (0, 3))  # in one kernel each way, or in plain sight
    given = [e.params["request"].settings.precision for e in operators] + [e.params["precision"] for e in products]
    assert {p for precision in given for p in np.ravel(precision)} == {highest}


@pytest.mark.parametrize("framework", WITH_LINEARS)
def test_features_that_no_linear_has(framework):
    def call(features):
        layer = FRAMEWORKS[framework].layer(made_together(framework, "LayerNorm", features))
        return layer.apply(layer.init(jnp.ones(8)), jnp.ones(8))

    for features in ({}, {"k": {"out_features": 16, "use_bias": False}}):
        with pytest.raises(ValueError, match=r"several a mapping; got \{.*jln.fuse\(loss, linears=True\)"):
            call(features)
    with pytest.raises((TypeError, AttributeError)):
        call({3: 4})
    if framework != "haiku":  # whose Linears lie in a module, and its norm has another name
        with pytest.raises((ValueError, NameInUseError)):
            call({"q": 3, "norm": 4})
    (y,) = call({"q": 3})  # of a mapping a tuple
    assert y.shape == (3,)


def gated(pair, x):
    a, b = pair(x)
    return jnp.sin(a) * b


class Block(linen.Module):
    library: object
    pair: object

    @linen.compact
    def __call__(self, x, _):
        boxed = linen.with_partitioning(linen.initializers.ones, ("model",))
        return gated(self.pair(name="pair"), self.library.LayerNorm(scale_init=boxed)(x)), None


def stacked_linen(library, pair, x):
    layers = linen.scan(
        linen.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
        metadata_params={linen.PARTITION_NAME: "layers"},
    )(library, pair)  # fmt: skip
    variables = layers.init(jax.random.key(0), x, None)
    loss = jax.value_and_grad(lambda variables: jnp.sum(jnp.sin(layers.apply(variables, x, None)[0])))
    return variables, jax.jit(loss)(variables)


def stacked_nnx(library, pair, x):
    layers = nnx.vmap(lambda rngs: pair(rngs=rngs))(nnx.Rngs(0).split(3))
    run = nnx.scan(lambda pair, x: nnx.remat(gated)(pair, x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    loss = nnx.jit(nnx.value_and_grad(lambda layers: jnp.sum(jnp.sin(run(layers, x)))))
    return nnx.state(layers), loss(layers)


@pytest.mark.parametrize(("framework", "stacked"), [("linen", stacked_linen), ("nnx", stacked_nnx)])
def test_stacked_layers_in_a_scan(framework, stacked):
    """Three layers, each under checkpoint, with Linen's automatic names and its boxes of partitioned parameters."""
    of, x, features = FRAMEWORKS[framework], normal(0, (4, 8), "float32"), {"b": 8, "a": 8}
    boxed = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
    given = {"kernel_init": boxed} if framework == "linen" else {}
    variables, wanted = stacked(of.theirs, made_apart(framework, "RMSNorm", features, **given), x)
    own, got = stacked(of.ours, made_together(framework, "RMSNorm", features, **given), x)
    chex.assert_trees_all_equal(own, variables)
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-5)  # six norms in float32; sums of 4 rows


H, N = 64, 32  # two blocks, and one
WIDE_X, RESIDUAL = (normal(i, (3, 4, H), jnp.float32) for i in range(2))


@pytest.mark.parametrize(
    ("framework", "name", "kind"),
    [
        ("linen", "RMSNorm", jln.MXFloat8()),
        ("nnx", "LayerNorm", jln.Float8(0.03)),
        ("haiku", "LayerNorm", jln.Float8()),
        ("haiku", "RMSNorm", jln.Float8(0.03)),
    ],
    ids=lambda a: a if isinstance(a, str) else type(a).__name__,
)
def test_results_and_gradients_in_eight_bits_are_the_operators(framework, name, kind):
    """A call that quantises makes the parameters, too. A LayerNorm has a residual."""
    x = (WIDE_X, RESIDUAL) if name == "LayerNorm" else WIDE_X
    _, layer = with_linears(framework, name, N, size=H, epsilon=1e-5)
    variables = layer.init(x, quantize=kind)
    (kernel,) = [a for a in jax.tree.leaves(variables) if a.ndim == 2]
    ones, zeros, bias = jnp.ones(H, "float32"), jnp.zeros(H, "float32"), jnp.zeros(N, "float32")

    def operator(kernel, x, **given):
        if name == "LayerNorm":
            return jln.add_layer_norm_linear(*x, ones, zeros, kernel, bias, **given)
        return jln.rms_norm_linear(x, ones, kernel, bias, **given)

    def run(function, parameters):
        def loss(parameters, x):
            results = function(parameters, x, quantize=kind)
            y = results[0] if name == "LayerNorm" else results
            assert isinstance(y, jln.Scaled) == (kind == jln.Float8(0.03))
            return jnp.sum(jnp.sin(y.y if isinstance(y, jln.Scaled) else y)), results

        (_, results), (of_parameters, dx) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(parameters, x)
        (dkernel,) = [a for a in jax.tree.leaves(of_parameters) if a.ndim == 2]
        return results, dkernel, dx

    got, true = run(layer.apply, variables), run(functools.partial(operator, epsilon=1e-5), kernel)
    chex.assert_trees_all_close(got, true, rtol=1e-5, atol=1e-5)


def test_several_linears_in_eight_bits():
    layer, kind = jln.nnx.RMSNormLinear(H, {"q": 32, "k": 64}, rngs=nnx.Rngs(0)), jln.Float8(0.03)
    ((q, k), amax), total = jax.jit(lambda x, residual: layer(x, residual=residual, quantize=kind))(WIDE_X, RESIDUAL)
    assert (q.shape, k.shape, amax.shape) == ((3, 4, 32), (3, 4, 64), ())
    chex.assert_trees_all_equal(total, WIDE_X + RESIDUAL)


def test_eight_bits_of_what_the_frameworks_own_code_computes_are_refused():
    layer = jln.nnx.LayerNormLinear(H, N, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="would round differently"):
        layer(WIDE_X, quantize=jln.MXFloat8())
    with pytest.raises(TypeError, match=r"jln\.Float8"):
        layer(WIDE_X.astype(jnp.bfloat16), quantize="mxfp8")
