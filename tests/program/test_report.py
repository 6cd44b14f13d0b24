"""Tests: `benchmarks/report.py`, the programs that it counts, those that it skips, and what it calls a fault."""

import dataclasses
import json

import pytest

import absent_gpu  # noqa: F401

pytest.importorskip("typer")

import typer
from typer.testing import CliRunner

import program
import report
from peers import PEERS, Unsupported
from workloads import WORKLOADS


def run(*arguments):
    app = typer.Typer()
    app.command()(report.main)
    ran = CliRunner().invoke(app, arguments)
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.exit_code, ran.output


def test_the_file_is_what_the_programs_do(tmp_path):
    workload, path = WORKLOADS["layer-norm-1024"], tmp_path / "report.json"
    status, _ = run(workload.name, "--peers", "jnp", "--chip", "a100", "--output", str(path))
    found = json.loads(path.read_text())
    (only,) = found["workloads"]
    assert status == 0 and found["chip"] == "a100" and found["failures"] == []
    assert only["bytes_once"] == workload.bytes_once() and only["shape"] == [32768, 1024]
    assert list(only["programs"]) == ["jln", "jnp"]
    counted = program.compile_for(workload.step(workload.function()), *workload.step_arguments(), chip="a100")
    assert only["programs"]["jln"] == {
        "kernels": counted.launches,
        "bytes": counted.bytes_total,
        "bytes_outside_products": counted.bytes_total,
        "temporary_bytes": counted.temp_bytes,
        "held_bytes": 2**25 * 2 + 1024 * 4 + 2 * 32768 * 4,  # x, scale, mean and rstd
    }
    assert only["programs"]["jnp"]["held_bytes"] > 4 * 2**25 * 2


def test_xla_makes_cudnns_norm_of_what_bench_times_as_such():
    """The peer "cudnn" of the benchmark has cuDNN's norm forward and in both directions, not on a B200."""
    peer, workload = PEERS["cudnn"], WORKLOADS["gpt2-small"]
    function = peer.function(workload)
    programs = (function, workload.arguments()), (workload.step(function), workload.step_arguments())

    def made(chip, options=peer.options):
        found = [program.compile_for(f, *a, chip=chip, compiler_options=options) for f, a in programs]
        return [peer.evidence in p.hlo for p in found]

    assert made("h200") == [True, True] and made("b200") == made("h200", None) == [False, False]


def test_a_table_of_what_was_asked_for():
    """The peer jln-norm is there for Linears only, as a norm alone would be compared with itself."""
    status, out = run("decode-4", "router", "--peers", "jln-norm,jnp")
    rows = [line.split() for line in out.splitlines() if line.startswith("  ")][1:]
    assert status == 0 and "Skipped jln-norm for decode-4: a norm by itself is jln's own." in out
    assert [row[:5] for row in rows[:2]] == [["decode-4", "rms_norm", "4x4096", by, "1"] for by in ("jln", "jnp")]
    of_router = ["router", "rms_norm_linear", "8192x4096", "64"]
    assert [row[:5] for row in rows[2:]] == [[*of_router, by] for by in ("jln", "jln-norm", "jnp")]
    ratios = [float(row[-3]) for row in rows[2:]]
    assert ratios[0] < 1.5 < min(ratios[1:])  # as a multiple of every array once


def test_kernels_by_themselves():
    status, out = run("router", "--kernels", "--chip", "h100")
    assert status == 0 and "Kernels for h100 (sm_90)" in out and "the most of all" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("  router")] == [
        *("forward_kernel", "row_sums_kernel", "backward_kernel", "parameters_kernel"),
    ]


def test_a_program_that_does_not_compile_is_said_and_only_ours_is_a_fault(monkeypatch):
    def broken(workload):
        raise NotImplementedError("no such size")

    def has_none(workload):
        raise Unsupported("it does not do this")

    monkeypatch.setitem(PEERS, "flax", dataclasses.replace(PEERS["flax"], function=broken))
    monkeypatch.setitem(PEERS, "jnp", dataclasses.replace(PEERS["jnp"], function=has_none))
    monkeypatch.setitem(PEERS, "tokamax", dataclasses.replace(PEERS["tokamax"], package="jln_no_such_package"))
    status, out = run("decode-4")
    assert status == 0 and [line.split()[3] for line in out.splitlines() if line.startswith("  decode-4")] == ["jln"]
    assert "flax does not compile for decode-4: NotImplementedError: no such size" in out
    assert "Skipped jnp for decode-4: it does not do this." in out
    assert "Skipped tokamax: tokamax is not installed." in out
    monkeypatch.setitem(PEERS, "jln", dataclasses.replace(PEERS["jln"], function=broken))
    status, out = run("decode-4")
    assert status == 1 and "jln does not compile for decode-4" in out
    assert run("layer-norm-4097")[0] == run("--chip", "h2000")[0] == run("--chip", "mi300x")[0] == 2  # bad requests
