"""The result of a norm that was fused: who wants its numbers hears why there are none, whatever asks for them."""

import copy
import math
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")

import jln  # noqa: E402
from jln import equinox as jln_equinox  # noqa: E402
from jln import nnx as jln_nnx  # noqa: E402

X = np.ones((4, 8), "float32")
W = jnp.ones((8, 3), "float32")


@pytest.fixture(params=["nnx", "equinox"])
def deferred(request):
    if request.param == "equinox":
        return jln_equinox.DeferredNorm()(jnp.asarray(X))
    return jln_nnx.DeferringLayerNorm(8, rngs=nnx.Rngs(0))(jnp.asarray(X))


BINARY = "add sub mul matmul truediv floordiv mod pow lshift rshift and_ xor or_ lt le gt ge eq ne"
OPERATORS = {
    f"{left} {name} {right}": (left, name, right)
    for name in BINARY.split()
    for left, right in (("z", "jax"), ("jax", "z"), ("numpy", "z"), ("2", "z"), ("z", "z"))
}


@pytest.mark.parametrize("case", OPERATORS)
def test_operators(case, deferred):
    left, name, right = OPERATORS[case]
    operands = {"z": deferred, "jax": jnp.asarray(X), "numpy": X, "2": 2}
    with pytest.raises(TypeError, match="is no array: only the Linear"):
        getattr(operator, name)(operands[left], operands[right])


DOORS = {
    **{
        f.__name__: f for f in (float, int, bool, complex, round, len, list, abs, hash, min, sum, math.floor, math.ceil)
    },
    "an index": lambda z: range(z),
    "a sign": lambda z: -z,
    "a condition": lambda z: 1 if z else 2,
    "a comparison of lists": lambda z: [z] == [jnp.asarray(X)],
    "unpacking": lambda z: [*z],
    "membership": lambda z: 1.0 in z,
    "an element": lambda z: z[0],
    "a slice": lambda z: z[..., :3],
    "an assignment": lambda z: operator.setitem(z, 0, 1.0),
    "in place": lambda z: operator.iadd(z, 1.0),
    "a method": lambda z: z.astype("bfloat16"),
    "an array's attribute": lambda z: z.T,
    "an attribute that no array has": lambda z: z.missing,
    "np.asarray": np.asarray,
    "np.sin": np.sin,
    "np.mean": np.mean,
    "np.stack": lambda z: np.stack([z, z]),
    "np.testing": lambda z: np.testing.assert_array_equal(z, X),
    "jnp.asarray": jnp.asarray,
    "jnp.sin": jnp.sin,
    "jnp.mean": jnp.mean,
    "jnp.concatenate": lambda z: jnp.concatenate([X, z]),
    "jnp.where": lambda z: jnp.where(X > 0, z, 0.0),
    "jnp.einsum": lambda z: jnp.einsum("bh,hn->bn", z, W),
    "jnp.reshape": lambda z: jnp.reshape(z, (-1,)),
    "jnp.take": lambda z: jnp.take(z, 0, 0),
    "at": lambda z: jnp.asarray(X).at[:].set(z),
    "jax.nn.gelu": jax.nn.gelu,
    "jax.jit": lambda z: jax.jit(lambda z: 2 * z)(z),
    "jax.checkpoint": lambda z: jax.checkpoint(lambda z: z.sum())(z),
    "jax.grad": lambda z: jax.grad(jnp.sum)(z),
    "jax.lax.cond": lambda z: jax.lax.cond(True, lambda z: z + 1, lambda z: z - 1, z),
    "after stop_gradient": lambda z: jax.lax.stop_gradient(z) + 1,
    "an NNX layer": lambda z: nnx.Linear(8, 3, rngs=nnx.Rngs(0))(z),
    "an NNX norm": lambda z: nnx.LayerNorm(8, rngs=nnx.Rngs(0))(z),
    "our NNX norm": lambda z: jln_nnx.RMSNorm(8, rngs=nnx.Rngs(0))(z),
    "NNX dropout": lambda z: nnx.Dropout(0.5, rngs=nnx.Rngs(0))(z),
    "NNX attention": lambda z: nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))(z),
    "an Equinox layer": lambda z: eqx.nn.Linear(8, 3, key=jax.random.key(0))(z),
    "Equinox dropout": lambda z: eqx.nn.Dropout(0.5)(z, key=jax.random.key(0)),
    "an operator": jln.layer_norm,
    "an operator's parameter": lambda z: jln.layer_norm(X, z),
    "a reference": jln.reference.layer_norm,
}


@pytest.mark.parametrize("door", DOORS)
def test_who_wants_its_numbers_hears_why_there_are_none(door, deferred):
    with pytest.raises(TypeError, match="is no array: only the Linear with which the norm was fused can read it"):
        DOORS[door](deferred)


@pytest.mark.parametrize("primitive", [jax.lax.sin, lambda z: jax.lax.dot(z, W)])
def test_of_a_primitive_jax_tells_what_it_was_given(primitive, deferred):
    """It asks no object, and says so itself; the cause shows the object."""
    with pytest.raises(TypeError, match="as a JAX value") as raised:
        primitive(deferred)
    assert "a norm left to the Linear with which it was fused" in str(raised.value.__cause__)


def test_what_asks_for_no_numbers_goes_on(deferred):
    """Frameworks look for attributes, copy, print, and take pytrees apart."""
    assert (deferred.shape, deferred.ndim, deferred.dtype) == ((4, 8), 2, jnp.float32)
    assert not hasattr(deferred, "sharding") and getattr(deferred, "weak_type", None) is None
    assert not hasattr(deferred, "__wrapped__")
    for other in (
        copy.copy(deferred),
        copy.deepcopy(deferred),
        pickle.loads(pickle.dumps(deferred)),
        jax.jit(lambda z: z)(deferred),
        jax.tree.map(lambda a: a, deferred),
    ):
        assert type(other) is type(deferred) and repr(other) == repr(deferred)
    assert repr(deferred) == "Deferred(float32[4, 8], a norm left to the Linear with which it was fused)"
