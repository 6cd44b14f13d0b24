"""The catalogue and the workloads: they trace, and they count right."""

import dataclasses
import inspect

import jax
import pytest

import jln
from catalogue import EPSILON, OPERATORS
from workloads import CPU_WORKLOADS, WORKLOADS, Workload

ALL = WORKLOADS | CPU_WORKLOADS


def test_the_catalogue_lists_every_operator_with_its_arrays():
    types = ("Kernels", "Biases", "Gate")
    for operator in OPERATORS.values():
        for function in (operator.function, operator.reference):
            given = inspect.signature(function).parameters
            arrays = [name for name, p in given.items() if "jax.Array" in p.annotation or p.annotation in types]
            assert (*arrays,) == (*operator.names, *operator.extras) and given["epsilon"].default == EPSILON


KINDS = {(w.operator, w.extras, w.of_examples, len(w.all_features), w.directions): n for n, w in ALL.items()}


@pytest.mark.parametrize("name", KINDS.values())
def test_workloads_trace_and_return_what_they_say(name):
    w = ALL[name]
    f = w.function(jln)
    results = jax.eval_shape(f, *w.arguments())
    assert results == w.entry.packed(w.cotangents())
    made = jax.eval_shape(w.step(f), *w.step_arguments())
    anothers = {"residual"} if "gate" not in w.extras and not w.entry.both_sides else set()
    gradients = [a for name, a in w.arrays().items() if name in w.entry.names and name not in anothers]
    assert made == ((results, gradients) if "backward" in w.directions else results)


def test_bytes_and_operations_are_counted():
    """Bytes and operations are those counted by hand, for sizes that are all different."""
    norm = Workload("", "add_layer_norm", (7, 5), "", dtype="bfloat16", parameter_dtype="float32")
    assert norm.bytes_once("forward") == 4 * 70 + 2 * 20  # x, residual, y, total; scale, offset
    assert norm.bytes_once("backward") == 4 * 70 + 3 * 20  # dy, dtotal, total, dx; scale, dscale, doffset
    assert norm.bytes_once() == 8 * 70 + 5 * 20
    # With a gate x and the residual have different gradients, and x and its bias are read again for the gate's.
    gated = dataclasses.replace(norm, extras=("x_bias", "gate"), of_examples=("scale", "offset", "gate"))
    own, gate = 7 * 20, 7 * 10
    assert gated.bytes_once("forward") == 4 * 70 + 10 + gate + 2 * own
    assert gated.bytes_once("backward") == (2 + 2 + 2) * 70 + 2 * 10 + 2 * gate + 3 * own
    linear = Workload("", "layer_norm_linear", (7, 5), "", features=3, dtype="bfloat16", parameter_dtype="bfloat16")
    assert linear.bytes_once("forward") == 2 * (35 + 5 + 5 + 15 + 3 + 21)
    assert linear.bytes_once("backward") == 2 * (21 + 35 + 5 + 5 + 15 + 35 + 5 + 5 + 15 + 3)  # of z scale and offset
    assert (linear.product_flops("forward"), linear.product_flops()) == (2 * 7 * 5 * 3, 3 * 2 * 7 * 5 * 3)
