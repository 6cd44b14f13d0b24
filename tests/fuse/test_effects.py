"""Effects of a program that `jln.fuse` rewrites: they keep their order and their number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import jln
from proof import normal, parted
from small_model import PARAMETERS, H, X, apart, block, head, norm

pytestmark = pytest.mark.usefixtures("promoted_ranks")


def _told(jitted):
    """The effects of a model in their order, fused and not: of prints that may go anywhere, and of ordered ones."""
    told = []

    def tell(what, a):
        told.append((what, round(float(a), 6)))
        return np.float64(len(told))

    def loss(p, x):
        for i, of in enumerate(p["blocks"]):
            # The number of calls until now: a call too many or in another place changes the loss.
            number = io_callback(
                functools.partial(tell, f"{i}"), jax.ShapeDtypeStruct((), np.float64), jnp.sum(x), ordered=True
            )
            jax.debug.callback(functools.partial(tell, f"debug {i}"), jnp.sum(x), ordered=True)
            scale = io_callback(
                functools.partial(tell, "s"), jax.ShapeDtypeStruct((), np.float64), number, ordered=True
            )
            x = block(of | {"s": of["s"] * scale * lax.stop_gradient(number)}, x)
            jax.debug.callback(functools.partial(tell, "behind"), jnp.max(x), ordered=True)
        return head(p, x)

    results = []
    for f in (loss, jln.fuse(loss)):
        told.clear()
        result = (jax.jit(f) if jitted else f)(PARAMETERS, X)
        jax.effects_barrier()
        results.append((float(result), list(told)))
    return results


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_effects_keep_their_order_and_number(jitted):
    (wanted, of_the_model), (got, of_the_fused) = _told(jitted)
    assert of_the_fused == of_the_model
    assert abs(got - wanted) <= 1e-11


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_effects_that_make_a_norms_scale_keep_their_order(jitted):
    """An operator reads its scale where the sum is made, which is in front of the scale's own effect."""
    told = []

    def tell(what, a):
        told.append(what)
        return np.asarray(a) + len(told)

    def ordered(what, a):
        return io_callback(functools.partial(tell, what), jax.ShapeDtypeStruct(a.shape, a.dtype), a, ordered=True)

    def loss(x, r, s, b):
        total = r + x
        first = ordered("first", jnp.sum(total))
        return norm(total, ordered("scale", s), b) * first + total

    results = []
    for f in (loss, jln.fuse(loss)):
        told.clear()
        made = (jax.jit(f) if jitted else f)(X, X + 1, normal(H), normal(H))
        jax.effects_barrier()
        results.append((list(told), np.asarray(made)))
    (wanted, a), (got, b) = results
    assert got == wanted == ["first", "scale"]
    assert parted(b, a) <= 1e-12


def test_references_are_read_and_written_in_order():
    def loss(x, r, s, b):
        ref = jax.new_ref(s)
        total = r + x
        ref[...] = ref[...] * jnp.max(total)
        y = norm(total, ref[...], b)
        ref[...] = jnp.zeros_like(s)
        lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(..., ref[...] + norm(total, s, b)[0, 0]), None)
        return jnp.sum(jnp.sin(y * ref[...] + total))

    args = (X, X + 1, normal(H), normal(H))
    assert apart(jax.jit(jln.fuse(loss))(*args), jax.jit(loss)(*args)) <= 1e-12
