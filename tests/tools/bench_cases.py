"""Small workloads, a wrong peer and a death, for the tests of the benchmark."""

import os

import jax

from peers import PEERS
from workloads import Workload

# Of each operator, and the forms that take another path: an axis that is not the last, inference.
SMALL = {
    w.name: w
    for w in (
        Workload("norm", "layer_norm", (6, 40), "small"),
        Workload("sum", "add_rms_norm", (2, 3, 40), "small"),
        Workload("linear", "layer_norm_linear", (6, 40), "small", features=8),
        Workload("no-bias", "rms_norm_linear", (6, 40), "small", features=8, absent=("bias",)),
        Workload("several", "layer_norm_linear", (6, 40), "small", features=(8, 4)),
        Workload("add", "add_rms_norm_linear", (6, 40), "small", features=(8, 4), absent=("bias",)),
        Workload("axis-0", "layer_norm", (40, 3, 2), "small", axis=0),
        Workload("inference", "rms_norm", (6, 40), "small", directions=("forward",)),
    )
}


def die(*_):
    os._exit(3)


def off_by(part, which=0):
    """A peer with one of its gradients off by a part."""

    def function(workload):
        right = PEERS["jnp"].function(workload)

        @jax.custom_vjp
        def f(*arguments):
            return right(*arguments)

        def backward(pullback, dy):
            gradients = list(pullback(dy))
            gradients[which] = gradients[which] * (1 + part)
            return tuple(gradients)

        f.defvjp(lambda *arguments: jax.vjp(right, *arguments), backward)
        return f

    return function
