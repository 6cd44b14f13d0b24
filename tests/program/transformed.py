"""Programs of this rung's tests of transformations: a norm's gradient, layers of one, its operands."""

import jax
import jax.numpy as jnp

from absent_gpu import struct, triton_kernels

M, H, N = 2048, 1024, 3072


def launches(report):
    """Return how often each Triton kernel of the program runs, in the order in which they first run."""
    return [k.times for k in triton_kernels(report)]


def gradient(f, n=3):
    return jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a).astype("float32"))), range(n))


def layers(body):
    def network(x, *stacked):
        return jax.lax.scan(lambda x, parameters: (body(jnp.sin(x), *parameters), None), x, stacked)[0]

    return network


def scale_and_offset(*lead):
    return struct(*lead, H, dtype="float32"), struct(*lead, H, dtype="float32")


over_x = (0, None, None)
