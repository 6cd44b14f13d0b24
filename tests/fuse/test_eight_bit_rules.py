"""Rules of functions that multiply in eight bits: those that differ from their function, and those that are not run."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.interpreters import partial_eval as pe
from jax.custom_derivatives import SymbolicZero

import jln
from eight_bit_products import (
    E4M3,
    E5M2,
    NUMBER,
    ROUNDING,
    S,
    V,
    W,
    X,
    by_current_scales,
    clipped,
    differences,
    everything,
    in_blocks,
    parted,
    quantised,
    read,
)
from plain_norms import rms

pytestmark = pytest.mark.usefixtures("promoted_ranks", "products_on_a_cpu")


def own_rule(primal, forward, backward):
    """A product of one's own, whose rule multiplies in another way than it does without a derivative."""

    @jax.custom_vjp
    def function(z, w):
        return primal(z, w)

    function.defvjp(forward, backward)
    return lambda x, s, w: function(rms(x, s), w)


def of_eight(z, w, factor, dtype=E4M3):
    return jnp.dot(read(clipped(z * factor, dtype)), w) / factor


def backward_of(factor):
    """The rule that reads the eight bits that forward has kept, by a factor."""
    return lambda kept, dy: (dy @ kept[1].T, jnp.einsum("...k,...n->kn", kept[0].astype(jnp.float32) / factor, dy))


RULES = {
    "another factor": own_rule(
        lambda z, w: of_eight(z, w, 32.0), lambda z, w: (of_eight(z, w, 8.0), (clipped(z * 8), w)), backward_of(8)
    ),
    "another factor kept": own_rule(
        lambda z, w: of_eight(z, w, 32.0), lambda z, w: (of_eight(z, w, 32.0), (clipped(z * 8), w)), backward_of(8)
    ),
    "another dtype kept": own_rule(
        lambda z, w: of_eight(z, w, 32.0),
        lambda z, w: (of_eight(z, w, 32.0), (clipped(z * 32, E5M2), w)),
        backward_of(32),
    ),
    "no eight bits": own_rule(lambda z, w: of_eight(z, w, 32.0), lambda z, w: (z @ w, (z, w)), backward_of(1)),
    "blocks": own_rule(
        lambda z, w: of_eight(z, w, 32.0),
        lambda z, w: (of_eight(z, w, 32.0), (read(*in_blocks(z)), w)),
        backward_of(1),
    ),
    "the same": own_rule(
        lambda z, w: of_eight(z, w, 32.0), lambda z, w: (of_eight(z, w, 32.0), (clipped(z * 32), w)), backward_of(32)
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_quantises_in_another_way(name):
    function = RULES[name]
    assert quantised(function, X, S, W) == (["rms_norm"], 0)
    assert differences(everything(function), everything(jln.fuse(function)), X, S, W) < ROUNDING


def test_a_result_that_is_no_float():
    @jax.custom_vjp
    def function(z, w):
        return of_eight(z, w, 32.0), jnp.argmax(w)

    function.defvjp(lambda z, w: (function(z, w), (z, w)), lambda kept, d: backward_of(1)(kept, d[0]))

    def product(x, s, w):
        return function(rms(x, s), w)[0]

    assert quantised(product, X, S, W) == (["rms_norm"], 0)
    assert differences(everything(product), everything(jln.fuse(product)), X, S, W) < ROUNDING


@jax.custom_vjp
def delayed(z, w, n):
    """A product whose scale has the next one for its cotangent, as Flax's have."""
    return jnp.dot(read(clipped(z / n)), w) * n


def _delayed_backward(kept, dy):
    z, w, n = kept
    return dy @ w.T, jnp.einsum("...k,...n->kn", z, dy), jnp.max(jnp.abs(z)) / 448 + 0 * n


delayed.defvjp(lambda z, w, n: (delayed(z, w, n), (z, w, n)), _delayed_backward)


NOT_ALL_READ = {
    "one of two stopped": lambda x, s, w, v, n: (lambda z: (delayed(z, w, n), lax.stop_gradient(delayed(z, v, n))))(
        rms(x, s)
    ),
    "one of two unused": lambda x, s, w, v, n: (lambda z: (delayed(z, w, n), delayed(z, v, n))[0])(rms(x, s)),
    "equations of its own unused": lambda x, s, w, v, n: (lambda z: (clipped(z / n), delayed(z, w, n))[1])(rms(x, s)),
    "equations of its own stopped": lambda x, s, w, v, n: (
        lambda z: (lax.stop_gradient(read(clipped(z / n))), delayed(z, w, n))
    )(rms(x, s)),
    "a maximum without eight bits' gradients": lambda x, s, w, v, n: (
        lambda z, m: (lax.stop_gradient(read(clipped(z * jnp.where(m == 0, 1.0, 448 / m)))), m)
    )(rms(x, 0 * s), jnp.max(jnp.abs(rms(x, 0 * s)))),
}


@pytest.mark.parametrize("name", NOT_ALL_READ)
def test_rules_of_what_is_not_differentiated(name):
    """JAX does not run them, and they may say anything."""
    args = X, S, W, V, NUMBER
    function = NOT_ALL_READ[name]
    assert differences(everything(function), everything(jln.fuse(function)), *args) < ROUNDING


def test_a_function_that_asks_for_symbolic_zeros_is_left_as_it_is():
    """A rule may read whether an operand or a result is differentiated."""

    @jax.custom_vjp
    def function(z, w, t):
        return of_eight(z, w, 32.0), 2 * t

    def backward(kept, cotangents):
        (z, w), (dy, dt) = kept, cotangents
        dt = jnp.float32(5) if isinstance(dt, SymbolicZero) else dt
        return dy @ w.T, jnp.einsum("...k,...n->kn", z, dy), 2 * dt

    def forward(z, w, t):
        return function(z.value, w.value, t.value), (z.value, w.value)

    function.defvjp(forward, backward, symbolic_zeros=True)
    program = lambda x, s, w, t: function(rms(x, s), w, t)[0]  # noqa: E731
    assert differences(everything(program), everything(jln.fuse(program)), X, S, W, NUMBER) < ROUNDING


@pytest.mark.parametrize("function", [delayed, by_current_scales], ids=["delayed", "current"])
def test_a_rule_that_calls_the_function_reads_the_eight_bits_of_the_kernel(function):
    """Nothing in forward, when it is differentiated, reads the norm's result but in eight bits."""

    def program(x, s, w):
        return function(rms(x, s), w, *([NUMBER] if function is delayed else []))

    traced = jax.make_jaxpr(lambda *args: jax.vjp(jln.fuse(program), *args)[0])(X, S, W)
    needed, _ = pe.dce_jaxpr(traced.jaxpr, [True])
    assert "custom_vjp_call" not in str(needed) and "f8_e4m3fn" in str(needed)


def test_an_argument_that_is_no_float():
    """An index among a function's operands has no cotangent."""

    @jax.custom_vjp
    def chosen(z, w, i):
        return jnp.dot(clipped(z * 16).astype(jnp.float32), w[i]) / 16

    chosen.defvjp(
        lambda z, w, i: (chosen(z, w, i), (z, w, i)),
        lambda kept, dy: (dy @ kept[1][kept[2]].T, jnp.zeros_like(kept[1]), None),
    )

    def function(x, s, w, i):
        return chosen(rms(x, s), jnp.stack([w, 2 * w]), i)

    fused = jln.fuse(function)
    assert quantised(function, X, S, W, 1) == (["rms_norm"], 0)
    both = [
        jax.jit(jax.grad(lambda x, s, w, i, f=f: jnp.sum(jnp.sin(f(x, s, w, i))), (0, 1, 2)))(X, S, W, jnp.int32(1))
        for f in (function, fused)
    ]
    assert max(parted(a, b) for a, b in zip(*both, strict=True)) < ROUNDING
