"""Tests: kernels that the compiled step of each norm launches on an H200, and bytes that it moves; -s prints them."""

import dataclasses
import functools

import jax
import pytest

import jln
import program
from absent_gpu import H, M, assert_no_more, both_ways, gradient, launches, some_gradients, struct, with_gradients
from workloads import WORKLOADS

# Our kernels, XLA's, MB moved and MB temporary. Each array is moved once; the rest are statistics and shares of the
# parameters' gradients. From 8192 elements on a pass of row sums may read x and dy once more. What is changed of a
# workload is in front.
BF16, RMS = {"parameter_dtype": "bfloat16"}, {"operator": "add_rms_norm", "of_examples": ("scale", "gate")}
STEPS = [
    (BF16, "layer-norm-4096", (3, 0, 344, 4)),
    ({}, "layer-norm-8192", (3, 0, 353, 8)),
    ({}, "layer-norm-16384", (4, 0, 479, 4)),
    (BF16, "add-layer-norm-4096", (3, 0, 545, 4)),
    ({}, "add-layer-norm-16384", (4, 0, 680, 4)),
    ({}, "gpt2-xl", (3, 0, 144, 7)),
    ({}, "gpt2-small-float32", (3, 0, 258, 3)),
    ({}, "llama-8192-add", (3, 0, 545, 4)),
    ({}, "qk-norm-128", (3, 0, 338, 1)),
    ({}, "alphafold-pair", (3, 0, 192, 2)),
    ({}, "post-rms-norm", (3, 0, 407, 2)),
    ({}, "post-layer-norm", (3, 0, 411, 4)),
    ({}, "x-bias-4096", (3, 0, 550, 7)),
    ({}, "layer-scale-4096", (3, 0, 689, 9)),
    ({}, "layer-scale-8192", (4, 0, 823, 9)),
    ({}, "ada-norm-4096", (3, 0, 686, 6)),
    ({}, "ada-norm-8192", (4, 0, 820, 6)),
    (RMS, "ada-norm-4096", (3, 0, 681, 4)),
    (BF16, "norms-both-sides-4096", (3, 0, 680, 4)),
    ({}, "norms-both-sides-8192", (3, 0, 688, 8)),
    ({}, "norms-both-sides-gated", (3, 4, 690, 7)),
    ({}, "gated-4096", (3, 0, 541, 2)),
    ({}, "gate-first-8192", (3, 0, 545, 4)),
    ({}, "decode-1", (1, 0, 0, 0)),
    ({}, "alphafold-pair-axis-0", (0, 10, 351, 3)),  # by XLA
    ({}, "convnext-768", (0, 11, 514, 1)),
]


@pytest.mark.parametrize(("changes", "name", "expected"), STEPS)
def test_workloads(changes, name, expected):
    workload = dataclasses.replace(WORKLOADS[name], **changes)
    report = program.compile_for(workload.step(workload.function()), *workload.step_arguments())
    assert_no_more(report, expected, name)
    assert report.collectives == ()


def gated_sum(x, residual, scale, offset, gate, **how):
    return jln.add_layer_norm(x, residual, scale, offset, gate=gate, **how)


def by_xla(function):
    return functools.partial(function, implementation="xla")


def over(name, *axis):
    return functools.partial(getattr(jln, name), axis=axis)


both_sides = jln.rms_norm_add_rms_norm
of_rows = functools.partial(jax.vmap, in_axes=(0, None, None))
of_sums = jax.vmap(jln.add_layer_norm, (0, None, None, None))
in_the_middle = jax.vmap(gated_sum, (1, 1, 0, None, 0), 1)
in_forward_mode = functools.partial(jln.layer_norm, forward_mode=True)
gate_first = functools.partial(jln.rms_norm_gated, norm_before_gate=False)
half_gated = functools.partial(jln.add_layer_norm, gate=0.5)

X, OWN, ROW = struct(4, 2048, 4096), struct(4, 4096), struct(4096)
LONG, LONG32 = struct(2048, 16384), struct(1024, 32768, dtype="float32")
HEADS, GROUPS, GROUP = struct(4, 2048, 32, 128), struct(4, 2048, 8, 512), struct(1, 1, 8, 512)
MANY, OF_MANY = struct(256, 256, 512), struct(256, 1, 512)
EXAMPLES, ROW_1024 = struct(128, 256, 1024), struct(1024)
STREAM, STREAM_ROW = struct(8192, 5376, dtype="float32"), struct(5376, dtype="float32")  # Gemma 3 27B
MIDDLE, OF_MIDDLE, CHANNELS, DIT = struct(8, 32, 2048, 128), struct(32, 128), struct(768), struct(64, 1024, 1152)
GATED, SUMMED = struct(16, 1536, 1024), struct(64, 768, 576)
WIDE, WIDE_ROW = struct(8192, 4096, dtype="float32"), struct(4096, dtype="float32")

# A function, its operands, and what its step has, as above.
FORMS = {
    # Vmaps are as the same arrays in one call.
    "rows in front": (of_rows(jln.layer_norm), (X, ROW, ROW), (3, 0, 344, 4)),
    "rows, forward_mode": (of_rows(in_forward_mode), (X, ROW, ROW), (3, 0, 344, 4)),
    "rows in the middle": (jax.vmap(jln.layer_norm, (1, None, None), 1), (X, ROW, ROW), (3, 0, 344, 4)),
    "rows, as in Equinox": (of_rows(of_rows(jln.layer_norm)), (X, ROW, ROW), (3, 0, 344, 4)),
    "adaLN by vmaps": (jax.vmap(of_rows(jln.layer_norm)), (X, OWN, OWN), (3, 0, 344, 4)),
    "adaLN with a gate by vmap": (jax.vmap(gated_sum), (X, X, OWN, OWN, OWN), (3, 0, 684, 6)),
    "heads with scales": (jln.rms_norm, (HEADS, struct(1, 1, 32, 128)), (3, 0, 338, 1)),
    "heads with scales by vmap": (jax.vmap(jln.rms_norm, (2, 0), 2), (HEADS, OF_MIDDLE), (3, 0, 338, 1)),
    "groups": (jln.rms_norm, (GROUPS, GROUP), (3, 0, 338, 1)),
    "groups of a sum": (jln.add_layer_norm, (GROUPS, GROUPS, GROUP, GROUP), (3, 1, 676, 1)),
    "groups, gated": (jln.rms_norm_gated, (GROUPS, GROUPS, GROUP), (3, 0, 540, 1)),
    "many examples": (gated_sum, (MANY, MANY, OF_MANY, OF_MANY, OF_MANY), (3, 0, 681, 3)),
    # Rows that no tile holds.
    "16384, RMSNorm": (jln.rms_norm, (LONG, struct(16384)), (4, 0, 474, 2)),
    "16384, gate first": (gate_first, (LONG, LONG, struct(16384)), (4, 0, 743, 2)),
    "20480": (jln.layer_norm, (struct(2048, 20480), struct(20480), struct(20480)), (4, 0, 596, 4)),
    "32768 in float32": (jln.rms_norm, (LONG32, struct(32768, dtype="float32")), (4, 0, 944, 2)),
    # Fewer arguments, or what is no array of H.
    "no parameters": (jln.rms_norm, (X,), (2, 0, 336, 0)),
    "one row": (jln.layer_norm, (struct(1, 4096), ROW, ROW), (2, 0, 0, 0)),
    "a gate of each example": (gated_sum, (EXAMPLES, EXAMPLES, ROW_1024, ROW_1024, struct(128, 1, 1)), (3, 6, 692, 8)),
    "a number for a gate": (half_gated, (EXAMPLES, EXAMPLES, ROW_1024, ROW_1024), (3, 1, 613, 5)),
    "a stream in float32": (both_sides, (struct(8192, 5376), STREAM, *[STREAM_ROW] * 2), (3, 0, 1333, 6)),
    "without a sum": (lambda x, scale: jln.add_rms_norm(x, None, scale), (X, ROW), (3, 1, 541, 0)),  # x is copied
    # By XLA, which moves no more than for plain jnp.
    "plain jnp": (jln.reference.layer_norm, (X, ROW, ROW), (0, 8, 877, 134)),
    "channels first": (over("layer_norm", 1), (struct(64, 768, 196), *[CHANNELS] * 2), (0, 8, 156, 1)),
    "channels first, gated": (over("rms_norm_gated", 1), (GATED, GATED, struct(1536)), (0, 6, 605, 101)),
    "channels first, a sum": (over("add_layer_norm", 1), (SUMMED, SUMMED, CHANNELS, CHANNELS), (0, 11, 796, 1)),
    "two axes in front": (over("rms_norm", 0, 1), (struct(64, 64, 8192), struct(64, 64)), (0, 3, 403, 0)),
    "axes apart": (over("rms_norm", 0, 2), (struct(64, 8192, 64), struct(64, 64)), (0, 6, 413, 1)),
    "a scale of positions": (over("rms_norm", 2), (struct(4, 64, 64, 2048), struct(1, 64, 64, 1)), (0, 3, 419, 4)),
    "parameters along different axes": (
        over("layer_norm", 1),
        (struct(64, 1152, 1024), struct(1, 1152, 1024), struct(64, 1152, 1)),
        (0, 8, 1676, 1),
    ),
    "the same over H": (jln.layer_norm, (DIT, struct(64, 1, 1152), struct(1, 1024, 1152)), (0, 6, 1969, 302)),
    "an offset of x's size": (jln.layer_norm, (DIT, struct(1152), DIT), (0, 7, 2268, 302)),
    "heads in front": (jln.rms_norm, (struct(4, 8, 256, 128), struct(1, 8, 1, 128)), (0, 6, 23, 4)),
    "an offset of each position": (jln.layer_norm, (X, ROW, struct(1, 2048, 4096)), (2, 2, 537, 67)),  # plain jnp 841
    "a residual for all": (of_sums, (X, struct(2048, 4096), ROW, ROW), (0, 9, 1112, 134)),
    "parameters in the middle": (in_the_middle, (*[MIDDLE] * 2, OF_MIDDLE, struct(128), OF_MIDDLE), (0, 10, 2551, 268)),
    # The total's cotangent is in memory once, and no wider than total. Plain jnp moves 1281 and 1079.
    "a gate": (by_xla(gated_sum), (X, X, ROW, ROW, ROW), (0, 11, 1349, 134)),
    "a gate in float32": (by_xla(gated_sum), (*[WIDE] * 2, *[WIDE_ROW] * 3), (0, 9, 2288, 1)),
    "both sides": (by_xla(both_sides), (X, X, ROW, ROW), (0, 11, 1146, 1)),
    "both sides in float32": (by_xla(both_sides), (*[WIDE] * 2, *[WIDE_ROW] * 2), (0, 13, 2287, 1)),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    function, operands, expected = FORMS[name]
    assert_no_more(both_ways(function, *operands), expected, name)


# Of x, scale and offset those whose gradients are asked for; our kernels, XLA's and MB. A step with everything, and
# the result, moves 353 MB.
FROZEN = [
    ((0,), {}, (2, 0, 269)),  # x is read twice and dy once, dx is written, the result is not
    ((1,), {}, (3, 0, 206)),  # x is read twice and dy once, shares of dscale are written
    ((2,), {}, (0, 2, 67)),  # dy is read
    ((2,), {"forward_mode": True}, (0, 2, 67)),
    ((0, 1), {"forward_mode": True}, (3, 0, 273)),
    ((0, 1, 2), {}, (3, 0, 277)),
    ((1,), {"used": True}, (3, 0, 206)),
    ((2,), {"used": True}, (0, 2, 67)),
]


@pytest.mark.parametrize(("some", "how", "expected"), FROZEN)
def test_frozen_arguments(some, how, expected):
    """No result is written where only its derivatives are used, and no gradient that is not wanted."""
    norm = functools.partial(jln.layer_norm, forward_mode=how.get("forward_mode", False))
    parameter = struct(4096, dtype="float32")
    report = some_gradients(norm, (struct(8192, 4096), parameter, parameter), some, used=how.get("used", False))
    assert_no_more(report, expected, some, how)


def test_a_frozen_branch_behind_a_norm_on_both_sides_costs_the_norm_of_the_sum_alone():
    report = some_gradients(both_sides, (X, X, ROW, ROW), (1, 3), result=True)
    assert_no_more(report, (3, 0, 1.02 * (4 + 4) * 2 * X.size / 1e6))


def test_inference_saves_no_statistics():
    (kernel,) = program.compile_for(jln.layer_norm, X, ROW, ROW).kernels
    assert (kernel.bytes_read, kernel.bytes_written) == (2 * X.size + 2 * 2 * 4096, 2 * X.size)


SAVE_STATISTICS = jax.checkpoint_policies.save_only_these_names(jln.STATISTICS)


@pytest.mark.parametrize(
    ("policy", "forward_mode", "times"),
    [("no checkpoint", False, 3), ("no checkpoint", True, 3), (SAVE_STATISTICS, True, 3), (None, False, 4)],
)
def test_three_layers_in_a_scan(policy, forward_mode, times):
    """Checkpointed layers in a scan run the forward kernel again only where not even the statistics are saved."""
    norm = functools.partial(jln.layer_norm, forward_mode=forward_mode)
    norm = norm if policy == "no checkpoint" else jax.checkpoint(norm, policy=policy)

    def network(x, *stacked):
        return jax.lax.scan(lambda x, parameters: (norm(jax.numpy.sin(x), *parameters), None), x, stacked)[0]

    stacked = [struct(3, H, dtype="float32")] * 2
    assert launches(program.compile_for(gradient(network), struct(M, H), *stacked)) == [3] * times


# Gradients of each example by itself: the operator, the places of the examples in the operands, the operands, what a
# step has: our kernels, XLA's, MB moved and MB temporary. Results lie as x does.
rms = jln.rms_norm_linear
OF_PARAMETERS, OF_TWO, FOR_ALL = (OF_MIDDLE, struct(128), OF_MIDDLE), (struct(2, H), struct(2, H)), struct(8, 2048, 128)
FRONT, BEHIND = struct(32, 8, 2048, 128), struct(8, 2048, 128, 32)
ROWS, KERNEL, KERNELS, FEW = struct(8, M, H), struct(H, 512), struct(8, H, 512), struct(8, H, 16)
OF_EACH = {
    "rows": (jln.layer_norm, (0, None, None), (X, ROW, ROW), (3, 0, 344, 4)),
    "rows of groups": (of_rows(jln.layer_norm), (0, 0, 0), (struct(2, 4, M, H), *OF_TWO), (3, 0, 176, 4)),
    "in front": (gated_sum, (0, 0, 0, None, 0), (FRONT, FRONT, *OF_PARAMETERS), (3, 0, 1352, 5)),
    "in the middle": (gated_sum, (1, 1, 0, None, 0), (MIDDLE, MIDDLE, *OF_PARAMETERS), (0, 10, 2551, 268)),
    "behind H": (gated_sum, (3, 3, 0, None, 0), (BEHIND, BEHIND, *OF_PARAMETERS), (0, 13, 2057, 11)),
    "a residual for all": (gated_sum, (1, None, 0, None, 0), (MIDDLE, FOR_ALL, *OF_PARAMETERS), (0, 12, 2831, 403)),
    "a norm in the middle": (jln.layer_norm, (1, None, None), (MIDDLE, struct(128), struct(128)), (0, 8, 1754, 271)),
    "a norm behind H": (jln.rms_norm, (3, 0), (BEHIND, struct(32, 128)), (0, 6, 958, 6)),
    "few rows of each scale": (jln.rms_norm, (0, 0), (struct(64, 32, H), struct(64, H)), (3, 0, 26, 2)),
    "the same rows for all scales": (jln.rms_norm, (None, 0), (struct(32, H), struct(64, H)), (3, 0, 17, 2)),
    "experts": (rms, (0, None, 0, None), (ROWS, struct(H), KERNELS, struct(512)), (3, 4, 399, 34)),
    "heads": (rms, (None, None, 0, None), (struct(M, H), struct(H), KERNELS, struct(512)), (3, 6, 331, 38)),
    "heads of few features": (rms, (None, None, 0, None), (struct(M, H), struct(H), FEW, struct(16)), (3, 8, 205, 36)),
    "members": (rms, (None, 0, 0, None), (struct(M, H), struct(8, H), KERNELS, struct(512)), (3, 4, 340, 34)),
    "biases of rows": (rms, (0, None, None, 0), (ROWS, struct(H), KERNEL, struct(8, 512)), (3, 5, 418, 34)),
}


@pytest.mark.parametrize("name", OF_EACH)
def test_gradients_of_each_example(name):
    """A vmap around the derivative has x where it lies: kernels take it in front, else XLA reads it once more."""
    function, places, operands, expected = OF_EACH[name]
    out = places[0] or 0
    step = jax.vmap(with_gradients(function), (out, *places), (out, tuple(i or 0 for i in places)))
    dy = jax.eval_shape(jax.vmap(function, places, out), *operands)
    assert_no_more(program.compile_for(step, dy, *operands), expected, name)
