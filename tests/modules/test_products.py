"""Linears behind a norm: any product of the last axis, in any dtype, sharded and mapped in any way."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from jln import convert
from parity import normal

nnx = pytest.importorskip("flax.nnx")

H, WIDE = 8, 300  # 300 features are too many for one kernel
SHAPE = (3, 5, H)

# The tolerance for two float64 programs of a norm and products of 8 and 300 terms.
close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"axis": 0}, "not over the last axis alone"),
        ({"batch_axis": {0: 8}}, "not over the last axis alone"),
        ({"dot_general": jax.lax.dot_general}, "a product or an element type of its own"),
        ({"preferred_element_type": jnp.float64}, "a product or an element type of its own"),
        ({"promote_dtype": lambda arrays, dtype=None: arrays}, "its own promote_dtype"),
    ],
)
def test_a_linear_that_is_more_than_a_product_of_the_last_axis_is_the_frameworks(options, why):
    """A Linear over other axes, or with a product, element type or promotion of its own, runs the framework's code.

    Every one of these Linears fits x, as x is square.
    """
    x = normal(0, (8, 8), "float64")
    of = {"param_dtype": "float64", "rngs": nnx.Rngs(0)}
    model = nnx.Sequential(nnx.LayerNorm(8, **of), nnx.LinearGeneral(8, 3, **options, **of))
    y = model(x)
    convert.nnx(model, fuse=True)
    close(model(x), y)
    route = jln.explain(model, x)[1]
    assert route.path == "plain" and why in route.why


@pytest.mark.parametrize(
    ("equation", "shape", "found"),
    [
        ("btd,dnh->btnh", (H, 2, 3), True),
        ("btd,ndh->btnh", (2, H, 3), True),
        ("...d,cdh->c...h", (2, H, 3), True),
        ("btd,dh->tbh", (H, 3), True),
        ("btd,th->bth", (5, 3), False),
        ("btd,bdh->bth", (3, H, 3), False),
        ("btd,dh->bt", (H, 3), False),
        ("btd,dh->bh", (H, 3), False),
        ("bth,hb->bt", (H, 3), False),
    ],
)
def test_einsums(equation, shape, found):
    x = normal(0, SHAPE, "float64")
    of = {"param_dtype": "float64", "rngs": nnx.Rngs(0)}
    model = nnx.Sequential(nnx.RMSNorm(H, **of), nnx.Einsum(equation, shape, **of))
    y = model(x)
    convert.nnx(model, fuse=True)
    close(model(x), y)
    assert jln.explain(model, x)[1].path == ("fused" if found else "plain")


def test_a_sharding_asked_for_is_given():
    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((2,), ("m",), axis_types=explicit, devices=jax.devices()[:2])):
        by_features = jax.sharding.PartitionSpec(None, None, "m")
        of = {"param_dtype": "float64", "rngs": nnx.Rngs(0)}
        norm, linear = nnx.LayerNorm(H, **of), nnx.Linear(H, 4, **of)
        x = jnp.asarray(np.asarray(normal(0, SHAPE, "float64")))
        wanted, silent = linear(norm(x), out_sharding=by_features), linear(norm(x))
        model = nnx.List([norm, linear])
        convert.nnx(nnx.Sequential(*model), fuse=True)
        own = linear(norm(x), out_sharding=by_features)
        close(own, wanted)
        assert jax.typeof(own) == jax.typeof(wanted)
        close(linear(norm(x)), silent)
        assert jax.typeof(linear(norm(x))) == jax.typeof(silent)


@pytest.mark.parametrize("norm_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
def test_a_product_in_another_dtype_than_the_norms(norm_dtype, dtype):
    """The norm's result z is rounded as the framework rounds it, also where the backward pass makes it again."""
    x = normal(0, (64, H), "bfloat16")
    rngs = nnx.Rngs(0)
    norm, linear = nnx.LayerNorm(H, dtype=norm_dtype, rngs=rngs), nnx.Linear(H, WIDE, dtype=dtype, rngs=rngs)
    model = nnx.Sequential(norm, linear)

    @nnx.grad
    def gradient(model):
        return jnp.sum(jnp.sin(model(x).astype("float32")))

    wanted = nnx.to_pure_dict(gradient(model))
    convert.nnx(model, fuse=True)
    assert [r.path for r in jln.explain(model, x)] == ["norm", "fused"]
    own = nnx.to_pure_dict(gradient(model))
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(wanted), strict=True):
        scale = float(jnp.abs(b).max())  # bfloat16 rounds a term by 2**-8 of it, and sums have 64 and 300 terms
        np.testing.assert_allclose(np.asarray(a, "float64"), np.asarray(b, "float64"), rtol=0.05, atol=0.02 * scale)


@pytest.mark.parametrize("wide", [3, WIDE])
def test_the_result_of_what_has_been_donated_since_is_a_result_still(wide):
    model = nnx.Sequential(nnx.LayerNorm(H, rngs=nnx.Rngs(0)), nnx.Linear(H, wide, rngs=nnx.Rngs(0)))
    x = normal(0, SHAPE, "float32")
    expected = model(x)
    norm, linear = convert.nnx(model, fuse=True).model.layers
    z = norm(x)
    x.delete()
    np.testing.assert_allclose(linear(z), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wide", [3, WIDE])
def test_a_result_is_the_result_of_what_was_read_however_either_is_mapped(wide):
    """A fused Linear has the framework's results and gradients however it and its norm are mapped.

    The norm is mapped, its parameters are, both over several axes, or the Linear alone. One norm is that of a sum.
    """
    of = {"param_dtype": "float64", "rngs": nnx.Rngs(0)}
    theirs = nnx.Sequential(nnx.LayerNorm(H, **of), nnx.Linear(H, wide, **of))
    ours = convert.nnx(theirs, copy=True, fuse=True).model
    x = normal(0, (H, H, H), "float64")

    def results(model, of_linear):
        norm, linear = model.layers[0], nnx.merge(nnx.graphdef(model.layers[1]), of_linear)
        graph, parameters = nnx.split(norm)
        several = jax.tree.map(lambda a: jnp.stack([a + i for i in range(H)]), parameters)
        of_each = jax.vmap(lambda parameters, x: nnx.merge(graph, parameters)(x))
        yield jax.vmap(linear)(of_each(several, x))
        yield jax.vmap(linear)(norm(x))
        yield linear(jax.vmap(norm)(x))
        yield linear(norm(x, residual=x * x)[0] if model is ours else norm(x + x * x))
        for axes in itertools.product((0, 1), repeat=4):
            yield jax.vmap(linear, *axes[:2])(jax.vmap(norm, *axes[2:])(x))
        yield jax.vmap(jax.vmap(linear), 1)(jax.vmap(jax.vmap(norm))(x))
        yield jax.vmap(jax.vmap(linear, spmd_axis_name="i"))(jax.vmap(jax.vmap(norm), spmd_axis_name="j")(x))

    def total(of_linear, model):
        return sum(jnp.sum(jnp.sin(y)) for y in results(model, of_linear))

    of_linear = nnx.state(theirs.layers[1])
    wanted, gradients = jax.jit(lambda p: (list(results(theirs, p)), jax.grad(total)(p, theirs)))(of_linear)
    for ours_y, theirs_y in zip(results(ours, of_linear), wanted, strict=True):
        close(ours_y, theirs_y)
    jax.tree.map(close, jax.jit(lambda p: jax.grad(total)(p, ours))(of_linear), gradients)
