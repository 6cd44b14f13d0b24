"""The code blocks of `examples/real_models.md` run, and the functions that they hold to be the same are the same."""

import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from jln import _routes

nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")
hk = pytest.importorskip("haiku")

import jln.linen  # noqa: E402
import jln.nnx  # noqa: E402

PAGE = (pathlib.Path(__file__).parents[2] / "examples" / "real_models.md").read_text()
SECTIONS = {title: text for title, _, text in (s.partition("\n") for s in PAGE.split("\n## ")[1:])}
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), "float32")

pytestmark = pytest.mark.usefixtures("promoted_ranks")


@pytest.fixture(autouse=True)
def float32():
    """Switch x64 off, as it is for the page's readers."""
    with jax.enable_x64(False):
        yield


def blocks(title):
    return re.findall(r"```python\n(.*?)```", SECTIONS[title], re.DOTALL)


def same(before, after):
    """Assert that two functions of X have the same result and gradient, in float32 with sums of up to 32 terms."""

    def numbers(f):
        return jax.jit(f)(X), jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))))(X)

    for own, wanted in zip(numbers(after), numbers(before), strict=True):
        assert float(jnp.abs(wanted).max()) > 0.1
        np.testing.assert_allclose(own, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("title", [title for title in SECTIONS if title != "MaxText"])
def test_the_code_runs_and_nothing_is_left_plain(title):
    compared = []

    def counted(*functions):
        compared.append(functions)
        same(*functions)

    names = {"jax": jax, "jnp": jnp, "jln": jln, "nnx": nnx, "nn": nn, "hk": hk, "x": X, "same": counted}
    with _routes.noting() as routes:
        for code in blocks(title):
            before = len(compared)
            exec(code, names)
            assert len(compared) > before
    assert not [str(route) for route in routes if route.path == "plain"]


@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("with_scale", [True, False])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_lines_for_maxtext(zero_centered, with_scale, dtype):
    """The page's lines for MaxText compute RMSNorm from an object with that class's fields.

    With explicit sharding they return nothing, and leave the call to MaxText's own lines.
    """
    names = {"jnp": jnp, "jln": jln, "ShardMode": types.SimpleNamespace(EXPLICIT="explicit")}
    (code,) = blocks("MaxText")
    exec(code, names)
    scale = nnx.Param(jnp.linspace(-1, 1, 16)) if with_scale else None
    module = types.SimpleNamespace(
        shard_mode="auto",
        parameter_memory_host_offload=False,
        with_scale=with_scale,
        scale=scale,
        scale_offset=float(zero_centered),
        epsilon=1e-6,
        dtype=dtype,
    )
    y = names["__call__"](module, X)
    factor = (scale[...] if with_scale else 1.0) + (1.0 if with_scale and zero_centered else 0.0)
    wanted = X * jax.lax.rsqrt(jnp.mean(X**2, axis=-1, keepdims=True) + 1e-6) * factor
    assert y.dtype == (dtype or "float32")
    tolerance = 2**-8 if dtype else 1e-6
    np.testing.assert_allclose(np.asarray(y, "float32"), wanted, rtol=tolerance, atol=1e-6)
    module.shard_mode = "explicit"
    assert names["__call__"](module, X) is None
