"""Tests of what gated norms and sums with an x_bias and a gate hold, launch and write."""

import jax
import jax.numpy as jnp
import pytest

from jln._triton import target
from junctions import GATED, bound, made
from matrix import of_some

compiled_here = pytest.mark.skipif(not target.interpreting(), reason="kernels are compiled here")
ADDED = "add_layer_norm"
# The form, its gate, the wanted gradients, how many arrays of x's size are held, and how many of one number a row. A
# gate that is a number is held once for each of the H columns.
HELD = [
    (ADDED, "H", ("x",), 1, 2),
    (ADDED, "H", ("x", "residual", "scale", "offset", "x_bias"), 1, 2),
    (ADDED, "H", ("gate",), 2, 2),
    (ADDED, "H", ("x", "gate"), 2, 2),
    (ADDED, "a number", ("x", "residual", "x_bias"), 1, 2),
    (ADDED, "H", ("offset",), 0, 0),
    *((form, "no gate", some, 2, 1) for form in GATED for some in (("x",), ("z",), ("scale",), ("x", "z", "scale"))),
]


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(("form", "gate", "some", "rows", "numbers"), HELD)
def test_held_between_forward_and_backward(form, gate, some, rows, numbers, forward_mode, implementation):
    """The sum is kept, and x beside it only where a gate's gradient is wanted; of gated norms x and z are."""
    shape = (6, 8)
    given, options = made(form, gate=gate, shape=shape)
    function = bound(form, options, implementation=implementation, forward_mode=forward_mode)
    alone, operands = of_some(lambda *a: function(**dict(zip(given, a, strict=True))), given.values(), given, some)
    held = [a.shape for a in jax.tree.leaves(jax.vjp(alone, *operands)[1])]
    assert (held.count(shape), held.count((shape[0], 1))) == (rows, numbers)


BACKWARD, REDUCE = "backward_kernel", "reduce_kernel"
LAUNCHES = {
    "a gate": (ADDED, "H", None, (BACKWARD, "d.x", "d.residual", "shares"),
               (REDUCE, "d.scale", "d.offset", "d.x_bias", "d.gate")),
    "no gate": (ADDED, "no gate", None, (BACKWARD, "d.x", "shares"), (REDUCE, "d.scale", "d.offset", "d.x_bias")),
    "a number": (ADDED, "a number", ("x", "residual"), (BACKWARD, "d.x", "d.residual")),
    "residual alone": (ADDED, "H", ("residual",), (BACKWARD, "d.residual")),
    "gate alone": (ADDED, "H", ("gate",), (BACKWARD, "shares"), (REDUCE, "d.gate")),
    "the norm first": ("the norm first", "H", None, (BACKWARD, "d.x", "d.z", "shares"), (REDUCE, "d.scale")),
    "the norm first, z alone": ("the norm first", "H", ("z",), (BACKWARD, "d.z")),
    "the gate first": ("the gate first", "H", None, (BACKWARD, "d.x", "d.x_z", "shares"), (REDUCE, "d.scale")),
    "the gate first, z alone": ("the gate first", "H", ("z",), (BACKWARD, "d.x_z")),
    "the gate first, scale alone": ("the gate first", "H", ("scale",), (BACKWARD, "shares"), (REDUCE, "d.scale")),
    # dz alone needs no row sums, and so reads rows of several chunks once.
    "the norm first, z alone of wide rows": ("the norm first", "H", ("z",), (BACKWARD, "d.z")),
}  # fmt: skip


@compiled_here
@pytest.mark.parametrize("case", LAUNCHES)
def test_one_kernel_each_way_and_a_reduction(case):
    """Each pass is one kernel, and a reduction, whatever gradients are wanted; others have no place in memory."""
    form, gate, some, *expected = LAUNCHES[case]
    given, options = made(form, gate=gate, shape=(3, 70000) if "wide" in case else (400, 64), dtype="bfloat16")
    function = bound(form, options, implementation="triton")

    def step(arrays):
        def loss(wanted):
            return sum(jnp.sum(jnp.sin(a.astype("float32"))) for a in jax.tree.leaves(function(**arrays | wanted)))

        return jax.grad(loss)({n: arrays[n] for n in some or arrays})

    with target.recording() as launches:
        jax.jit(step).lower(given)
    forward, *backward = launches
    assert forward.kernel.fn.__name__ == "forward_kernel"
    assert [(run.kernel.fn.__name__, *run.results) for run in backward] == expected
