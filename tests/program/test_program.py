"""Tests: reports of programs whose kernels and bytes are known by hand."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import absent_gpu
import hlo
import jln
import program

F32, BF16 = jnp.float32, jnp.bfloat16
struct = functools.partial(absent_gpu.struct, dtype=F32)
X = struct(8192, 1024)
TREE = {"a": jnp.ones((256, 128), F32), "b": (jnp.ones((128,), BF16), 2.0)}
NUMBERS = jnp.result_type(float).itemsize + jnp.result_type(int).itemsize
# A function, its arguments, and the bytes that each kernel reads and writes.
BYTES = {
    "pytrees of arrays and scalars": (
        lambda tree, i: tree["a"] * tree["b"][0][None] * tree["b"][1] + i,
        (TREE, 3),
        [(256 * 128 * 4 + 128 * 2 + NUMBERS, 256 * 128 * 4)],
    ),
    # x is not donated, and so copied first. Of a slice or rows that are taken only these are read.
    "update in place": (lambda x, y: x.at[3:5].set(y), (X, struct(2, 1024)), [(8192, 8192), (2**25, 2**25)]),
    "gather": (lambda x, i: x[i], (X, struct(16, dtype=jnp.int32)), [(16 * 4096 + 16 * 4, 16 * 4096)]),
    "slice behind a conversion": (  # which XLA fuses above the slice
        lambda x, i: jax.lax.dynamic_slice_in_dim(x.astype(F32), i, 3),
        (struct(8192, 1024, dtype=BF16), struct(dtype=jnp.int32)),
        [(3 * 1024 * 2 + 4, 3 * 1024 * 4)],
    ),
    # A kernel that takes the same array twice reads it once, in two shapes as well.
    "two arrays": (jln.rms_norm, (struct(1, 1024), struct(1024)), [(8192, 4096)]),
    "one array": (lambda x: jln.rms_norm(x, x.reshape(-1)), (struct(1, 1024),), [(4096, 4096)]),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_kernels(name):
    function, arguments, expected = BYTES[name]
    report = program.compile_for(function, *arguments)
    assert sorted((k.bytes_read, k.bytes_written) for k in report.kernels) == expected
    assert report.bytes_total == sum(map(sum, expected))


@pytest.mark.parametrize("chip", program.CHIPS)
def test_a_program_is_for_any_chip(chip):
    report = program.compile_for(jax.jit(lambda x: x + 1), X, chip=chip)
    assert (report.bytes_read, report.bytes_written, report.bytes_total) == (2**25, 2**25, 2**26)
    assert (report.argument_bytes, report.output_bytes, report.temp_bytes) == (2**25, 2**25, 0)


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


def test_scatter_reads_and_writes_what_it_updates():
    def gradient_of_embedding(indices, dy):
        return jnp.zeros((50000, 512), F32).at[indices].add(dy)

    report = program.compile_for(gradient_of_embedding, struct(128, dtype=jnp.int32), struct(128, 512))
    rows = 128 * 512 * 4
    assert report.bytes_written == pytest.approx(50000 * 512 * 4 + rows, abs=4096)  # zeros, then the rows
    assert report.bytes_read == pytest.approx(2 * rows, abs=4096)  # dy, and the rows that it is added to


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


def test_memory_behind_a_barrier_is_that_in_front():
    """A kernel that reads an array and the same array behind a barrier reads it once."""
    text = """
ENTRY %main (x: f32[16], y: f32[4]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %both = (f32[16], f32[4]) tuple(%x, %y)
  %wait = (f32[16], f32[4]) opt-barrier(%both)
  %x.1 = f32[16]{0} get-tuple-element(%wait), index=0
  %y.1 = f32[4]{0} get-tuple-element(%wait), index=1
  ROOT %sum = f32[16]{0} custom-call(%x, %x.1, %y.1), custom_call_target="sum"
}"""
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
    monkeypatch.setattr(program, "_devices", program._devices.__wrapped__)
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
