"""Linen and Haiku models whose norms are swapped, with their code untouched, while a context is open."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from jln import convert
from parity import equations, normal

nn = pytest.importorskip("flax.linen")
hk = pytest.importorskip("haiku")

WIDTH, LAYERS = 16, 3

# The tolerance for two float32 programs that differ by the rounding of a dozen norms.
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


class LinenModel(nn.Module):
    """A Linen model with what might hinder a conversion: a lifted scan, remat, a norm used twice and a subclass."""

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                x = x + nn.Dense(WIDTH)(nn.LayerNorm()(x))
                return x + nn.Dense(WIDTH)(nn.RMSNorm(dtype=jnp.bfloat16)(x)), None

        class Mine(nn.LayerNorm):
            @nn.compact
            def __call__(self, x):
                return super().__call__(x) + 1

        layers = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, _ = layers(name="blocks")(x, None)
        norm = nn.LayerNorm(use_bias=False)
        return Mine()(norm(norm(x)))


def test_linen_context():
    x = normal(0, (2, 6, WIDTH), "float32")
    model = LinenModel()
    variables = model.init(jax.random.key(0), x)

    @jax.jit
    def step(variables):
        return jax.value_and_grad(lambda v: jnp.mean(jnp.sin(model.apply(v, x))))(variables)

    theirs = step(variables)
    with convert.linen() as routes:
        assert jax.tree.structure(model.init(jax.random.key(0), x)) == jax.tree.structure(variables)
        jax.tree.map(np.testing.assert_array_equal, model.init(jax.random.key(0), x), variables)
        own = step(variables)
        inside = equations(jax.make_jaxpr(step)(variables))
        seen = jln.explain(model, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-4), own, theirs)  # a norm is bfloat16
    assert {(r.layer, r.path) for r in routes} == {
        ("jln.linen.LayerNorm blocks/LayerNorm_0", "norm"),
        ("jln.linen.RMSNorm blocks/RMSNorm_0", "norm"),
        ("jln.linen.LayerNorm LayerNorm_0", "norm"),
        ("jln.linen.LayerNorm Mine_0", "norm"),
    }
    assert {(r.layer, r.path) for r in seen} == {(r.layer, r.path) for r in routes}
    within = "; in a jax.checkpoint that keeps nothing of it; in a loop of 3"
    assert {r.layer for r in seen if r.why.endswith(within)} == {r.layer for r in seen if "blocks/" in r.layer} != set()
    assert inside["jln_norm_backward"] == 5
    assert equations(jax.make_jaxpr(step)(variables))["jln_norm_backward"] == 0  # outside nothing is swapped
    jax.tree.map(np.testing.assert_array_equal, step(variables), theirs)


def test_linen_context_passes_every_call_through():
    x = normal(0, (4, 8), "float32")
    mask = x > 0
    norm = nn.LayerNorm()
    variables = norm.init(jax.random.key(0), x)
    expected = norm.apply(variables, x, mask=mask)
    with convert.linen() as routes:
        np.testing.assert_array_equal(norm.apply(variables, x, mask=mask), expected)
        with pytest.raises(TypeError):
            norm.apply(variables, x, 1, 2)
    assert [(r.path, r.why) for r in routes] == [("plain", "mask is given")]


def test_haiku_context():
    x = normal(0, (2, 6, WIDTH), "float32")

    class Mine(hk.LayerNorm):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Other(hk.LayerNorm):
        def __call__(self, x):
            return x

    def function(x):
        for _ in range(LAYERS):
            x = x + hk.Linear(WIDTH)(hk.LayerNorm(-1, True, True)(x))
            x = x + hk.Linear(WIDTH)(hk.RMSNorm(-1)(x))
        x = hk.LayerNorm(1, True, True, param_axis=-1)(x)
        x = Other(-1, True, True)(x)
        return Mine(-1, True, True)(hk.LayerNorm(-1, False, False)(x, jnp.float32(2) * jnp.ones(WIDTH, "float32")))

    model = hk.without_apply_rng(hk.transform(function))
    params = model.init(jax.random.key(0), x)

    @jax.jit
    def step(params):
        return jax.value_and_grad(lambda p: jnp.mean(jnp.sin(model.apply(p, x))))(params)

    theirs = step(params)
    with convert.haiku() as routes:
        jax.tree.map(np.testing.assert_array_equal, model.init(jax.random.key(0), x), params)
        own = step(params)
        inside = equations(jax.make_jaxpr(step)(params))
    jax.tree.map(close, own, theirs)
    assert inside["jln_norm_backward"] == 2 * LAYERS + 2
    paths = {r.layer: r.path for r in routes}
    assert paths.pop("jln.haiku.LayerNorm layer_norm_3") == "plain"
    assert paths.pop(f"{__name__}.test_haiku_context.<locals>.Other other") == "plain"
    assert set(paths.values()) == {"norm"}
    assert len(paths) == 2 * LAYERS + 2
    assert equations(jax.make_jaxpr(step)(params))["jln_norm_backward"] == 0


@pytest.mark.parametrize("create_scale", [True, False])
def test_haiku_context_refuses_what_haiku_refuses(create_scale):
    model = hk.transform(lambda x, scale: hk.RMSNorm(-1, create_scale=create_scale)(x, scale))
    for context in (contextlib.nullcontext(), convert.haiku()):
        with context, pytest.raises(TypeError):
            model.init(jax.random.key(0), jnp.ones((2, 8), "float32"), jnp.ones(8, "float32"))


@pytest.mark.parametrize(
    ("context", "module", "name"),
    [
        (convert.linen, nn.RMSNorm(name="twice"), "jln.linen.RMSNorm"),
        (convert.haiku, hk.transform(lambda x: hk.RMSNorm(-1, name="twice")(x)), "jln.haiku.RMSNorm twice"),
    ],
)
def test_a_second_context_reports_what_the_first_one_traced(context, module, name):
    """A context's `earlier` names the layers that an earlier context traced, as JAX does not trace a step again."""
    x = normal(0, (4, 8), "float32")
    params = module.init(jax.random.key(0), x)
    step = jax.jit(lambda params: module.apply(params, x, rngs=None) if context is convert.linen else
                   module.apply(params, None, x))  # fmt: skip
    with context() as first:
        step(params)
    with context() as second:
        step(params)
        (explained,) = jln.explain(step, params)
    assert [(r.layer, r.path) for r in first] == [(name, "norm")]
    assert first[0] not in first.earlier
    assert first[0] in second.earlier
    assert explained == first[0]
