"""The catalogue and the workloads: they trace, and they count right."""

import dataclasses
import inspect

import jax
import pytest

import jln
from catalogue import EPSILON, OPERATORS
from jln import reference
from peers import PEERS
from workloads import CPU_WORKLOADS, WORKLOADS, Workload

ALL = WORKLOADS | CPU_WORKLOADS


def test_the_catalogue_lists_every_operator_with_its_arrays():
    assert set(OPERATORS) == {name for name in jln.__all__ if inspect.isfunction(getattr(reference, name, None))}
    types = ("Kernels", "Biases", "Gate")
    for operator in OPERATORS.values():
        for names, kind in ((operator.names, "positional"), (operator.extras, "keyword-only")):
            for function in (operator.function, operator.reference):
                given = inspect.signature(function).parameters.values()
                given = [p for p in given if p.kind.description.startswith(kind)]
                assert tuple(p.name for p in given if "jax.Array" in p.annotation or p.annotation in types) == names
    optional = {name: {a.name for a in o.arguments if a.optional} for name, o in OPERATORS.items()}
    assert optional["rms_norm_gated"] == {"scale"} and optional["layer_norm_linear"] == {"scale", "offset", "bias"}


def defaults(function):
    return inspect.signature(function).parameters["epsilon"].default


def test_every_signature_shows_the_one_default_epsilon():
    functions = {f for o in OPERATORS.values() for f in (o.function, o.reference)}
    assert {defaults(f) for f in functions} == {EPSILON}


def test_modules_of_our_own_show_it_too():
    """Modules of our own have the one default epsilon; those that stand for a framework's have the framework's."""
    pytest.importorskip("flax")
    from jln import linen, nnx

    fused = (linen.LayerNormDense, linen.RMSNormDense, nnx.LayerNormLinear, nnx.RMSNormLinear)
    assert {defaults(cls.__init__) for cls in fused} == {EPSILON}


def test_names_are_unique_and_reasons_are_given():
    assert len(ALL) == len(WORKLOADS) + len(CPU_WORKLOADS)
    assert all(w.why and w.name == name for name, w in ALL.items())
    assert {w.operator for w in ALL.values()} == set(OPERATORS)
    sizes = [dataclasses.replace(w, name="", why="") for w in ALL.values()]
    same = {str(w) for w in sizes if sizes.count(w) > 1}
    assert same == set()


@pytest.mark.parametrize("name", ALL)
def test_workloads_trace_and_return_what_they_say(name):
    w = ALL[name]
    for module in (jln, reference):
        f = w.function(module)
        results = jax.eval_shape(f, *w.arguments())
        assert results == w.entry.packed(w.cotangents())
        made = jax.eval_shape(w.step(f), *w.step_arguments())
        anothers = {"residual"} if "gate" not in w.extras and not w.entry.both_sides else set()
        gradients = [a for name, a in w.arrays().items() if name in w.entry.names and name not in anothers]
        assert made == ((results, gradients) if "backward" in w.directions else results)


def test_what_few_models_have_is_counted():
    """Bytes with `x_bias` and `gate`, which few models have, are those counted by hand.

    With a gate x and the residual have different gradients, and x and its bias are read again for the gate's gradient.
    """
    plain = Workload("", "add_layer_norm", (3, 7, 5), "", parameter_dtype="float32")
    x, parameter = 2 * 3 * 7 * 5, 4 * 5
    assert [plain.bytes_once(d) for d in plain.directions] == [4 * x + 2 * parameter, 4 * x + 3 * parameter]
    biased = dataclasses.replace(plain, extras=("x_bias",))
    bias = 2 * 5
    assert biased.bytes_once("forward") == plain.bytes_once("forward") + bias
    assert biased.bytes_once("backward") == plain.bytes_once("backward") + bias
    gated = dataclasses.replace(plain, extras=("x_bias", "gate"), of_examples=("scale", "offset", "gate"))
    own, gate = 3 * parameter, 3 * bias
    assert gated.bytes_once("forward") == 4 * x + bias + gate + 2 * own
    assert gated.bytes_once("backward") == (2 + 2 + 2) * x + 2 * bias + 2 * gate + 3 * own
    entry, ungated = gated.entry, plain.entry
    assert entry.title == "add_layer_norm, x_bias and gate" and ungated.title == "add_layer_norm"


def test_bytes_and_operations_are_counted():
    """Bytes and operations are those counted by hand, for sizes that are all different."""
    norm = Workload("", "add_layer_norm", (7, 5), "", dtype="bfloat16", parameter_dtype="float32")
    assert norm.bytes_once("forward") == 4 * 70 + 2 * 20  # x, residual, y, total; scale, offset
    assert norm.bytes_once("backward") == 4 * 70 + 3 * 20  # dy, dtotal, total, dx; scale, dscale, doffset
    assert norm.bytes_once() == 8 * 70 + 5 * 20
    linear = Workload("", "layer_norm_linear", (7, 5), "", features=3, dtype="bfloat16", parameter_dtype="bfloat16")
    assert linear.bytes_once("forward") == 2 * (35 + 5 + 5 + 15 + 3 + 21)
    assert linear.bytes_once("backward") == 2 * (21 + 35 + 5 + 5 + 15 + 35 + 5 + 5 + 15 + 3)  # of z scale and offset
    assert (linear.product_flops("forward"), linear.product_flops()) == (2 * 7 * 5 * 3, 3 * 2 * 7 * 5 * 3)
    linears = dataclasses.replace(linear, operator="add_layer_norm_linear", features=(3, 4), absent=("bias",))
    assert linears.bytes_once("forward") == 2 * (2 * 35 + 5 + 5 + 15 + 20 + 21 + 28 + 35)
    assert linears.bytes_once("backward") == 2 * (21 + 28 + 35 + 35 + 5 + 5 + 15 + 20 + 35 + 5 + 5 + 15 + 20)
    assert linears.product_flops() == 3 * 2 * 7 * 5 * (3 + 4)
    inference = dataclasses.replace(linear, directions=("forward",))
    assert inference.bytes_once() == inference.bytes_once("forward") == linear.bytes_once("forward")
    assert (norm.rows, norm.width) == (7, 5)
    first = WORKLOADS["alphafold-pair-axis-0"]
    assert (first.rows, first.width) == (384 * 384, 128)


@pytest.mark.parametrize("name", [name for name, w in WORKLOADS.items() if len(w.all_features) > 1])
def test_several_linears_hold_x_alone_between_forward_and_backward(name):
    """Several Linears hold x, the parameters and two numbers a row, or one for RMSNorm, between forward and backward.

    A norm and separate products hold the norm's result.
    """
    w = WORKLOADS[name]

    def held(function):
        return jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], *w.arguments()))

    def size(arrays):
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))

    arrays = w.arrays()
    parameters = [arrays[n] for n in ("x_scale", "scale", "offset", "kernel") if n in arrays]
    with jax.numpy_rank_promotion("allow"):  # for the bias behind the separate products
        ours, apart = (held(PEERS[by].function(w)) for by in ("jln", "jln-norm"))
    normalised = [arrays["x"]] * (2 if w.entry.both_sides else 1)  # x, and its sum with the residual
    statistics = (2 if w.entry.centres else 1) * 4 * w.rows
    assert size(ours) == size([normalised, parameters]) + len(normalised) * statistics
    large = [sum(a.shape == w.shape for a in leaves) for leaves in (ours, apart)]
    assert large == [len(normalised), len(normalised) + 1]
