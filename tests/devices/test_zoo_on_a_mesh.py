"""GPT and Llama on a mesh, as they are and fused, compute what one device does, and gradients lie where they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jln

for _name in ("flax", "haiku", "equinox"):
    pytest.importorskip(_name)

from zoo import sharding  # noqa: E402
from zoo.models import MODELS, functional  # noqa: E402

pytestmark = pytest.mark.usefixtures("promoted_ranks")
if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)

SMALL = {"batch": 4, "tokens": 6, "width": 16, "heads": 4, "key_heads": 2, "head": 4, "hidden": 12, "attention": "xla"}
SMALL |= dict.fromkeys(("dtype", "norm_dtype", "param_dtype"), "float64")
FUSED = {"as it is": lambda f: f, "fused": jln.fuse, "with Linears": lambda f: jln.fuse(f, linears=True)}


def drawn(tree):
    r = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(0.5 * r.normal(size=a.shape), a.dtype), tree)


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("name", ["GPT", "Llama"])
def test_a_model_on_a_mesh_is_the_same_function(name, by_tokens):
    """A model on a mesh has the loss and the gradients of one device, and each gradient lies where its argument is.

    All is in float64 but JAX's softmax, so that values agree to 1e-6.
    """
    model = functional(MODELS[name], **SMALL)
    parameters, x = drawn((model.parameters, model.x))

    def step(function):
        return jax.value_and_grad(lambda *given: jnp.sum(jnp.sin(function(*given))), (0, 1))

    value, wanted = jax.jit(step(model.function))(parameters, x)
    mesh = jax.make_mesh((2, 2, 2), sharding.AXES, (AxisType.Auto,) * 3)
    places = sharding.shardings(parameters, mesh), NamedSharding(mesh, sharding.stream_spec(by_tokens))
    assert len({place.spec for place in jax.tree.leaves(places)}) >= 4
    given = jax.tree.map(jax.device_put, (parameters, x), places)
    for by, fuse in FUSED.items():
        with sharding.on(mesh, by_tokens):
            found, gradients = jax.jit(step(fuse(model.function)), out_shardings=(None, places))(*given)
        np.testing.assert_allclose(found, value, rtol=1e-6, err_msg=by)
        for a, b, at in zip(*map(jax.tree.leaves, (gradients, wanted, places)), strict=True):
            assert a.sharding.is_equivalent_to(at, a.ndim)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * (1 + jnp.abs(b).max()), err_msg=by)


def test_the_stream_is_where_the_rules_say():
    mesh = jax.make_mesh((2, 2, 2), sharding.AXES, (AxisType.Auto,) * 3)
    for by_tokens in (False, True):
        model = functional(MODELS["Llama"], **SMALL)  # another function, which JAX has not traced yet
        with sharding.on(mesh, by_tokens):
            program = str(jax.make_jaxpr(model.function)(model.parameters, model.x))
        found = f"spec={sharding.stream_spec(by_tokens)}".replace("PartitionSpec", "P")
        assert program.count(found) == 4
    assert "sharding_constraint" not in str(jax.make_jaxpr(model.function)(model.parameters, model.x))
