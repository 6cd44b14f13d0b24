"""Scopes, lines and warnings of a program that `jln.fuse` rewrites: what its author reads of it."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jln
from plain_norms import BLOCKS, EPS, EXAMPLES, PARAMETERS, block, head, model, rms
from proof import apart, normal

pytestmark = pytest.mark.usefixtures("promoted_ranks")
ARGUMENTS = PARAMETERS, EXAMPLES


def test_scopes_and_lines_of_the_author_stay():
    def loss(p, x):
        with jax.named_scope("encoder"):
            x = block(p["blocks"][0], x)
        with jax.named_scope("head"):
            return head(p, x)

    names = lambda f: jax.jit(f).lower(*ARGUMENTS).as_text(debug_info=True)  # noqa: E731
    plain, fused = names(loss), names(jln.fuse(loss))
    of_products = lambda text: set(re.findall(r'"[^"]*(?:encoder|head)[^"]*/dot_general"', text))  # noqa: E731
    assert of_products(plain) and of_products(fused) == of_products(plain)
    assert re.search(r"encoder[^\"]*layer_norm|encoder[^\"]*/", fused)
    program = jax.make_jaxpr(jln.fuse(loss))(*ARGUMENTS)
    products = [e for e in program.eqns if e.primitive.name == "dot_general"]
    assert len(products) == 5
    for equation in products:
        files = [frame.file_name for frame in equation.source_info.traceback.frames]
        theirs = [name for name in files if "site-packages" not in name]
        assert theirs[0].endswith("plain_norms.py"), theirs[:3]


def gradient(p, x):
    """The gradient of a model whose blocks are checkpoints."""
    return jax.grad(lambda p: model(p, x, block=jax.checkpoint(block)))(p)


def test_a_gradient_inside_is_right_and_said_to_be_useless():
    """Checkpoints stay: XLA is told what backward makes again, or it would make it once and keep it."""
    with pytest.warns(UserWarning, match="differentiates inside"):
        fused = jax.make_jaxpr(jln.fuse(gradient))(*ARGUMENTS)
    assert str(jax.make_jaxpr(gradient)(*ARGUMENTS)).count("differentiated=True") == BLOCKS
    assert str(fused).count("differentiated=True") == BLOCKS
    own = jax.jit(jax.extend.core.jaxpr_as_fun(fused))(*jax.tree.leaves(ARGUMENTS))
    assert apart(own, jax.tree.leaves(jax.jit(gradient)(*ARGUMENTS))) <= 1e-11


@pytest.mark.parametrize("function", [jln.fuse(model), lambda p, x: jnp.sum(jln.layer_norm(x, p["s"]))])
def test_a_function_with_operators_of_its_own_has_norms(function):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jln.fuse(function), *ARGUMENTS)


def across(x, s):
    """A norm over the third axis."""
    return x * lax.rsqrt(jnp.mean(x * x, 2, keepdims=True) + EPS) * s[0, :, None]


ALONE, WITH_SUM = ["jln.rms_norm: x, scale;"], ["jln.add_rms_norm: x, residual, scale;"]
LEFT = {
    "another axis": (lambda x, s, p: across(x, s) @ s, ["other axes"]),
    "a scale by position": (lambda x, s, p: rms(x, p) @ s, ["no kernel"]),
    "such a scale behind another norm": (lambda x, s, p: rms(x + rms(x, s[0]), p) @ s, ["jln.", "no kernel"]),
    "a gate by position": (lambda x, s, p: rms(jnp.cos(x) + p * x, s[0]) @ s, ALONE),
    "a gate of each row": (lambda x, s, p: rms(jnp.cos(x) + jnp.sin(x[..., :1]) * x, s[0]) @ s, WITH_SUM),
    "a mask": (lambda x, s, p: jnp.where(p > 0, rms(x, s[0]), 0) @ s, ["a selection by a value stands between"]),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_no_kernel_takes_is_left_and_says_so(name):
    """Each norm is listed, with the operator that runs in its place or the reason why none does."""
    function, expected = LEFT[name]
    args = normal(5, 8, 16, 16), normal(16, 16), normal(1, 8, 1, 16)
    routes = sorted(str(route) for route in jln.explain(jln.fuse(function), *args))
    assert len(routes) == len(expected)
    assert all(words in route for words, route in zip(expected, routes, strict=True)), routes
