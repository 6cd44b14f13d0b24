"""`jln.fuse(linears=True)` where others read the norm's result too: its products make it again in backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jln
from proof import H, difference, normal, operators, parted

pytestmark = pytest.mark.usefixtures("promoted_ranks")
X, R, S, T, B = normal(2, 3, H), normal(2, 3, H), normal(H), normal(H) + 2, normal(H)
K, Q = normal(H, 4), normal(4, H)


def layer(x, s, b):
    d = x - jnp.mean(x, -1, keepdims=True)
    return d * lax.rsqrt(jnp.mean(d * d, -1, keepdims=True) + 1e-6) * s + b


def rms(x, s):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * s


def behind(y, product):
    return jnp.sum((y + jnp.tanh(product) @ Q) * R)


def a_sum_behind(x, s, b, k):
    y = layer(x, s, b)
    return behind(y, y @ k)


def a_sum_in_front_too(x, s, b, k):
    y = layer(jnp.sin(x) + R, s, b)
    return behind(y, y @ k)


def two_products(x, s, b, k):
    y = layer(x, s, b)
    return behind(y, jnp.tanh(y @ k) + jnp.einsum("fh,nrh->nrf", k.T, y, precision="highest"))


def norms_on_both_sides(x, s, b, k):
    y = rms(R + rms(jnp.sin(x), s), b)
    return behind(y, y @ k)


def a_product_of_a_copy(x, s, b, k):
    y = layer(x, s, b)
    return behind(y, (y.astype("bfloat16") @ k.astype("bfloat16")).astype(x.dtype))


@pytest.mark.parametrize(
    ("function", "finds"),
    [
        (a_sum_behind, "layer_norm"),
        (a_sum_in_front_too, "add_layer_norm"),
        (two_products, "layer_norm"),
        (norms_on_both_sides, "rms_norm_add_rms_norm"),
        (a_product_of_a_copy, "layer_norm"),
    ],
)
def test_a_result_that_others_read_is_not_kept_for_its_products(function, finds):
    args = X, S, T, K
    assert operators(function, *args, linears=True) == {finds: 1}
    assert kept(jln.fuse(function), *args) == {finds: True}
    assert kept(jln.fuse(function, linears=True), *args) == {finds: False}
    assert difference(function, *args, linears=True) <= (2e-2 if function is a_product_of_a_copy else 1e-12)
    (route,) = jln.explain(jln.fuse(function, linears=True), *args)
    assert "the Linears behind it keep what the norm read" in route.why


def kept(function, *args):
    """Return whether backward keeps the result of the norm, by the operator's name."""
    (route,) = jln.explain(function, *args)
    program = jax.make_jaxpr(lambda *args: jax.vjp(function, *args)[1])(*args).jaxpr
    (y,) = (e.outvars[0] for e in program.eqns if e.primitive.name.startswith("jln_") and "forward" in e.primitive.name)
    copies = {y}
    for e in program.eqns:
        if e.primitive.name in ("jln_batched_together", "convert_element_type"):
            copies |= {copy for v, copy in zip(e.invars, e.outvars, strict=True) if v in copies}
    return {route.layer.removeprefix("jln."): not copies.isdisjoint(program.outvars)}


def backward_needs_it_too(x, s, b, k):
    y = layer(x, s, b)
    return jnp.sum(jnp.sin(y) + jnp.tanh(y @ k) @ Q)


def a_kernel_made_of_it(x, s, b, k):
    y = layer(x, s, b)
    return behind(y, y @ (k * jnp.sum(y)))


def a_result_of_the_function(x, s, b, k):
    y = layer(x, s, b)
    return y, y @ k


def a_checkpoint(x, s, b, k):
    return jax.checkpoint(a_sum_behind)(x, s, b, k)


@pytest.mark.parametrize(
    "function", [backward_needs_it_too, a_kernel_made_of_it, a_result_of_the_function, a_checkpoint]
)
def test_a_result_that_is_there_all_the_same_is_not_made_again(function):
    fused = jln.fuse(function, linears=True)
    (route,) = jln.explain(fused, X, S, T, K)
    assert "keep what the norm read" not in route.why
    assert operators(function, X, S, T, K, linears=True) == {"layer_norm": 1}
    assert difference(function, X, S, T, K, linears=True) <= 1e-12


def test_a_fence_stands_in_front_of_what_backward_makes_again():
    """XLA could find without one that it is what forward has made, and keep that."""
    count = lambda **o: str(jax.make_jaxpr(jax.grad(jln.fuse(a_sum_behind, **o)))(X, S, T, K)).count("optimization_b")  # noqa: E731
    assert count(linears=True) == count() + 1


def test_second_derivatives_keep_it():
    """A function made for forward mode has no products that make their operand again, and all derivatives."""
    fused = jln.fuse(a_sum_behind, linears=True, forward_mode=True)

    def along(f):
        return jax.jvp(jax.grad(f), (X, S, T, K), (R, S, T, K))[1]

    assert parted(along(fused), along(a_sum_behind)) <= 1e-8  # of numbers of 1e-7


def test_under_vmap_and_in_a_scan():
    def loss(function):
        mapped = jax.vmap(function, (0, None, None, None))
        return lambda x: lax.scan(lambda c, x: (c + jnp.sum(mapped(x, S, T, K)), None), 0.0, jnp.stack([x, 2 * x]))[0]

    wanted, got = (
        jax.jit(jax.value_and_grad(loss(f)))(X) for f in (a_sum_behind, jln.fuse(a_sum_behind, linears=True))
    )
    assert max(parted(np.asarray(a), np.asarray(b)) for a, b in zip(got, wanted, strict=True)) <= 1e-11
