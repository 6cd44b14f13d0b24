"""Scopes, lines and warnings of a program that `jln.fuse` rewrites: what its author reads of it."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jln
from plain_norms import BLOCKS, EPS, EXAMPLES, PARAMETERS, S, W, X, block, head, layer, model, ms, rms
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


def test_scopes_around_an_inner_jit_stay():
    def loss(x):
        with jax.named_scope("outer"):
            return jax.jit(lambda x: jnp.sum(jnp.sin(layer(x))))(x)

    names = lambda f: set(re.findall(r'op_name="([^"]*/sin)"', jax.jit(f).lower(X).compile().as_text()))  # noqa: E731
    (name,) = names(loss)
    assert "outer/" in name
    assert names(jln.fuse(loss)) == {name}


@pytest.mark.filterwarnings("ignore:jln.fuse found no norm")
def test_near_misses_in_jaxs_own_functions_have_the_callers_line():
    routes = jln.explain(jln.fuse(lambda x: x / (jnp.std(x, -1, keepdims=True) + 1e-3) @ W), X)
    assert routes and all("test_remarks.py:" in r.why for r in routes)


def test_a_root_that_is_no_less_than_epsilon_is_said_to_be():
    with pytest.warns(UserWarning, match="found no norm"):
        (route,) = jln.explain(jln.fuse(lambda x: x / jnp.maximum(jnp.sqrt(ms(x)), EPS) @ W), X)
    assert route.path == "plain" and route.why.startswith("a maximum in the statistics")


def test_the_lines_of_explain_are_in_the_programs_order():
    loss = lambda p, x: head(p, rms(x) + 1.0)  # read by no product  # noqa: E731
    lines = [(r.layer, r.why) for r in jln.explain(jln.fuse(loss, linears=True), *ARGUMENTS)]
    assert [name for name, _ in lines] == ["norm of float64[4,4,16]", "jln.layer_norm_linear"]
    assert lines[1][1].startswith("x, scale, offset, kernel; ")  # and no bias


def gradient(p, x):
    """The gradient of a model whose blocks are checkpoints."""
    return jax.grad(lambda p: model(p, x, block=jax.checkpoint(block)))(p)


def test_a_gradient_inside_is_right_and_said_to_be_useless():
    """Its checkpoints stay: XLA is told what backward makes again, or it would make it once and keep it."""
    with pytest.warns(UserWarning, match="differentiates inside"):
        fused = jax.make_jaxpr(jln.fuse(gradient))(*ARGUMENTS)
    assert str(jax.make_jaxpr(gradient)(*ARGUMENTS)).count("differentiated=True") == BLOCKS
    assert str(fused).count("differentiated=True") == BLOCKS
    own = jax.jit(jax.extend.core.jaxpr_as_fun(fused))(*jax.tree.leaves(ARGUMENTS))
    assert apart(own, jax.tree.leaves(jax.jit(gradient)(*ARGUMENTS))) <= 1e-11


@pytest.mark.parametrize(
    "inside",
    [lambda p, x: lax.scan(lambda c, x: (c, gradient(p, x)), 0.0, x[None])[1], jax.jit(gradient, donate_argnums=1)],
)
def test_a_gradient_in_a_body_is_said_to_be_useless(inside):
    with pytest.warns(UserWarning, match="differentiates inside"):
        jax.eval_shape(jln.fuse(inside), *ARGUMENTS)


@pytest.mark.parametrize("function", [jln.fuse(model), lambda p, x: jnp.sum(jln.layer_norm(x, p["s"]))])
def test_a_function_with_operators_of_its_own_has_norms(function):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jln.fuse(function), *ARGUMENTS)


def across(x, s):
    """A norm over the third axis."""
    return x * lax.rsqrt(jnp.mean(x * x, 2, keepdims=True) + EPS) * s[0, :, None]


ALONE, WITH_SUM = ["jln.rms_norm: norm (x, scale;"], ["jln.add_rms_norm: norm (x, residual, scale;"]
LEFT = {
    "another axis": (lambda x, s, p: across(x, s) @ s, ["other axes"]),
    "a scale by position": (lambda x, s, p: rms(x, p) @ s, ["no kernel"]),
    "such a scale behind another norm": (lambda x, s, p: rms(x + rms(x, s[0]), p) @ s, ["jln.", "no kernel"]),
    "such a scale in front of another norm": (lambda x, s, p: rms(x + rms(x, p), s[0]) @ s, ["jln.", "no kernel"]),
    "a gate by position": (lambda x, s, p: rms(jnp.cos(x) + p * x, s[0]) @ s, ALONE),
    "such a gate, and rows in one axis": (lambda x, s, p: rms((jnp.cos(x) + p * x).reshape(-1, 16), s[0]) @ s, ALONE),
    "a gate of each row": (lambda x, s, p: rms(jnp.cos(x) + jnp.sin(x[..., :1]) * x, s[0]) @ s, WITH_SUM),
    "a gate of each place": (lambda x, s, p: rms(jnp.cos(x) + p[..., :1] * x, s[0]) @ s, WITH_SUM),
    "a mask": (lambda x, s, p: jnp.where(p > 0, rms(x, s[0]), 0) @ s, ["select_n stands between"]),
    "an activation": (lambda x, s, p: jnp.tanh(rms(x, s[0])) @ s, ["tanh stands between"]),
    "another axis in a sum": (lambda x, s, p: rms(x + across(x, s), s[0]) @ s, ["jln.add", "other axes"]),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_no_kernel_takes_is_left_and_says_so(name):
    """Each norm is listed, with the operator that runs in its place or the reason why none does."""
    function, expected = LEFT[name]
    args = normal(5, 8, 16, 16), normal(16, 16), normal(1, 8, 1, 16)
    routes = sorted(str(route) for route in jln.explain(jln.fuse(function), *args))
    assert len(routes) == len(expected)
    assert all(words in route for words, route in zip(expected, routes, strict=True)), routes


def test_a_norm_that_is_left_in_a_loop_is_listed():
    function = lambda x, s: lax.fori_loop(0, 2, lambda i, c: jnp.sin(rms(c, s)), x)  # noqa: E731
    (route,) = jln.explain(jln.fuse(function), X, S)
    assert route.path == "plain" and route.why.endswith("in a loop of 2")
