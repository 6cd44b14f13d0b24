"""Small workloads, a wrong peer and a death, for the tests of the benchmark."""

import os

import jax

from jln._tools import measure
from jln._tools.peers import PEERS
from jln._tools.workload import Block, Workload

SETTINGS = measure.Procedure(2)
# Of each operator, and the forms that take another path: an axis that is not the last, a block, inference.
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
        # With fewer rows the largest error of plain jnp, of which limits are made, is a matter of luck.
        Block("block", "block", (2, 16, 64), "small", heads=2),
        Block("apart", "block", (2, 16, 64), "small", heads=2, apart=True),
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
