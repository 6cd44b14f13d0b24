"""Tests of what sums with x's bias and a gate, and parameters of each example, cost: held, launched and written."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jln
from jln._triton import target
from jln._triton.chip import CHIPS
from junctions import made
from matrix import of_some

# The gate, the wanted gradients, how many arrays of x's size are held, and how many of one number a row. A gate that is
# a number is held once for each of the H columns.
HELD = [
    ("H", ("x",), 1, 2),
    ("H", ("residual",), 1, 2),
    ("H", ("x", "residual", "scale", "offset", "x_bias"), 1, 2),
    ("H", ("gate",), 2, 2),
    ("H", ("x", "gate"), 2, 2),
    ("no gate", ("x", "x_bias"), 1, 2),
    ("a number", ("x", "residual", "x_bias"), 1, 2),
    ("H", ("offset",), 0, 0),
]


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(("gate", "some", "rows", "numbers"), HELD)
def test_held_between_forward_and_backward(gate, some, rows, numbers, forward_mode, implementation):
    """The sum is kept, and x beside it only where a gate's gradient is wanted."""
    shape = (6, 8)
    given, options = made("add_layer_norm", gate=gate, shape=shape)
    function = functools.partial(
        jln.add_layer_norm, implementation=implementation, forward_mode=forward_mode, **options
    )
    alone, operands = of_some(lambda *a: function(**dict(zip(given, a, strict=True))), given.values(), given, some)
    held = [a.shape for a in jax.tree.leaves(jax.vjp(alone, *operands)[1])]
    assert (held.count(shape), held.count((shape[0], 1))) == (rows, numbers)


def launched(step, *operands):
    """Return the kernels that a program launches, each with the names of the results that it writes."""
    with target.recording() as launches:
        jax.jit(step).lower(*operands)
    return [(run.kernel.fn.__name__, *run.results) for run in launches]


BACKWARD, REDUCE = "backward_kernel", "reduce_kernel"
LAUNCHES = [
    ("H", None, (BACKWARD, "d.x", "d.residual", "shares"), (REDUCE, "d.scale", "d.offset", "d.x_bias", "d.gate")),
    ("no gate", None, (BACKWARD, "d.x", "shares"), (REDUCE, "d.scale", "d.offset", "d.x_bias")),
    ("a number", ("x", "residual"), (BACKWARD, "d.x", "d.residual")),
    ("H", ("residual",), (BACKWARD, "d.residual")),
    ("H", ("gate",), (BACKWARD, "shares"), (REDUCE, "d.gate")),
]


@pytest.mark.parametrize(("gate", "some", "expected"), [(g, s, e) for g, s, *e in LAUNCHES])
def test_one_kernel_each_way_and_a_reduction(gate, some, expected):
    """Each pass is one kernel, and a reduction, whatever gradients are wanted; others have no place in memory."""
    if not target.interpreting():
        pytest.skip("kernels are compiled here")
    given, options = made("add_layer_norm", gate=gate, shape=(400, 64), dtype="bfloat16")
    function = functools.partial(jln.add_layer_norm, implementation="triton", **options)
    some = some or tuple(given)

    def step(arrays):
        def loss(wanted):
            y, total = function(**arrays | wanted)
            return jnp.sum(jnp.sin(y.astype("float32"))) + jnp.sum(jnp.sin(total.astype("float32")))

        return jax.grad(loss)({n: arrays[n] for n in some})

    (forward, *_), *backward = launched(step, given)
    assert forward == "forward_kernel" and backward == expected


def test_parameters_of_each_example_cost_no_copy_for_each_row():
    """Parameters of each example take at most six times the scale's size more temporary memory than shared ones.

    That is room for them and their gradients, some of them twice.
    """

    def temporary(gate, varies):
        given, _ = made("add_layer_norm", gate=gate, varies=varies, shape=(64, 64, 256), dtype="float32")

        def step(arrays, weight):
            return jax.grad(lambda a: sum(jnp.vdot(weight, r) for r in jln.add_layer_norm(**a)))(arrays)

        compiled = jax.jit(step).lower(given, given["x"]).compile()
        return given, compiled.memory_analysis().temp_size_in_bytes

    given, of_examples = temporary("by example", "by example")
    _, shared = temporary("H", "shared")
    assert of_examples <= shared + 6 * given["scale"].nbytes < shared + given["x"].nbytes / 10


def test_gradients_of_many_examples_need_no_buffer_of_the_size_of_x():
    """The programs' shares of 256 examples of 256 rows take at most an eighth of x's size.

    There are few shares to an example, or none.
    """
    if not target.interpreting():
        pytest.skip("kernels are compiled here")
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
