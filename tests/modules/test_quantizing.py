"""Modules that quantise: results and gradients are the operators', in every framework."""

import functools
from typing import Any, NamedTuple

import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jln
import jln.equinox
import jln.haiku
import jln.linen
import jln.nnx
from parity import normal

H, N, EPSILON = 64, 32, 1e-5  # two blocks, and one
X, RESIDUAL = (normal(i, (3, 4, H), jnp.float32) for i in range(2))
ONES, ZEROS = jnp.ones(H, "float32"), jnp.zeros(H, "float32")
QUANTIZE = {"blocks": jln.MXFloat8(), "given scale": jln.Float8(0.03), "current scale": jln.Float8()}


class Made(NamedTuple):
    """A layer of a framework.

    call: from a kernel, of a Linear, and the arguments of a call to its result. kernel: the one that it has.
    around: what is around the call of a layer, and around the operator that it is compared with.
    """

    call: Any
    kernel: Any = None
    around: Any = staticmethod(lambda f: f)


def of_nnx(cls, *features, beside, **options):
    del beside
    layer = getattr(jln.nnx, cls)(H, *features, epsilon=EPSILON, **options, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    def call(kernel, *args, **kwargs):
        merged = nnx.merge(graph, state)
        if features:
            merged.linear.kernel = nnx.Param(kernel)
        return merged(*args, **kwargs)

    return Made(call, layer.linear.kernel[...] if features else None)


def of_linen(cls, *features, beside, **options):
    """A layer whose parameters a call that quantises has made."""
    layer = getattr(jln.linen, cls.replace("Linear", "Dense"))(*features, epsilon=EPSILON, **options)
    params = layer.init(jax.random.key(0), X, **beside)["params"]

    def call(kernel, *args, **kwargs):
        of_dense = {"dense": params["dense"] | {"kernel": kernel}} if features else {}
        return layer.apply({"params": params | of_dense}, *args, **kwargs)

    return Made(call, params["dense"]["kernel"] if features else None)


def of_haiku(cls, *features, beside, **options):
    """A layer whose parameters a call that quantises has made."""
    own = {} if features else {"axis": -1, "create_scale": True}
    own |= {"create_offset": True} if cls == "LayerNorm" else {}
    layer = hk.without_apply_rng(
        hk.transform(lambda *a, **k: getattr(jln.haiku, cls)(*features, **own, eps=EPSILON, **options)(*a, **k))
    )
    params = layer.init(jax.random.key(0), X, **beside)
    linear = next((n for n in params if n.endswith("/linear")), "")

    def call(kernel, *args, **kwargs):
        of_linear = {linear: params[linear] | {"w": kernel}} if features else {}
        return layer.apply(params | of_linear, *args, **kwargs)

    return Made(call, params[linear]["w"] if features else None)


def of_equinox(cls, *features, beside, **options):
    del beside
    options |= {"dtype": jnp.float32} | ({"key": jax.random.key(0), "use_bias": False} if features else {})
    layer = getattr(jln.equinox, cls)(H, *features, eps=EPSILON, **options)

    def call(kernel, x, **kwargs):
        changed = eqx.tree_at(lambda m: m.linear.weight, layer, kernel.T) if features else layer
        return changed(x, **kwargs)

    return Made(call, layer.linear.weight.T if features else None, lambda f: jax.vmap(jax.vmap(f)))


@pytest.fixture(params=[of_nnx, of_linen, of_haiku, of_equinox], ids=["nnx", "linen", "haiku", "equinox"])
def made(request):
    return request.param


@pytest.fixture(params=QUANTIZE)
def kind(request):
    return QUANTIZE[request.param]


def of_norm(cls, x, **options):
    norm = functools.partial(jln.layer_norm, offset=ZEROS) if cls == "LayerNorm" else jln.rms_norm
    return norm(x, scale=ONES, epsilon=EPSILON, **options)


@pytest.mark.parametrize("cls", ["LayerNorm", "RMSNorm"])
def test_norms(cls, kind, made):
    layer = made(cls, beside={"quantize": kind})
    got = layer.around(lambda x: layer.call(None, x, quantize=kind))(X)
    chex.assert_trees_all_equal(got, layer.around(lambda x: of_norm(cls, x, quantize=kind))(X))
    chex.assert_trees_all_equal(
        layer.around(lambda x: layer.call(None, x))(X), layer.around(lambda x: of_norm(cls, x))(X)
    )


def test_blocks_of_rows(made):
    """The axis of blocks is the operator's, too; a module that a vmap calls for each row has no blocks of them."""
    layer, along_rows = made("RMSNorm", beside={"quantize": jln.MXFloat8()}), jln.MXFloat8(axis=-2)
    x = normal(2, (2, 32, H), jnp.float32)
    if made is of_equinox:
        with pytest.raises(ValueError, match="every 32 rows"):
            layer.around(lambda x: layer.call(None, x, quantize=along_rows))(x)
        return
    got = layer.around(lambda x: layer.call(None, x, quantize=along_rows))(x)
    assert got.scale.shape == (2, 1, H)
    chex.assert_trees_all_equal(got, layer.around(lambda x: of_norm("RMSNorm", x, quantize=along_rows))(x))


def test_sums(kind, made):
    layer = made("LayerNorm", beside={"quantize": kind})

    def ours(x, residual):
        total = jln.add_layer_norm(x, residual, ONES, ZEROS, epsilon=EPSILON, quantize=kind)
        return total, jln.layer_norm_add(x, residual, ONES, ZEROS, epsilon=EPSILON, quantize=kind)

    def theirs(x, residual):
        total = layer.call(None, x, residual=residual, quantize=kind)
        return total, layer.call(None, x, added_to=residual, quantize=kind)

    chex.assert_trees_all_equal(*(layer.around(f)(X, RESIDUAL) for f in (theirs, ours)))


@pytest.mark.parametrize("where", ["constructor", "call"])
@pytest.mark.parametrize("cls", ["LayerNormLinear", "RMSNormLinear"])
def test_linears(cls, where, kind, made):
    """Results, the largest number of delayed scaling among them, and gradients are the fused operator's."""
    by_call = {"quantize": kind} if where == "call" else {}
    layer = made(cls, N, beside=by_call, **({} if by_call else {"quantize": kind}))
    operator = functools.partial(jln.layer_norm_linear, offset=ZEROS) if cls[0] == "L" else jln.rms_norm_linear

    def run(f):
        def loss(x, kernel):
            result = layer.around(lambda x: f(kernel, x))(x)
            y = result.y if isinstance(result, jln.Scaled) else result
            return jnp.sum(jnp.sin(y)), result

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(X, layer.kernel)

    got = run(lambda kernel, x: layer.call(kernel, x, **by_call))
    true = run(
        lambda k, x: operator(x, scale=ONES, kernel=k, bias=jnp.zeros(N, "float32"), epsilon=EPSILON, quantize=kind)
    )
    chex.assert_trees_all_close(got, true, rtol=1e-5, atol=1e-5)
    assert isinstance(got[0][1], jln.Scaled) == (kind == jln.Float8(0.03))


def test_a_call_says_otherwise(made):
    """The call's `quantize` wins, also where it is None; without either nothing is in eight bits."""
    quantised = made("RMSNormLinear", N, beside={}, quantize=jln.MXFloat8())
    plain = made("RMSNormLinear", N, beside={})

    def result(layer, **call):
        return layer.around(lambda x: layer.call(plain.kernel, x, **call))(X)

    chex.assert_trees_all_equal(result(quantised, quantize=None), result(plain))
    chex.assert_trees_all_equal(result(quantised), result(plain, quantize=jln.MXFloat8()))
    assert not jnp.array_equal(result(quantised), result(plain))


def test_norms_on_both_sides(kind):
    """One operator writes the sum, and its norm in eight bits; two where the norms' epsilons differ."""
    norm = functools.partial(jln.nnx.RMSNorm, H, rngs=nnx.Rngs(0))
    for epsilon in (EPSILON, 1e-3):
        got = norm(epsilon=epsilon)(X, residual=RESIDUAL, x_norm=norm(epsilon=EPSILON), quantize=kind)
        total = jln.rms_norm_add(X, RESIDUAL, ONES, epsilon=EPSILON)
        y = jln.rms_norm(total, ONES, epsilon=epsilon, quantize=kind)
        chex.assert_trees_all_close(got[1], total, rtol=1e-6, atol=1e-6)
        chex.assert_trees_all_close(got[0].dequantized(), y.dequantized(), rtol=2.0**-3, atol=1e-3)


def test_a_gated_norm(kind):
    got = jln.nnx.RMSNorm(H, epsilon=EPSILON, rngs=nnx.Rngs(0))(X, z=RESIDUAL, quantize=kind)
    chex.assert_trees_all_equal(got, jln.rms_norm_gated(X, RESIDUAL, ONES, epsilon=EPSILON, quantize=kind))


def test_several_linears():
    layer = jln.nnx.RMSNormLinear(H, {"q": 32, "k": 64}, quantize=jln.Float8(0.03), rngs=nnx.Rngs(0))
    (q, k), amax = layer(X)
    assert (q.shape, k.shape, amax.shape) == ((3, 4, 32), (3, 4, 64), ())
    ((q, _), _), total = layer(X, residual=RESIDUAL)
    chex.assert_trees_all_equal(total, X + RESIDUAL)


def test_what_the_frameworks_own_code_computes_is_refused():
    mask = jnp.ones(X.shape, bool)
    for layer in (
        jln.nnx.LayerNorm(H, rngs=nnx.Rngs(0)),
        jln.nnx.LayerNormLinear(H, N, quantize=jln.MXFloat8(), rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(ValueError, match="mask is given"):
            layer(X, mask=mask, quantize=jln.MXFloat8())
    with pytest.raises(TypeError, match=r"jln\.Float8"):
        jln.nnx.LayerNorm(H, rngs=nnx.Rngs(0))(X, quantize="mxfp8")
