"""Models in the shape of those that people train, converted by one call each: the original's numbers in float64, its
parameters, and lines of `explain` that are true.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln

for _name in ("flax", "haiku", "equinox"):
    pytest.importorskip(_name)

from zoo import CLIENTS, SMALL, functions, held

pytestmark = pytest.mark.usefixtures("promoted_ranks")
each_client = pytest.mark.parametrize("name", CLIENTS)

# Of an array's largest element: sums of up to 24 products in float64, in two layers one behind the other.
TOLERANCE = 1e-12


@functools.cache
def of(name):
    return functions(CLIENTS[name], SMALL)


def drawn(tree):
    """Parameters of which none is at its initial value, so that a scale left out is seen."""
    r = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(0.3 * r.normal(size=a.shape), a.dtype), tree)


def same(own, wanted):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(own), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        difference, largest = np.abs(a - b).max(), np.abs(b).max()
        assert largest > 0, f"{path}: a gradient of zeros tells nothing"
        assert difference <= TOLERANCE * largest, f"{path}: {difference / largest:.1e}"


@each_client
def test_outputs_and_gradients_are_the_originals(name):
    client = of(name)
    parameters, x = drawn((client.parameters, client.x))
    weight = drawn(jax.eval_shape(client.plain, parameters, x))

    def gradients(f):
        def loss(parameters, x):
            y = f(parameters, x)
            return jnp.sum(weight * y), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(parameters, x)

    same(gradients(client.converted), gradients(client.plain))


@each_client
def test_a_converted_model_makes_and_reads_the_originals_parameters(name):
    client = of(name)

    def described(tree):
        return [(jax.tree_util.keystr(path), a.shape, a.dtype) for path, a in jax.tree.leaves_with_path(tree)]

    assert described(client.parameters) == described(client.converted_parameters)


def programs(jaxpr):
    """A program and all that are in it."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda a: hasattr(a, "eqns")):
            if hasattr(value, "eqns"):
                yield from programs(getattr(value, "jaxpr", value))


@each_client
def test_every_norm_and_every_linear_behind_one_is_found_and_explained(name):
    """As many lines as the program has operators."""
    client, model = of(name), CLIENTS[name]
    paths = [route.path for route in jln.explain(client.converted, client.parameters, client.x)]
    expected = {"norm": model.norms(SMALL.layers), "fused": model.fused(SMALL.layers), "plain": 0}
    assert {path: paths.count(path) for path in expected} == expected
    program = jax.make_jaxpr(client.converted)(client.parameters, client.x).jaxpr
    equations = [e for p in programs(program) for e in p.eqns]
    assert sum(e.primitive.name == "jln_norm_forward" for e in equations) == expected["norm"]
    operators = [e for e in equations if e.primitive.name == "custom_jvp_call" and e.params["name"] == "_value"]
    assert len(operators) == len(paths)


# Whose norm is read by nothing but Linears: 2 of width [B, T, H] less in a layer.
@pytest.mark.parametrize("name", ["GPT-2", "T5", "Llama, GQA and QK-norm", "Gemma 3", "Parallel block"])
def test_what_linears_read_is_not_kept(name):
    client = of(name)
    plain, converted = (held(f, client.parameters, client.x) for f in (client.plain, client.converted))
    assert converted < plain
