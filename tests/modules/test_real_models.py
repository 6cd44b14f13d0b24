"""The code blocks of `examples/real_models.md` run, and the functions that they hold to be the same are the same."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jln
from parity import noting

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
        def loss(x):
            y = f(x)
            return jnp.sum(jnp.sin(y)), y

        gradient, y = jax.jit(jax.grad(loss, has_aux=True))(X)
        return y, gradient

    for own, wanted in zip(numbers(after), numbers(before), strict=True):
        assert float(jnp.abs(wanted).max()) > 0.1
        np.testing.assert_allclose(own, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("title", [title for title, text in SECTIONS.items() if "```python" in text])
def test_the_code_runs_and_nothing_is_left_plain(title):
    compared = []

    def counted(*functions):
        compared.append(functions)
        same(*functions)

    names = {"jax": jax, "jnp": jnp, "jln": jln, "nn": nn, "x": X, "same": counted}
    with noting() as routes:
        for code in blocks(title):
            before = len(compared)
            exec(code, names)
            assert len(compared) > before
    assert not [str(route) for route in routes if route.path == "plain"]
