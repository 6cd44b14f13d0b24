"""Modules with Linears that quantise: results and gradients are the operators', in every framework."""

import functools
from typing import Any, NamedTuple

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jln
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

    call: from a kernel, of its Linear, and the arguments of a call to its result. kernel: the one that it has.
    """

    call: Any
    kernel: Any


def of_nnx(cls, beside):
    del beside
    layer = getattr(jln.nnx, cls)(H, N, epsilon=EPSILON, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    def call(kernel, *args, **kwargs):
        merged = nnx.merge(graph, state)
        merged.linear.kernel = nnx.Param(kernel)
        return merged(*args, **kwargs)

    return Made(call, layer.linear.kernel[...])


def of_linen(cls, beside):
    """A layer whose parameters a call that quantises has made."""
    layer = getattr(jln.linen, cls.replace("Linear", "Dense"))(N, epsilon=EPSILON)
    params = layer.init(jax.random.key(0), X, **beside)["params"]

    def call(kernel, *args, **kwargs):
        return layer.apply({"params": params | {"dense": params["dense"] | {"kernel": kernel}}}, *args, **kwargs)

    return Made(call, params["dense"]["kernel"])


def of_haiku(cls, beside):
    """A layer whose parameters a call that quantises has made."""
    layer = hk.without_apply_rng(hk.transform(lambda *a, **k: getattr(jln.haiku, cls)(N, eps=EPSILON)(*a, **k)))
    params = layer.init(jax.random.key(0), X, **beside)
    linear = next(n for n in params if n.endswith("/linear"))

    def call(kernel, *args, **kwargs):
        return layer.apply(params | {linear: params[linear] | {"w": kernel}}, *args, **kwargs)

    return Made(call, params[linear]["w"])


@pytest.fixture(params=[of_nnx, of_linen, of_haiku], ids=["nnx", "linen", "haiku"])
def made(request):
    return request.param


@pytest.fixture(params=QUANTIZE)
def kind(request):
    return QUANTIZE[request.param]


def test_a_residual(kind, made):
    layer = made("LayerNormLinear", {"quantize": kind})
    got = layer.call(layer.kernel, X, residual=RESIDUAL, quantize=kind)
    parameters = ONES, ZEROS, layer.kernel, jnp.zeros(N, "float32")
    true = jln.add_layer_norm_linear(X, RESIDUAL, *parameters, epsilon=EPSILON, quantize=kind)
    chex.assert_trees_all_equal(got, true)


@pytest.mark.parametrize("cls", ["LayerNormLinear", "RMSNormLinear"])
def test_linears(cls, kind, made):
    """Results, the largest number of delayed scaling among them, and gradients are the fused operator's."""
    layer = made(cls, {"quantize": kind})
    operator = functools.partial(jln.layer_norm_linear, offset=ZEROS) if cls[0] == "L" else jln.rms_norm_linear

    def run(f):
        def loss(x, kernel):
            result = f(kernel, x)
            y = result.y if isinstance(result, jln.Scaled) else result
            return jnp.sum(jnp.sin(y)), result

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(X, layer.kernel)

    got = run(lambda kernel, x: layer.call(kernel, x, quantize=kind))
    true = run(
        lambda k, x: operator(x, scale=ONES, kernel=k, bias=jnp.zeros(N, "float32"), epsilon=EPSILON, quantize=kind)
    )
    chex.assert_trees_all_close(got, true, rtol=1e-5, atol=1e-5)
    assert isinstance(got[0][1], jln.Scaled) == (kind == jln.Float8(0.03))


def test_several_linears():
    layer, kind = jln.nnx.RMSNormLinear(H, {"q": 32, "k": 64}, rngs=nnx.Rngs(0)), jln.Float8(0.03)
    (q, k), amax = layer(X, quantize=kind)
    assert (q.shape, k.shape, amax.shape) == ((3, 4, 32), (3, 4, 64), ())
    ((q, _), _), total = layer(X, residual=RESIDUAL, quantize=kind)
    chex.assert_trees_all_equal(total, X + RESIDUAL)


def test_what_the_frameworks_own_code_computes_is_refused():
    layer = jln.nnx.LayerNormLinear(H, N, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="would round differently"):
        layer(X, quantize=jln.MXFloat8())
    with pytest.raises(TypeError, match=r"jln\.Float8"):
        layer(X.astype(jnp.bfloat16), quantize="mxfp8")
