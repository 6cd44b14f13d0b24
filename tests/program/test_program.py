"""Program reports, made without a GPU, of programs whose kernels and bytes are known by hand or from a first look.

They run by `pytest -n0 --confcutdir=tests/program tests/program`, in a process of their own: the report sets variables
that JAX's CUDA plugin must meet, and Triton's interpreter, which the other tests' conftest.py switches on, compiles
nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import absent_gpu  # noqa: F401
import hlo
import program

F32, BF16, MB = jnp.float32, jnp.bfloat16, 10**6


def struct(*shape, dtype=F32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def plain_layer_norm(x, scale, offset):
    # `x32 - mean` is spelt twice: sharing it changes a borderline choice of XLA's fusion, by one read of x.
    x32 = x.astype(F32)
    mean = x32.mean(-1, keepdims=True)
    rstd = jax.lax.rsqrt(((x32 - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
    return ((x32 - mean) * rstd * scale[None] + offset[None]).astype(x.dtype)


def value_and_vjp(fn):
    def step(cotangent, *primals):
        value, vjp = jax.vjp(fn, *primals)
        return value, vjp(cotangent)

    return step


# XLA alone: x in bfloat16, scale and offset in float32, M * H = 2^25.
@pytest.mark.parametrize("h, megabytes, kernels", [(1024, 875, 8), (4096, 877, 8), (8192, 806, 5)])
def test_layer_norm_of_xla(h, megabytes, kernels):
    x = struct(2**25 // h, h, dtype=BF16)
    report = program.compile_for(value_and_vjp(plain_layer_norm), x, x, struct(h), struct(h))
    assert report.bytes_total / MB == pytest.approx(megabytes, abs=1)
    assert report.launches == len(report.kernels) == kernels
    assert {(k.kind, k.times, k.exact) for k in report.kernels} == {("fusion", 1, True)}
    tensors = 2 * 2**26 + 2 * 4 * h  # x, dy and the parameters; y, dx and the parameters' gradients
    assert report.argument_bytes == pytest.approx(tensors, abs=1024)
    assert report.output_bytes == pytest.approx(tensors, abs=1024)
    assert report.temp_bytes >= 2**27  # XLA writes dy * x_hat out in float32
    assert report.collectives == ()


@pytest.mark.parametrize("h, megabytes, kernels", [(1024, 1278, 10), (4096, 1280, 10), (8192, 1208, 7)])
def test_residual_layer_norm_of_xla(h, megabytes, kernels):
    def add_layer_norm(x, residual, scale, offset):
        return plain_layer_norm(x + residual, scale, offset), x + residual

    x = struct(2**25 // h, h, dtype=BF16)
    report = program.compile_for(value_and_vjp(add_layer_norm), (x, x), x, x, struct(h), struct(h))
    assert report.bytes_total / MB == pytest.approx(megabytes, abs=1)
    assert report.launches == kernels


@pytest.mark.parametrize(
    "m, h, n, megabytes", [(8192, 4096, 12288, 2189), (8192, 4096, 256, 1118), (16384, 1024, 3072, 929)]
)
def test_layer_norm_linear_of_xla(m, h, n, megabytes):
    def layer_norm_linear(x, scale, offset, kernel, bias):
        return plain_layer_norm(x, scale, offset) @ kernel + bias[None]

    x, dy, kernel, bias = (struct(*shape, dtype=BF16) for shape in ((m, h), (m, n), (h, n), (n,)))
    report = program.compile_for(value_and_vjp(layer_norm_linear), dy, x, struct(h), struct(h), kernel, bias)
    assert report.bytes_total / MB == pytest.approx(megabytes, abs=1)


@pytest.mark.parametrize("chip", program.CHIPS)
@pytest.mark.parametrize("fn", [lambda x: x + 1, jax.jit(lambda x: x + 1)], ids=["plain", "jitted"])
def test_one_kernel_reads_and_writes_its_array(chip, fn):
    size = 8192 * 1024 * 4
    report = program.compile_for(fn, struct(8192, 1024), chip=chip)
    assert [(k.bytes_read, k.bytes_written) for k in report.kernels] == [(size, size)]
    assert (report.bytes_read, report.bytes_written, report.bytes_total) == (size, size, 2 * size)
    assert (report.argument_bytes, report.output_bytes, report.temp_bytes) == (size, size, 0)


def test_arguments_are_pytrees_of_arrays_and_scalars():
    arrays = {"a": jnp.ones((256, 128), F32), "b": (jnp.ones((128,), BF16), 2.0)}
    report = program.compile_for(lambda tree, i: tree["a"] * tree["b"][0][None] * tree["b"][1] + i, arrays, 3)
    read = 256 * 128 * 4 + 128 * 2 + jnp.result_type(float).itemsize + jnp.result_type(int).itemsize
    assert [(k.bytes_read, k.bytes_written) for k in report.kernels] == [(read, 256 * 128 * 4)]


# A kernel that takes the same array twice reads it once; one that takes two arrays reads both.
def test_triton_call_counts_distinct_operands():
    jt = pytest.importorskip("jax_triton")
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton's interpreter is on in this process")
    import triton
    import triton.language as tl

    @triton.jit
    def add(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + index, tl.load(a_ptr + index) + tl.load(b_ptr + index))

    out = {"out_type" if jt.__version__ >= "0.4" else "out_shape": struct(2**20)}

    def call(a, b):
        return jt.triton_call(a, b, kernel=add, grid=(1024,), BLOCK=1024, compute_capability=90, **out)

    def reads(fn, *args):
        (kernel,) = program.compile_for(fn, *args).kernels
        assert (kernel.is_triton, kernel.bytes_written) == (True, 2**22)
        return kernel.bytes_read

    x = struct(2**20)
    assert reads(call, x, x) == 2 * 2**22
    assert reads(lambda a: call(a, a), x) == 2**22
    assert reads(lambda a: call(a, a.reshape(-1)), struct(1024, 1024)) == 2**22  # one buffer in two shapes


def test_scan_multiplies_its_body_and_counts_slices():
    def layers(x, weights):
        return jax.lax.scan(lambda carry, w: (jnp.tanh(carry * w), carry.sum(-1)), x, weights)

    report = program.compile_for(layers, struct(128, 1024), struct(5, 128, 1024))
    body = [k for k in report.kernels if k.times == 5]
    carry = 128 * 1024 * 4
    assert {(k.times, k.exact) for k in report.kernels} == {(1, True), (5, True)}
    # A trip reads the carry, one slice of the weights and the trip's number, and writes one row of the sums in place.
    assert max(k.bytes_read for k in body) == pytest.approx(2 * carry, abs=16)
    assert max(k.bytes_written for k in body) == carry + 128 * 4
    assert sum(k.bytes_written for k in body) == pytest.approx(carry + 2 * 128 * 4, abs=16)
    assert min(k.bytes_written for k in report.kernels) > 1  # the condition, a pred[], is not counted
    assert report.launches == sum(1 for k in report.kernels if k.times == 1) + 5 * len(body)


def test_nested_loops_multiply():
    def nested(x):
        return jax.lax.fori_loop(0, 4, lambda i, a: jax.lax.fori_loop(0, 3, lambda j, b: jnp.sort(b) * 0.5, a), x)

    report = program.compile_for(nested, struct(64, 512))
    assert max(k.times for k in report.kernels) == 12 and all(k.exact for k in report.kernels)


def test_data_dependent_control_flow_is_flagged():
    def steps(x):
        return jax.lax.while_loop(lambda a: a.sum() < 3, lambda a: a * 2, x)

    def choose(p, x):
        return jax.lax.cond(p, lambda a: a.sum(0, keepdims=True) + a, lambda a: a[::-1], x)

    for fn, args in ((steps, (struct(64, 64),)), (choose, (struct(dtype=bool), struct(64, 64)))):
        report = program.compile_for(fn, *args)
        inexact = [k for k in report.kernels if not k.exact]
        assert len(inexact) >= 2 and all(k.times == 1 for k in inexact)
        assert "1?" in str(report)


def test_update_in_place_writes_the_update_only():
    report = program.compile_for(lambda x, y: x.at[3:5].set(y), struct(8192, 1024), struct(2, 1024))
    copy, update = report.kernels
    assert (copy.kind, copy.bytes_read, copy.bytes_written) == ("copy", 2**25, 2**25)  # x is not donated
    assert (update.bytes_read, update.bytes_written) == (8192, 8192)


def test_slice_and_gather_read_what_they_take():
    report = program.compile_for(lambda x, i: (x[7:9] + 1, x[i]), struct(8192, 1024), struct(16, dtype=jnp.int32))
    assert sorted(k.bytes_written for k in report.kernels) == [2 * 4096, 16 * 4096]
    assert sorted(k.bytes_read for k in report.kernels) == [2 * 4096, 16 * 4096 + 16 * 4]

    def converted(x, i):  # XLA fuses a conversion above the slice; only the slice is converted
        return jax.lax.dynamic_slice_in_dim(x.astype(F32), i, 3)

    (kernel,) = program.compile_for(converted, struct(8192, 1024, dtype=BF16), struct(dtype=jnp.int32)).kernels
    assert (kernel.bytes_read, kernel.bytes_written) == (3 * 1024 * 2 + 4, 3 * 1024 * 4)


def test_scatter_reads_and_writes_what_it_updates():
    def gradient_of_embedding(indices, dy):
        return jnp.zeros((50000, 512), F32).at[indices].add(dy)

    report = program.compile_for(gradient_of_embedding, struct(128, dtype=jnp.int32), struct(128, 512))
    rows = 128 * 512 * 4
    assert report.bytes_written == pytest.approx(50000 * 512 * 4 + rows, abs=4096)  # zeros, then the rows
    assert report.bytes_read == pytest.approx(2 * rows, abs=4096)  # dy, and the rows that it is added to


def test_collectives_of_a_sharded_program():
    mesh = program.mesh("h200", (4, 2), ("rows", "columns"))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("rows",), (None, "columns")))

    def total(x):
        return x.sum(0)

    report = program.compile_for(total, struct(8192, 1024, sharding=rows), devices=8)
    assert [(c.kind, c.bytes, c.times, c.devices) for c in report.collectives] == [("all-reduce", 1024 * 4, 1, 4)]
    assert report.argument_bytes == report.bytes_read == 8192 * 1024 * 4 // 4  # one device's share

    def gather(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec())) + 1

    report = program.compile_for(gather, struct(1024, 1024, sharding=columns), devices=8)
    assert [(c.kind, c.bytes, c.devices) for c in report.collectives] == [("all-gather", 2**22, 2)]
    assert program.collectives(report.hlo) == report.collectives


@pytest.mark.parametrize(
    "groups, first",
    [
        ("{{0,2,4,6},{1,3,5,7}}", (0, 2, 4, 6)),
        ("[4,2]<=[8]", (0, 1)),
        ("[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", (0, 2, 4, 6)),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_0','axis_1'}", (0, 2, 4, 6, 1, 3, 5, 7)),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_0'}", (0, 1)),
        ("mesh['axis_0'=8] {'axis_0':(2)4}", (0, 1, 2, 3)),  # a part of an axis, behind one of size 2
        ("{}", None),  # all devices
    ],
)
def test_groups_of_a_collective(groups, first):
    hlo = f"""
ENTRY %main (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  ROOT %sum = f32[16]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, metadata={{op="{{8}}"}}
}}"""
    (collective,) = program.collectives(hlo)
    assert collective == program.Collective("all-reduce", 64, "sum", group=first)
    assert collective.devices == (first and len(first))


@pytest.mark.parametrize("barrier", ["tuple", "opt-barrier"])
def test_memory_behind_a_barrier_is_that_in_front(barrier):
    """A kernel that reads an array and the same array behind a barrier reads it once."""
    kind = "(f32[16], f32[4])"
    text = f"""
ENTRY %main (x: f32[16], y: f32[4]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  %y = f32[4]{{0}} parameter(1)
  %both = {kind} tuple(%x, %y)
  %wait = {kind} {"tuple(%x, %y)" if barrier == "tuple" else "opt-barrier(%both)"}
  %x.1 = f32[16]{{0}} get-tuple-element(%wait), index=0
  %y.1 = f32[4]{{0}} get-tuple-element(%wait), index=1
  ROOT %sum = f32[16]{{0}} custom-call(%x, %x.1, %y.1), custom_call_target="sum"
}}"""
    (kernel,) = hlo.launches(text)
    assert (kernel.bytes_read, kernel.bytes_written) == (80, 64)


def test_errors_name_what_is_wrong(monkeypatch):
    with pytest.raises(ValueError, match="unknown chip 'v100'; known are a100, h100, h200, b200"):
        program.compile_for(jnp.sin, struct(8), chip="v100")
    with pytest.raises(ValueError, match="at least one device"):
        program.compile_for(jnp.sin, struct(8), devices=0)
    with pytest.raises(ValueError, match="no argument lies on the 8 GPUs"):
        program.compile_for(jnp.sin, struct(8), devices=8)
    sharding = NamedSharding(program.mesh("h200", (8,), ("x",)), PartitionSpec("x"))
    with pytest.raises(ValueError, match=r"shape \(8,\) is sharded over other devices"):
        program.compile_for(jnp.sin, struct(8, sharding=sharding), chip="h100", devices=8)
    program._devices.cache_clear()
    monkeypatch.setattr(program, "_folders", lambda package: [])
    with pytest.raises(RuntimeError, match=r"\.\[cuda13\]"):
        program.compile_for(jnp.sin, struct(8))


def test_the_plugin_is_brought_back_when_jax_has_turned_it_away():
    code = """if True:
        import jax
        jax.devices()
        import program
        report = program.compile_for(lambda x: x + 1, jax.numpy.ones((256, 256), 'float32'))
        assert report.bytes_total == 2 * 256 * 256 * 4
        assert jax.default_backend() == "cpu"

        import jln  # whose operators XLA asks JAX to partition

        rows = jax.NamedSharding(program.mesh("h200", (8,), ("x",)), jax.P("x"))
        x = jax.ShapeDtypeStruct((256, 256), "float32", sharding=rows)
        assert len(program.compile_for(jln.rms_norm, x, devices=8).kernels) == 1
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "JAX_PLATFORMS")}
    subprocess.run([sys.executable, "-c", code], env=kept | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True)


def test_report_prints_as_a_table():
    lines = str(program.compile_for(lambda x: x + 1, struct(1000, 1000))).splitlines()
    assert lines[0].split() == ["h200", "kind", "times", "read", "MB", "written", "MB"]
    assert lines[1].split()[1:] == ["fusion", "1", "4.000", "4.000"]
    assert lines[2].split() == ["all", "kernels", "1", "4.000", "4.000"]
    assert [line.split() for line in lines[3:]] == [["temp", "0.000"], ["argument", "4.000"], ["output", "4.000"]]
