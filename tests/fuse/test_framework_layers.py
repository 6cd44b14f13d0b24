"""Frameworks' own norms: each is found, and nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plain_norms import X
from proof import H, difference, operators

pytestmark = pytest.mark.usefixtures("promoted_ranks")


# Each function makes a framework's layer: a function of its parameters and x, and the parameters.


def _linen(cls, **options):
    import flax.linen as nn

    norm = getattr(nn, cls)(**options)
    return lambda p, x: norm.apply(p, x), jax.device_get(norm.init(jax.random.key(0), jnp.asarray(X)))


def _nnx(cls, **options):
    from flax import nnx

    graph, state = nnx.split(getattr(nnx, cls)(H, rngs=nnx.Rngs(0), **options))
    return lambda p, x: nnx.merge(graph, p)(x), state


def _haiku(cls, **options):
    import haiku as hk

    norm = hk.without_apply_rng(hk.transform(lambda x: getattr(hk, cls)(**options)(x)))
    return norm.apply, norm.init(jax.random.key(0), X)


def _equinox(cls, **options):
    import equinox as eqx

    norm = getattr(eqx.nn, cls)(H, **options)
    arrays, rest = eqx.partition(norm, eqx.is_array)
    return lambda p, x: jax.vmap(jax.vmap(eqx.combine(p, rest)))(x), arrays


FRAMEWORKS = {
    "linen LayerNorm": (_linen, "LayerNorm", {}),
    "linen LayerNorm, slow variance": (_linen, "LayerNorm", {"use_fast_variance": False}),
    "linen LayerNorm without parameters": (_linen, "LayerNorm", {"use_scale": False, "use_bias": False}),
    "linen RMSNorm": (_linen, "RMSNorm", {}),
    "linen RMSNorm, slow variance": (_linen, "RMSNorm", {"use_fast_variance": False}),
    "nnx LayerNorm": (_nnx, "LayerNorm", {}),
    "nnx LayerNorm, slow variance": (_nnx, "LayerNorm", {"use_fast_variance": False}),
    "nnx RMSNorm": (_nnx, "RMSNorm", {}),
    "haiku LayerNorm": (_haiku, "LayerNorm", {"axis": -1, "create_scale": True, "create_offset": True}),
    "haiku RMSNorm": (_haiku, "RMSNorm", {"axis": -1}),
    "equinox LayerNorm": (_equinox, "LayerNorm", {}),
    "equinox RMSNorm": (_equinox, "RMSNorm", {}),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_frameworks_layer_is_found(name):
    of, cls, options = FRAMEWORKS[name]
    function, parameters = of(cls, **options)
    # A dtype of its own: frameworks compute in float32 what comes as less, in float64 what comes as that.
    parameters = jax.tree.map(lambda a: np.asarray(a, np.float64), parameters)
    expected = {"layer_norm" if "Layer" in cls else "rms_norm": 1}
    # equinox's LayerNorm differs by the parameters' float32, nothing else.
    assert operators(function, parameters, X) == expected
    assert difference(function, parameters, X) <= 1e-12
