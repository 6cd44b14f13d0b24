"""Measurement of one workload: all peers' programs compiled, their numbers checked, then all timed together."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jln._tools import clocks
from jln._tools.accuracy import Accuracy, Judge
from jln._tools.clocks import Run, Times
from jln._tools.composed import Unsupported
from jln._tools.console import one_line
from jln._tools.peers import Peer
from jln._tools.workload import Block, Workload
from jln.testing.report import finite_or_text


@dataclass(frozen=True)
class Procedure:
    """Settings of a measurement.

    repetitions: runs of each program.
    cold: overwrite a GPU's L2 before each run.
    seed: of the data.
    even_wrong: time peers whose numbers are wrong, too.
    """

    repetitions: int
    cold: bool = True
    seed: int = 0
    even_wrong: bool = False


@dataclass(frozen=True)
class PeerProgram:
    """A compiled program of one peer in one direction.

    peak, temporary: the most bytes that it holds, with its arguments and results, and without. None where nobody
      counts.
    why: the reason not to run it.
    """

    peer: Peer
    direction: str
    run: Run
    outputs: Callable[[], list[jax.Array]]
    peak: int | None = None
    temporary: int | None = None
    why: str = ""


def measure(workload: Workload, peers: Sequence[Peer], platform: str, procedure: Procedure) -> list[dict[str, Any]]:
    """Return a record for each peer and direction, or one for a peer with the reason why there is no measurement."""
    arguments, cotangents = jax.device_put(workload.draw(seed=procedure.seed))
    records: list[dict[str, Any]] = []
    pending: list[_Pending] = []
    for peer in peers:
        why = peer.missing(platform)
        try:
            pending += [] if why else _pending(workload, peer, platform, arguments, cotangents)
        except Unsupported as error:
            why = str(error)
        except Exception as error:  # whatever a peer raises is its own affair, and the others' are measured
            records.append(without(workload, peer, "failed", one_line(error)))
        if why is not None:
            records.append(without(workload, peer, "skipped", why))
    programs: list[PeerProgram] = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # XLA compiles without Python's lock
        jobs = [(p.peer, p.finish, pool.submit(p.compile)) for p in pending]
    for peer, finish, job in jobs:
        try:
            programs += finish(job.result())
        except Exception as error:
            records.append(without(workload, peer, "failed", one_line(error)))
    records += [_record(workload, p, "skipped", None, p.why, None) for p in programs if p.why]
    programs = [program for program in programs if not program.why]
    if programs:
        judge = Judge(workload, arguments, cotangents, mild=True)
        checked = [(program, *_checked(program, judge)) for program in programs]
        del judge  # float64 arrays, gigabytes of them
        allowed = {"timed", "wrong"} if procedure.even_wrong else {"timed"}
        bad = {program.peer.name for program, status, *_ in checked if status not in allowed}
        times = _timed([program for program in programs if program.peer.name not in bad], platform, procedure)
        records += [
            _record(workload, program, status, worst, reason, times.get(program.run.name))
            for program, status, worst, reason in checked
        ]
    order = [peer.name for peer in peers]
    return sorted(records, key=lambda record: order.index(record["peer"]))


def without(workload: Workload, peer: Peer, status: str, reason: str) -> dict[str, Any]:
    """The record of a peer that has no program."""
    return {"workload": workload.name, "peer": peer.name, "direction": None, "status": status, "reason": reason}


def function_of(workload: Workload, peer: Peer) -> Callable[..., Any]:
    """The peer's function of the workload's arguments. Raises Unsupported."""
    if not isinstance(workload, Block):
        return peer.function(workload)
    if peer.framework != "jax":
        raise Unsupported("a block is compared within JAX: another framework's attention is another kernel")
    return workload.of(*map(peer.function, workload.parts()))


@dataclass(frozen=True)
class _Pending:
    """The programs of a peer before they are compiled.

    compile: compiles them, and may run in another thread.
    finish: makes the programs of its result.
    """

    peer: Peer
    compile: Callable[[], Any]
    finish: Callable[[Any], list[PeerProgram]]


def _pending(workload, peer, platform, arguments, cotangents) -> list[_Pending]:
    function = function_of(workload, peer)
    if peer.framework == "jax":
        return [_jax_programs(workload, peer, platform, function, arguments, cotangents)]
    from jln._tools import torch_peers

    programs = []
    for direction, call in torch_peers.calls(workload, function, arguments, cotangents).items():
        if direction == "gradient" and platform != "cpu":
            continue
        run = Run(f"{peer.name}_{direction}", call, torch_peers.finish, torch_peers.PAUSE)
        call()  # compiles, tunes
        outputs = lambda call=call: [torch_peers.to_jax(a) for a in call()]  # noqa: E731
        held = [*arguments, *(() if direction == "forward" else cotangents)]
        programs.append(PeerProgram(peer, direction, run, outputs, torch_peers.peak_bytes(call, held)))
    return [_Pending(peer, lambda: None, lambda _: programs)]


def _jax_programs(workload, peer, platform, function, arguments, cotangents) -> _Pending:
    """The programs of a JAX peer, to be compiled.

    The backward program takes what another program, which nobody times, leaves for it. On the CPU, where writing y is a
    good part of the time, there is one more program, "gradient": both directions with y thrown away.
    """
    dy = workload.signature.packed(cotangents)
    jobs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {"forward": (function, tuple(arguments))}
    trees = []
    if "backward" in workload.directions:

        def saved(*arguments):
            leaves, tree = jax.tree.flatten(jax.vjp(function, *arguments)[1])
            trees.append(tree)
            return leaves

        def backward(leaves, dy):
            return workload.signature.own_gradients(jax.tree.unflatten(trees[0], leaves)(dy))

        jobs["saved"] = saved, tuple(arguments)
        jobs["backward"] = backward, ()
        step, step_arguments = workload.step(function), (*arguments, *cotangents)
        jobs["both"] = step, step_arguments
        if platform == "cpu":

            def gradient(*arrays):
                _, gradients = step(*arrays)
                return gradients

            jobs["gradient"] = gradient, step_arguments
    lowered: dict[str, jax.stages.Lowered] = {}
    for direction, (f, operands) in jobs.items():
        if direction == "backward":
            operands = ([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in lowered["saved"].out_info], dy)
        lowered[direction] = _lowered(f"{peer.name}_{direction}", f, operands)

    def finish(compiled: dict[str, jax.stages.Compiled]) -> list[PeerProgram]:
        operands = {direction: operands for direction, (_, operands) in jobs.items()}
        if "saved" in operands:
            operands["backward"] = compiled["saved"](*operands.pop("saved")), dy
        return [_program(peer, direction, compiled[direction], g) for direction, g in operands.items()]

    return _Pending(peer, lambda: {d: program.compile(peer.options) for d, program in lowered.items()}, finish)


def _lowered(name: str, function: Callable[..., Any], operands: Sequence[Any]) -> jax.stages.Lowered:
    def program(*arguments):
        return function(*arguments)

    program.__name__ = identifier(name)
    return jax.jit(program).lower(*operands)


def identifier(name: str) -> str:
    """The name by which a trace shows a program."""
    return re.sub(r"\W", "_", name)


def _program(peer: Peer, direction: str, compiled: jax.stages.Compiled, operands: Sequence[Any]) -> PeerProgram:
    peak = temporary = None
    if memory := compiled.memory_analysis():
        temporary = memory.temp_size_in_bytes
        peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + temporary
    lacks = peer.evidence and peer.evidence not in (compiled.as_text() or "")
    why = f"XLA made no {peer.evidence} of it" if lacks else ""
    run = Run(identifier(f"{peer.name}_{direction}"), lambda: compiled(*operands))
    return PeerProgram(peer, direction, run, lambda: jax.tree.leaves(compiled(*operands)), peak, temporary, why)


def _checked(program: PeerProgram, judge: Judge) -> tuple[str, Accuracy | None, str]:
    """Return a program's status, its worst result, and the reason for the status."""
    try:
        worst = judge.worst(program.direction, program.outputs())
    except Exception as error:
        return "failed", None, one_line(error)
    if worst.ok:
        return "timed", worst, ""
    return "wrong", worst, f"{worst.name} is off by {worst.error:.2e}, {worst.limit:.2e} is allowed"


def _timed(programs: Sequence[PeerProgram], platform: str, procedure: Procedure) -> dict[str, Times]:
    """The times of programs: on a GPU by the device's clock, in each framework's profiler; else by the wall clock."""
    if platform != "gpu":
        return clocks.walled([program.run for program in programs], procedure.repetitions) if programs else {}
    times = {}
    cold = clocks.COLD_BYTES if procedure.cold else 4
    for framework in ("jax", "torch"):
        runs = [program.run for program in programs if program.peer.framework == framework]
        if not runs:
            continue
        if framework == "jax":
            clock, other = clocks.traced, lambda runs, n, _: clocks.walled(runs, n)
        else:
            from jln._tools import torch_peers

            clock, other = torch_peers.profiled, torch_peers.evented
        try:
            times |= clock(runs, procedure.repetitions, cold)
        except RuntimeError as error:  # no profiler for us here
            why, instead = one_line(error), other(runs, procedure.repetitions, cold)
            times |= {name: replace(t, unprofiled=why) for name, t in instead.items()}
    return times


def _record(workload, program, status, worst, reason, times: Times | None) -> dict[str, Any]:
    record = {"workload": workload.name, "peer": program.peer.name, "direction": program.direction, "status": status}
    if worst:
        record["worst"] = {"result": worst.name, "error": finite_or_text(worst.error), "limit": worst.limit}
    if status == "timed" and times is None:
        status = record["status"] = "wrong"
        reason = "another direction's numbers are"
    if reason:
        record["reason"] = reason
    if times is None:
        return record
    if program.direction == "gradient":  # its bytes are at least those of the backward pass alone
        moved, flops = workload.bytes_once("backward"), workload.product_flops()
    else:
        direction = None if program.direction == "both" else program.direction
        moved, flops = workload.bytes_once(direction), workload.product_flops(direction)
    return record | {
        "clock": times.clock,
        **({"unprofiled": times.unprofiled} if times.unprofiled else {}),
        "median": times.median,
        "minimum": times.minimum,
        "repetitions": len(times.seconds),
        "kernels": times.kernels,
        "bytes_once": moved,
        "product_flops": flops,
        "gb_per_s": moved / times.median / 1e9,
        "tflop_per_s": flops / times.median / 1e12,
        "peak_bytes": program.peak,
        "temporary_bytes": program.temporary,
    }


def ceilings(platform: str, procedure: Procedure) -> dict[str, float]:
    """The bytes/s and flop/s that this machine reaches in programs that only copy or negate, or only multiply."""
    # Elements of 2 bytes: 1 GiB in and out; 16 MiB as the workloads' arrays, whose memory a CPU's allocator keeps.
    large = 2**29 if platform == "gpu" else 2**23
    side = 8192 if platform == "gpu" else 1024
    a = jax.random.normal(jax.random.key(0), (large,), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16 if platform == "gpu" else jnp.float32)
    jobs = {"copy": (jnp.copy, (a,)), "negate": (jnp.negative, (a,)), "matmul": (jnp.matmul, (b, b))}
    programs = []
    for name, (f, operands) in jobs.items():
        compiled = _lowered(f"ceiling_{name}", f, operands).compile()
        programs.append(_program(_CEILING, name, compiled, operands))
    medians = {p.direction: t.median for p in programs if (t := _timed([p], platform, procedure).get(p.run.name))}
    return {
        "bytes_per_s": 2 * a.size * 2 / min(medians["copy"], medians["negate"]),
        "flop_per_s": 2 * side**3 / medians["matmul"],
    }


_CEILING = Peer("ceiling", "what the machine can do", "jax", "jax", lambda workload: jnp.copy)
