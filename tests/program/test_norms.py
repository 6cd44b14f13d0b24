"""Rung 4: kernels that the compiled step of each norm launches on an H200, and bytes that it moves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jln
import program
from absent_gpu import struct, triton_kernels
from workloads import WORKLOADS

MB = 10**6
ELEMENTS = 2**25


def layer_norm_step(x, scale, offset, dy):
    y, pullback = jax.vjp(jln.layer_norm, x, scale, offset)
    return y, pullback(dy)


# Every tensor once takes 336 MB, and 537 with a residual. The rest is for the statistics and the partial sums of dscale
# and doffset.
@pytest.mark.parametrize("parameters", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("layer-norm-1024", 350),
        ("layer-norm-4096", 355),
        ("layer-norm-8192", 360),
        ("layer-norm-16384", 480),  # a pass of row sums reads x and dy once more
        *((f"add-layer-norm-{h}", 569) for h in (1024, 4096, 8192)),
        ("add-layer-norm-16384", 681),
    ],
)
def test_table(name, megabytes, parameters):
    workload = dataclasses.replace(WORKLOADS[name], parameter_dtype=parameters)
    report = program.compile_for(workload.step(workload.function()), *workload.step_arguments())
    assert report.bytes_total / MB <= megabytes
    assert report.launches == len(triton_kernels(report)) == (4 if workload.width > 8192 else 3)
    assert report.temp_bytes <= 10 * MB  # the partial sums; XLA's own program needs 134 MB
    assert report.collectives == ()


MODELS = [
    n for n, w in WORKLOADS.items()
    if not w.is_linear and w.is_over_last and "backward" in w.directions and w.width <= 8192
]  # fmt: skip


@pytest.mark.parametrize("name", [n for n in MODELS if "layer-norm-" not in n and not WORKLOADS[n].extras])
def test_workloads(name):
    """A step moves every tensor once, the statistics, and partial sums, which are as large for few rows as for many.

    The partial sums are two float32 [H] for each of at most 4 programs an SM.
    """
    workload = WORKLOADS[name]
    report = program.compile_for(workload.step(workload.function()), *workload.step_arguments())
    assert report.launches == len(triton_kernels(report)) == 3
    statistics = 4 * 4 * workload.rows
    partial_sums = 2 * 4 * 132 * 2 * 4 * workload.width
    assert report.bytes_total <= workload.bytes_once() + statistics + partial_sums + 2 * 4 * workload.width


@pytest.mark.parametrize(
    ("form", "h", "dtype", "most"),
    [
        ("gated", 16384, "bfloat16", 1.39),
        ("rms_norm", 16384, "bfloat16", 1.42),
        ("rms_norm", 32768, "float32", 1.41),
        ("layer_norm", 32768, "bfloat16", 1.43),
    ],
)
def test_long_rows_take_a_pass_of_row_sums(form, h, dtype, most):
    """Rows that no tile holds are read once forward, and backward once more for the row sums."""
    x, scale = struct(ELEMENTS // h, h, dtype=dtype), struct(h, dtype=dtype)

    def step(x, z, scale, dy):
        if form == "gated":
            y, pullback = jax.vjp(functools.partial(jln.rms_norm_gated, norm_before_gate=False), x, z, scale)
        elif form == "layer_norm":
            y, pullback = jax.vjp(jln.layer_norm, x, scale, scale)
        else:
            y, pullback = jax.vjp(jln.rms_norm, x, scale)
        return y, pullback(dy)

    report = program.compile_for(step, x, x, scale, x)
    assert report.launches == len(triton_kernels(report)) == 4
    assert report.bytes_total <= most * (8 if form == "gated" else 5) * x.dtype.itemsize * ELEMENTS


@pytest.mark.parametrize("form", ["gated", "rms_norm", "add_layer_norm"])
def test_groups_in_a_row_are_read_in_place(form):
    """Groups with a scale of their own, on the axis directly before the normalised one, are read where they lie.

    There is no copy of x, z or y, and dscale comes from the same kernels.
    """
    x, scale = struct(4, 2048, 8, 512), struct(1, 1, 8, 512)
    rows = 3 if form == "gated" else 2 if form == "rms_norm" else 4

    def step(x, more, scale, dy, dtotal):
        def f(x, more, scale):
            if form == "gated":
                return jln.rms_norm_gated(x, more, scale, norm_before_gate=False)
            if form == "rms_norm":
                return jln.rms_norm(x, scale)
            return jln.add_layer_norm(x, more, scale)

        results, pullback = jax.vjp(f, x, more, scale)
        gradients = pullback((dy, dtotal) if form == "add_layer_norm" else dy)
        return results, gradients if form == "gated" else gradients[::2]

    report = program.compile_for(step, x, x, scale, x, x)
    assert report.launches == len(triton_kernels(report)) == 3
    backward = {"gated": 5, "rms_norm": 3, "add_layer_norm": 4}[form]
    assert report.bytes_total <= 1.03 * (rows + backward) * 2 * x.size


def test_the_parameters_gradients_of_many_examples_cost_no_pass():
    """Parameters of 256 examples with 256 rows each have their gradients from a backward kernel's few shares."""
    x, own = struct(256, 256, 512), struct(256, 1, 512)

    def step(x, scale, offset, gate, residual, cotangents):
        def f(x, scale, offset, gate, residual):
            return jln.add_layer_norm(x, residual, scale, offset, gate=gate)

        results, pullback = jax.vjp(f, x, scale, offset, gate, residual)
        return results, pullback(cotangents)

    report = program.compile_for(step, x, own, own, own, x, (x, x))
    assert report.launches == len(triton_kernels(report)) == 3  # two programs have the rows of an example
    assert report.bytes_total <= 1.03 * 2 * ((2 + 2 + 2 + 2 + 2) * 256 * 256 * 512 + 8 * 256 * 512)
    assert report.temp_bytes <= 5 * MB


def test_wide_rows_read_twice_are_counted_twice():
    """Rows past 8192 elements take a kernel for their sums, and the report counts its second read of x and dy."""
    h = 65536
    x, p = struct(ELEMENTS // h, h), struct(h)
    report = program.compile_for(layer_norm_step, x, p, p, x)
    assert report.launches == len(triton_kernels(report)) == 4
    assert report.bytes_total / MB <= 336 * 1.43


def test_without_parameters_there_is_nothing_to_reduce():
    x = struct(8192, 4096)

    def step(x, dy):
        y, pullback = jax.vjp(jln.rms_norm, x)
        return y, pullback(dy)

    assert program.compile_for(step, x, x).launches == 2


def test_inference_saves_no_statistics():
    x, p = struct(8192, 4096), struct(4096)
    report = program.compile_for(jln.layer_norm, x, p, p)
    (kernel,) = report.kernels
    assert kernel.bytes_written == 2 * 8192 * 4096
    assert kernel.bytes_read == 2 * 8192 * 4096 + 2 * 2 * 4096


def test_one_row():
    """Kernels compile for one row too, where jax-triton turns an integer of 1 into a constant."""
    x, p = struct(1, 4096), struct(4096)
    report = program.compile_for(layer_norm_step, x, p, p, x)
    assert len(triton_kernels(report)) == 2


def test_vmap_and_grad_keep_one_kernel_each_way():
    x, scales = struct(64, 32, 1024), struct(64, 1024)

    def gradients(x, scale, dy):
        y, pullback = jax.vjp(jln.rms_norm, x, scale)
        return y, pullback(dy)

    report = program.compile_for(jax.vmap(gradients), x, scales, x)
    flat = program.compile_for(gradients, struct(64 * 32, 1024), struct(1024), struct(64 * 32, 1024))
    assert len(triton_kernels(report)) == 3
    assert report.bytes_total <= 1.2 * flat.bytes_total


def test_remat_of_a_scan():
    x, scales = struct(4096, 1024), struct(3, 1024, dtype="float32")

    def network(x, scales):
        def layer(x, scale):
            return jln.rms_norm(jnp.sin(x), scale), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, scales)[0].astype("float32"))

    report = program.compile_for(jax.grad(network, argnums=(0, 1)), x, scales)
    assert sum(k.times for k in triton_kernels(report)) == 3 + 3 * 3  # forward; then forward again, backward, reduce


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_named_and_default_are_the_same_program(implementation):
    report = program.compile_for(lambda x: jln.layer_norm(x, implementation=implementation), struct(64, 128))
    assert len(triton_kernels(report)) == 1


def test_xla_on_a_gpu_is_still_to_be_had():
    report = program.compile_for(lambda x: jln.layer_norm(x, implementation="xla"), struct(64, 128))
    assert triton_kernels(report) == []


# An operator, its axis and operands, and what its step moves beside plain jnp's. First by the rules for derivatives, as
# in ConvNeXt and AlphaFold's pair; then in plain jnp: parameters along axes behind the normalised one, along different
# ones, of x's size, and of heads in front of positions.
ELSEWHERE = [
    ("layer_norm", 1, ((64, 768, 24, 24), (768,), (768,)), 0.9),
    ("rms_norm_gated", 1, ((16, 1536, 1024), (16, 1536, 1024), (1536,)), 0.93),
    ("layer_norm", 0, ((128, 384, 384), (128,), (128,)), 0.9),
    ("layer_norm", 1, ((384, 128, 384), (128,), (128,)), 0.9),
    ("add_layer_norm", 1, ((64, 768, 576), (64, 768, 576), (768,), (768,)), 0.94),
    ("rms_norm", 2, ((4, 64, 64, 2048), (1, 64, 64, 1)), 1),
    ("layer_norm", 1, ((64, 1152, 1024), (1, 1152, 1024), (64, 1152, 1)), 1),
    ("layer_norm", -1, ((64, 1024, 1152), (64, 1, 1152), (1, 1024, 1152)), 1),
    ("layer_norm", -1, ((64, 1024, 1152), (1152,), (64, 1024, 1152)), 1),
    ("rms_norm", -1, ((4, 8, 256, 128), (1, 8, 1, 128)), 1),
]


@pytest.mark.parametrize(("name", "axis", "shapes", "most"), ELSEWHERE)
def test_what_kernels_do_not_take_moves_no_more_than_plain_jnp(name, axis, shapes, most):
    """No more than by plain jnp is moved and held where rows are not H last, or parameters vary along other axes."""
    operands = [struct(*shape) for shape in shapes]

    def report(module):
        f = functools.partial(getattr(module, name), axis=axis)

        def step(cotangents, *operands):
            results, pullback = jax.vjp(f, *operands)
            return results, pullback(cotangents)

        return program.compile_for(step, jax.eval_shape(f, *operands), *operands)

    ours, plain = report(jln), report(jln.reference)
    print(f"\n{ours.bytes_total / MB:.0f} MB, plain jnp {plain.bytes_total / MB:.0f}")
    assert triton_kernels(ours) == []
    assert ours.bytes_total <= most * plain.bytes_total and ours.temp_bytes <= 1.001 * plain.temp_bytes
