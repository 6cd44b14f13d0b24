"""RMSNorm with a gate z in every framework: its parameters are RMSNorm's, its numbers those of `jln.reference`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench

X, Z = (workbench.normal(i, (4, 6, 16), "float32") for i in range(2))
SCALE = workbench.normal(2, (16,), "float32", 1.0)


def linen(x, scale, of_gate, **options):
    import jln.linen

    return jln.linen.RMSNorm(epsilon=1e-5, **options).apply({"params": {"scale": scale}}, x, **of_gate)


def nnx(x, scale, of_gate):
    from flax import nnx

    import jln.nnx

    layer = jln.nnx.RMSNorm(16, epsilon=1e-5, rngs=nnx.Rngs(0))
    layer.scale[...] = scale
    return layer(x, **of_gate)


def haiku(x, scale, of_gate):
    import haiku as hk

    import jln.haiku

    f = hk.without_apply_rng(hk.transform(lambda x: jln.haiku.RMSNorm(-1, 1e-5, name="norm")(x, **of_gate)))
    return f.apply({"norm": {"scale": scale}}, x)


def equinox(x, scale, of_gate, use_bias=False):
    import equinox as eqx

    import jln.equinox

    layer = eqx.tree_at(lambda a: a.weight, jln.equinox.RMSNorm(16, 1e-5, use_bias=use_bias), scale)
    z = of_gate.get("z")
    rest = {n: a for n, a in of_gate.items() if n != "z"}
    return jax.vmap(jax.vmap(lambda x, z: layer(x, z=z, **rest)))(x, z)


FRAMEWORKS = {f.__name__: f for f in (linen, nnx, haiku, equinox)}
PACKAGES = {"linen": "flax", "nnx": "flax", "haiku": "haiku", "equinox": "equinox"}


@pytest.mark.usefixtures("promoted_ranks")
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_values_and_gradients(framework, norm_before_gate):
    pytest.importorskip(PACKAGES[framework])

    def module(x, z, scale):
        return FRAMEWORKS[framework](x, scale, {"z": z, "norm_before_gate": norm_before_gate})

    reference = functools.partial(jln.reference.rms_norm_gated, epsilon=1e-5, norm_before_gate=norm_before_gate)
    (y, pullback), (expected, expected_pullback) = (jax.vjp(f, X, Z, SCALE) for f in (module, reference))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    for got, true in zip(pullback(X), expected_pullback(X), strict=True):
        np.testing.assert_allclose(got, true, rtol=1e-4, atol=1e-4)
    (route,) = jln.explain(module, X, Z, SCALE)
    assert route.path == "norm"


@pytest.mark.usefixtures("promoted_ranks")
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_what_the_operator_cannot_do_the_framework_does(norm_before_gate):
    """The framework's own norm runs for Flax's mask or Equinox's offset, with the gate computed beside it."""
    pytest.importorskip("flax")
    pytest.importorskip("equinox")
    of_gate = {"z": Z, "norm_before_gate": norm_before_gate}
    expected = jln.reference.rms_norm_gated(X, Z, SCALE, epsilon=1e-5, norm_before_gate=norm_before_gate)
    mask = jnp.ones(X.shape, bool)
    for function in (
        lambda: linen(X, SCALE, of_gate | {"mask": mask}),
        lambda: equinox(X, SCALE, of_gate, use_bias=True),
    ):
        np.testing.assert_allclose(function(), expected, rtol=1e-5, atol=1e-5)
        assert {route.path for route in jln.explain(function)} == {"plain"}


@pytest.mark.usefixtures("promoted_ranks")
def test_wrong_arguments_are_named():
    pytest.importorskip("flax")
    cases = [
        (ValueError, r"z must have shape \(4, 6, 16\), that of x", {"z": Z[0]}),
        (ValueError, "z goes without residual", {"z": Z, "residual": X}),
        (ValueError, "norm_before_gate=False needs a z", {"norm_before_gate": False}),
        (TypeError, "norm_before_gate must be a static bool", {"z": Z, "norm_before_gate": 1}),
    ]
    for error, message, of_gate in cases:
        with pytest.raises(error, match=message):
            linen(X, SCALE, of_gate)
