"""Tests of what gated norms, sums with an x_bias and a gate, and parameters of each example hold, launch and write."""

import jax
import jax.numpy as jnp
import pytest

import jln
from jln._triton import target
from jln._triton.chip import CHIPS
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
}  # fmt: skip


def backward_launches(form, gate, some, shape, dtype):
    """The kernels that a gradient launches behind the forward kernel, each with the results that it writes."""
    given, options = made(form, gate=gate, shape=shape, dtype=dtype)
    function = bound(form, options, implementation="triton")

    def step(arrays):
        def loss(wanted):
            return sum(jnp.sum(jnp.sin(a.astype("float32"))) for a in jax.tree.leaves(function(**arrays | wanted)))

        return jax.grad(loss)({n: arrays[n] for n in some or arrays})

    with target.recording() as launches:
        jax.jit(step).lower(given)
    forward, *backward = launches
    assert forward.kernel.fn.__name__ == "forward_kernel"
    return [(run.kernel.fn.__name__, *run.results) for run in backward]


@compiled_here
@pytest.mark.parametrize("case", LAUNCHES)
def test_one_kernel_each_way_and_a_reduction(case):
    """Each pass is one kernel, and a reduction, whatever gradients are wanted; others have no place in memory."""
    form, gate, some, *expected = LAUNCHES[case]
    assert backward_launches(form, gate, some, (400, 64), "bfloat16") == expected


@compiled_here
def test_dz_alone_needs_no_row_sums():
    """The backward pass for dz alone reads rows of several chunks once, where the norm goes first."""
    assert backward_launches("the norm first", "H", ("z",), (3, 70000), "float32") == [(BACKWARD, "d.z")]


def test_parameters_of_each_example_cost_no_copy_for_each_row():
    """Parameters of each example take at most six times the scale's size more temporary memory than shared ones.

    That is room for them and their gradients, some of them twice.
    """

    def temporary(gate, varies):
        given, _ = made(ADDED, gate=gate, varies=varies, shape=(64, 64, 256), dtype="float32")

        def step(arrays, weight):
            return jax.grad(lambda a: sum(jnp.vdot(weight, r) for r in jln.add_layer_norm(**a)))(arrays)

        compiled = jax.jit(step).lower(given, given["x"]).compile()
        return given, compiled.memory_analysis().temp_size_in_bytes

    given, of_examples = temporary("by example", "by example")
    _, shared = temporary("H", "shared")
    assert of_examples <= shared + 6 * given["scale"].nbytes < shared + given["x"].nbytes / 10


@compiled_here
def test_gradients_of_many_examples_need_no_buffer_of_the_size_of_x():
    """The programs' shares of 256 examples of 256 rows take at most an eighth of x's size.

    There are few shares to an example, or none.
    """
    shapes = {"x": (256, 256, 1024), "residual": (256, 256, 1024)}
    shapes |= dict.fromkeys(("scale", "offset", "gate"), (256, 1, 1024))
    given = {n: jax.ShapeDtypeStruct(s, "bfloat16") for n, s in shapes.items()}

    def step(arrays, dy):
        _, pullback = jax.vjp(lambda a: jln.add_layer_norm(**a, implementation="triton"), arrays)
        return pullback((dy, dy))

    with target.using(recorder := target.Recorder(CHIPS["h200"])):
        jax.jit(step).lower(given, given["x"])
    buffers = [run.results.get("shares") for run in recorder.launches]
    bytes_of_shares = sum(a.size * a.dtype.itemsize for a in buffers if a is not None)
    assert bytes_of_shares <= given["x"].size * 2 / 8
