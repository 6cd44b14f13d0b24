"""Rung 4: `python -m jln report`, the programs that it counts, those that it skips, and what it calls a fault."""

import dataclasses
import json

import pytest

import absent_gpu  # noqa: F401
from jln import program
from jln._tools.workloads import WORKLOADS

pytest.importorskip("typer")

from command_line import run
from jln._tools.composed import Unsupported
from jln._tools.peers import PEERS


def test_json_is_what_the_programs_do(capsys):
    workload = WORKLOADS["layer-norm-1024"]
    status, out, _ = run(capsys, "report", "--workload", workload.name, "--peer", "jnp", "--chip", "a100", "--json")
    found = json.loads(out)
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
    """The peer "cudnn" of `python -m jln bench` has cuDNN's norm forward and in both directions, not on a B200."""
    peer, workload = PEERS["cudnn"], WORKLOADS["gpt2-small"]
    function = peer.function(workload)
    programs = (function, workload.arguments()), (workload.step(function), workload.step_arguments())

    def made(chip, options=peer.options):
        found = [program.compile_for(f, *a, chip=chip, compiler_options=options) for f, a in programs]
        return [peer.evidence in p.hlo for p in found]

    assert made("h200") == [True, True] and made("b200") == made("h200", None) == [False, False]


def test_a_folder_gets_what_json_prints_and_plots(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ("--workload", "gated-128", "--workload", "decode-4", "--peer", "jnp", "--json")
    status, out, _ = run(capsys, "report", *arguments, "--output", str(tmp_path))
    assert status == 0 and {p.name for p in tmp_path.iterdir()} == {"report.json", "operators.svg"}
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(out)
    drawn = (tmp_path / "operators.svg").read_text()
    assert ">4 x 2048 x 32 x 128<" in drawn and ">forward alone<" in drawn
    assert [w["programs"]["jln"]["held_bytes"] is None for w in json.loads(out)["workloads"]] == [False, True]


def test_a_table_of_what_was_asked_for(capsys):
    pytest.importorskip("flax")
    status, out, _ = run(capsys, "report", "--workload", "decode-4", "--workload", "router", "--peer", "flax")
    rows = [line.split() for line in out.splitlines() if line.startswith("  ")][1:]
    assert status == 0
    assert [row[:6] for row in rows] == [
        ["decode-4", "rms_norm", "4x4096", "-", "jln", "1"],
        ["decode-4", "rms_norm", "4x4096", "-", "flax", "1"],
        ["router", "rms_norm_linear", "8192x4096", "64", "jln", "4"],
        ["router", "rms_norm_linear", "8192x4096", "64", "flax", rows[3][5]],
    ]
    assert float(rows[2][-3]) < 1.5 < float(rows[3][-3])  # as a multiple of every array once


def test_several_linears_are_beside_the_norm_and_separate_products(capsys):
    """The peer jln-norm is there for Linears only, as a norm alone would be compared with itself."""
    names = ("adapters", "decode-4")
    arguments = (a for name in names for a in ("--workload", name))
    status, out, _ = run(capsys, "report", *arguments, "--peer", "jln-norm")
    rows = [line.split() for line in out.splitlines() if line.startswith("  ")][1:]
    assert status == 0 and "Skipped jln-norm for decode-4: a norm by itself is jln's own." in out
    assert [[row[0], *row[3:5]] for row in rows] == [
        ["adapters", "16+16+16", "jln"],
        ["adapters", "16+16+16", "jln-norm"],
        ["decode-4", "-", "jln"],
    ]
    by = {tuple(row[i] for i in (0, 4)): float(row[-3]) for row in rows}
    assert by["adapters", "jln"] < 1.5 < by["adapters", "jln-norm"]


def test_a_peer_that_is_not_here_is_skipped_with_its_reason(capsys, monkeypatch):
    monkeypatch.setitem(PEERS, "flax", dataclasses.replace(PEERS["flax"], package="jln_no_such_package"))
    status, out, _ = run(capsys, "report", "--workload", "decode-4", "--peer", "flax")
    assert status == 0 and "Skipped flax: flax is not installed." in out


def test_a_program_that_does_not_compile_is_said_and_only_ours_is_a_fault(capsys, monkeypatch):
    def broken(workload):
        raise NotImplementedError("no such size")

    def has_none(workload):
        raise Unsupported("it does not do this")

    monkeypatch.setitem(PEERS, "flax", dataclasses.replace(PEERS["flax"], function=broken))
    monkeypatch.setitem(PEERS, "jnp", dataclasses.replace(PEERS["jnp"], function=has_none))
    arguments = ("--workload", "decode-4", "--peer", "flax", "--peer", "jnp")
    status, out, _ = run(capsys, "report", *arguments)
    assert status == 0 and [line.split()[4] for line in out.splitlines() if line.startswith("  decode-4")] == ["jln"]
    assert "flax does not compile for decode-4: NotImplementedError: no such size" in out
    assert "Skipped jnp for decode-4: it does not do this." in out
    monkeypatch.setitem(PEERS, "jln", dataclasses.replace(PEERS["jln"], function=broken))
    status, out, _ = run(capsys, "report", *arguments)
    assert status == 1 and "jln does not compile for decode-4" in out
