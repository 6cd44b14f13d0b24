"""`jln.fuse` of functions whose arguments are objects of Flax NNX, and what a call changes in them."""

import functools
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jln

pytestmark = pytest.mark.usefixtures("promoted_ranks")
H = 16
X = np.random.default_rng(0).normal(size=(4, 3, H)).astype("float32")


class Count(nnx.Variable):
    """A number of calls."""


class Model(nnx.Module):
    """A LayerNorm whose sum of statistics, number of calls and dropout change with a call."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm, self.behind = nnx.LayerNorm(H, rngs=rngs), nnx.LayerNorm(H, rngs=rngs)
        self.linear = nnx.Linear(H, H, rngs=rngs)
        self.statistics, self.dropout = nnx.BatchNorm(H, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.calls = Count(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        y = self.dropout(self.linear(self.norm(x)))
        return self.behind(self.statistics(x + y))


def loss(model, x):
    return jnp.mean(model(x) ** 2 * jnp.arange(H))


def assert_alike(a, b):
    """Compare what two objects hold."""
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    plain = [[jax.random.key_data(v) if is_key(v) else v for v in jax.tree.leaves(nnx.state(o))] for o in (a, b)]
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=2e-4, atol=2e-6), *plain)


@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_gradients_and_all_that_calls_change(jit):
    """Three steps leave value, gradients, counts, statistics and keys as they are without `fuse`."""
    results = []
    for function in (loss, jln.fuse(loss)):
        of, step = Model(), jit(nnx.value_and_grad(function))
        results.append(([step(of, X) for _ in range(3)], of))
    (wanted, untouched), (got, fused) = results
    for (value, gradients), (value_fused, gradients_fused) in zip(wanted, got, strict=True):
        np.testing.assert_allclose(value_fused, value, rtol=1e-5)
        assert_alike(gradients, gradients_fused)
    assert int(fused.calls[...]) == 3
    assert wanted[0][0] != wanted[1][0]  # by other keys of the dropout
    assert_alike(untouched, fused)
    routes = jln.explain(jln.fuse(loss), Model(), X)
    assert [r.layer for r in routes if r.path != "plain"] == ["jln.layer_norm", "jln.layer_norm"]


class Multiplied(nnx.Module):
    def __init__(self, factor):
        self.factor, self.w = factor, nnx.Param(jnp.ones(4))


@pytest.mark.filterwarnings("ignore:jln.fuse found no norm")
def test_an_eager_call_reads_an_attribute_that_was_changed():
    """Attributes are changed in place, and to a number that equals the one before."""
    fused = jln.fuse(lambda module: module.w[...] * module.factor.of)
    module = Multiplied(types.SimpleNamespace(of=0.0))
    for number in (0.0, -0.0, 5.0):
        module.factor.of = number
        assert repr(fused(module)) == repr(fused.__wrapped__(module))


def test_an_eager_call_keeps_nothing():
    """A program that is kept is some hundred objects."""
    fused, of = jln.fuse(loss), Model()

    def objects():
        fused(of, X)
        gc.collect()
        return len(gc.get_objects())

    objects(), objects()
    before = objects()
    for _ in range(4):
        after = objects()
    assert after - before < 100


def test_a_module_among_the_results_is_a_copy():
    made, y = jln.fuse(lambda m, x: (m, m.norm(x)))(of := Model(), X)
    assert_alike(made, of)
    np.testing.assert_allclose(y, of.norm(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("argument", [Model(), nnx.Rngs(0), nnx.metrics.Average()], ids=lambda a: type(a).__name__)
def test_objects_may_be_anywhere(argument):
    fused = jln.fuse(lambda a, x: (jax.nn.standardize(x), jax.tree.leaves(a)))
    got, wanted = fused({"of": argument}, X), fused.__wrapped__({"of": argument}, X)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert len(got[1]) == len(wanted[1])


@pytest.mark.parametrize("around", [jax.jit, jax.vmap, lambda f: lambda x: jax.lax.map(f, x), nnx.jit])
def test_a_module_of_another_trace_that_is_not_changed(around):
    """Flax lets nobody change one; a loss that changes none may read it, as without `fuse`."""
    module = nnx.LayerNorm(H, rngs=nnx.Rngs(0))
    fused = jln.fuse(lambda m, x: jnp.sum(m(x) ** 2))
    got, wanted = (around(functools.partial(f, module))(X) for f in (fused, fused.__wrapped__))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_a_module_of_another_trace_that_would_be_changed_is_not_lost():
    model = Model()
    with pytest.raises(Exception, match="trace level"):  # of Flax
        jax.jit(lambda x: jln.fuse(loss)(model, x))(X)
    assert np.isfinite(loss(model, X)) and int(model.calls[...]) == 1
