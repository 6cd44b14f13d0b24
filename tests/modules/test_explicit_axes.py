"""The modules in a `jax.shard_map` that leaves mesh axes explicit give what the frameworks' own layers give."""

import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln.equinox
import jln.haiku
import jln.linen
import jln.nnx
from matrix import mesh
from parity import Layer, normal

ROWS, H = 8, 16  # rows that a mesh of 4x2 divides

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)


def of_nnx(make):
    def merged(state, x):
        return nnx.merge(nnx.graphdef(make()), state)(x)

    return Layer(lambda x: nnx.state(make()), merged)


def of_linen(module):
    return Layer(lambda x: module.init(jax.random.key(0), x), module.apply)


def of_haiku(make):
    made = hk.without_apply_rng(hk.transform(lambda x: make()(x)))
    return Layer(lambda x: made.init(jax.random.key(0), x), made.apply)


def of_equinox(layer):
    arrays, rest = eqx.partition(layer, eqx.is_array)
    return Layer(lambda x: arrays, lambda variables, x: jax.vmap(eqx.combine(variables, rest))(x))


# The framework's own layer, and ours.
LAYERS = {
    "nnx.LayerNorm": [of_nnx(lambda m=m: m.LayerNorm(H, rngs=nnx.Rngs(0))) for m in (nnx, jln.nnx)],
    "nnx.RMSNorm": [of_nnx(lambda m=m: m.RMSNorm(H, rngs=nnx.Rngs(0))) for m in (nnx, jln.nnx)],
    "linen.RMSNorm": [of_linen(m.RMSNorm()) for m in (linen, jln.linen)],
    "haiku.LayerNorm": [of_haiku(lambda m=m: m.LayerNorm(-1, True, True)) for m in (hk, jln.haiku)],
    "equinox.LayerNorm": [of_equinox(m.LayerNorm(H)) for m in (eqx.nn, jln.equinox)],
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("closed_over", [False, True], ids=["variables passed", "variables closed over"])
def test_a_shard_map_that_leaves_axes_explicit(promoted_ranks, name, compiled, closed_over):
    """A layer is the framework's own there, its variables an argument or, where no mesh has them, closed over."""
    on, x = mesh(AxisType.Explicit), normal(0, (ROWS, H), "float64")

    def found(layer):
        variables = jax.tree.map(lambda a: a.astype("float64"), layer.init(x))

        def loss(variables, x):
            def inside(x, *variables_passed):
                return layer.apply(*(variables_passed or (variables,)), x)

            passed = () if closed_over else (variables,)
            in_specs = (P("data"), *(P() for _ in passed))
            y = jax.shard_map(inside, in_specs=in_specs, out_specs=P("data"), axis_names={"data"})(x, *passed)
            return jnp.sum(jnp.sin(y)), y

        with jax.set_mesh(on):
            gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
            split = jax.device_put(x, NamedSharding(on, P("data")))
            return (jax.jit(gradient) if compiled else gradient)(variables, split)

    theirs, ours = (jax.tree.leaves(found(layer)) for layer in LAYERS[name])
    chex.assert_trees_all_close(ours, theirs, rtol=1e-10, atol=1e-10)
