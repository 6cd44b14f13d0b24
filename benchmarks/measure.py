"""Measurement of one workload: all peers' programs compiled, their numbers checked, then all timed together."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import catalogue
import clocks
import jln
from clocks import Run, Times
from jln.testing.operators import Error, Judge
from peers import Peer, Unsupported
from rows import one_line
from workloads import Workload


@dataclass(frozen=True)
class PeerProgram:
    """A compiled program of one peer in one direction.

    peak, temporary: the most bytes that it holds, with its arguments and results, and without. None if unknown.
    """

    peer: Peer
    direction: str
    run: Run
    outputs: Callable[[], list[jax.Array]]
    peak: int | None = None
    temporary: int | None = None


def measure(workload: Workload, peers: Sequence[Peer], repetitions: int) -> list[dict[str, Any]]:
    """Return a record for each peer and direction, or one for a peer with the reason why there is no measurement."""
    platform = jax.devices()[0].platform
    arguments, cotangents = jax.device_put(workload.draw())
    records: list[dict[str, Any]] = []
    pending: list[_Pending] = []
    for peer in peers:
        try:
            if (why := peer.missing(platform)) is not None:
                raise Unsupported(why)
            pending.append(_pending(workload, peer, platform, arguments, cotangents))
        except Exception as error:  # whatever a peer raises is its own affair, and the others' are measured
            records.append(without(workload, peer, error))
    programs: list[PeerProgram] = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # XLA compiles without Python's lock
        jobs = [(p.peer, p.finish, pool.submit(p.compile)) for p in pending]
    for peer, finish, job in jobs:
        try:
            programs += finish(job.result())
        except Exception as error:
            records.append(without(workload, peer, error))
    if programs:
        judge = _judge(workload, arguments, cotangents)
        checked = [(program, *_checked(workload, program, judge)) for program in programs]
        del judge  # float64 arrays, gigabytes of them
        times = _timed([program for program, _, worst, _ in checked if worst is not None], platform, repetitions)
        records += [
            _record(workload, program, status, worst, reason, times.get(program.run.name))
            for program, status, worst, reason in checked
        ]
    order = [peer.name for peer in peers]
    return sorted(records, key=lambda record: order.index(record["peer"]))


def without(workload: Workload, peer: Peer, error: Exception) -> dict[str, Any]:
    """The record of a peer that has no program."""
    status = "skipped" if isinstance(error, Unsupported) else "failed"
    reason = str(error) if status == "skipped" else one_line(error)
    return {"workload": workload.name, "peer": peer.name, "direction": None, "status": status, "reason": reason}


def _judge(workload: Workload, arguments: Sequence[Any], cotangents: Sequence[Any]) -> Judge:
    """The judge of a workload's results, milder than of an operator: others add up parameters' gradients in any order.

    That is a rounding more for each of M rows, of partial sums at most as large as the largest result, each independent
    of the others.
    """

    @jax.jit
    def truth(arguments: Sequence[Any], cotangents: Sequence[Any]) -> dict[str, jax.Array]:
        given = [*arguments, *(cotangents if "backward" in workload.directions else ())]
        results = workload.step(workload.function(jln.reference))(*given)
        return dict(zip(workload.names(), jax.tree.leaves(results), strict=True))

    examples = math.prod(workload.sizes()["examples"])
    sums: dict[str, int] = {}
    for a in workload.entry.parameters:
        rows = workload.rows // (examples if "examples" in a.dimensions else 1)
        sums |= {name: rows for name in catalogue.flat_names([(f"d{a.name}", workload.arrays()[a.name])])}
    return Judge(truth, truth(arguments, cotangents), (arguments, cotangents), workload.dtype, sums)


@dataclass(frozen=True)
class _Pending:
    """The programs of a peer before they are compiled.

    compile: compiles them, and may run in another thread.
    finish: makes the programs of its result.
    """

    peer: Peer
    compile: Callable[[], Any]
    finish: Callable[[Any], list[PeerProgram]]


def _pending(workload, peer, platform, arguments, cotangents) -> _Pending:
    function = peer.function(workload)
    if peer.framework == "jax":
        return _jax_programs(workload, peer, platform, function, arguments, cotangents)
    import torch_peers

    programs = []
    for direction, call in torch_peers.calls(workload, function, arguments, cotangents).items():
        if direction == "gradient" and platform != "cpu":
            continue
        run = Run(f"{peer.name}_{direction}", call, torch_peers.finish, torch_peers.PAUSE)
        call()  # compiles, tunes
        outputs = lambda call=call: [torch_peers.to_jax(a) for a in call()]  # noqa: E731
        held = [*arguments, *(() if direction == "forward" else cotangents)]
        programs.append(PeerProgram(peer, direction, run, outputs, torch_peers.peak_bytes(call, held)))
    return _Pending(peer, lambda: None, lambda _: programs)


def _jax_programs(workload, peer, platform, function, arguments, cotangents) -> _Pending:
    """The programs of a JAX peer, to be compiled.

    The backward program takes what another program, which nobody times, leaves for it. On the CPU, where writing y is a
    good part of the time, there is one more program, "gradient": both directions with y thrown away.
    """
    dy = workload.entry.packed(cotangents)
    jobs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {"forward": (function, tuple(arguments))}
    trees = []
    if "backward" in workload.directions:

        def saved(*arguments):
            leaves, tree = jax.tree.flatten(jax.vjp(function, *arguments)[1])
            trees.append(tree)
            return leaves

        def backward(leaves, dy):
            return workload.entry.own_gradients(jax.tree.unflatten(trees[0], leaves)(dy))

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
    if peer.evidence and peer.evidence not in (compiled.as_text() or ""):
        raise Unsupported(f"XLA made no {peer.evidence} of it")
    run = Run(identifier(f"{peer.name}_{direction}"), lambda: compiled(*operands))
    return PeerProgram(peer, direction, run, lambda: jax.tree.leaves(compiled(*operands)), peak, temporary)


def _checked(workload: Workload, program: PeerProgram, judge: Judge) -> tuple[str, Error | None, str]:
    """Return a program's status, the result that is nearest to its limit, and the reason for the status."""
    names = workload.names(program.direction)
    try:
        errors = judge.errors(dict(zip(names, program.outputs(), strict=True)))
    except Exception as error:
        return "failed", None, one_line(error)
    worst = max(errors, key=lambda e: math.inf if math.isnan(e.error) else e.error / (e.limit or 1))
    if worst.error <= worst.limit:
        return "timed", worst, ""
    return "wrong", worst, f"{worst.name} is off by {worst.error:.2e}, {worst.limit:.2e} is allowed"


def _timed(programs: Sequence[PeerProgram], platform: str, repetitions: int) -> dict[str, Times]:
    """The times of programs: on a GPU by the device's clock, in each framework's profiler; else by the wall clock."""
    if platform != "gpu":
        return clocks.walled([program.run for program in programs], repetitions) if programs else {}
    times = {}
    for framework in ("jax", "torch"):
        runs = [program.run for program in programs if program.peer.framework == framework]
        if not runs:
            continue
        clock, other = clocks.traced, clocks.walled
        if framework == "torch":
            import torch_peers

            clock, other = torch_peers.profiled, torch_peers.evented
        try:
            times |= clock(runs, repetitions)
        except RuntimeError as error:  # no profiler for us here
            why, instead = one_line(error), other(runs, repetitions)
            times |= {name: replace(t, unprofiled=why) for name, t in instead.items()}
    return times


def _record(workload, program, status, worst, reason, times: Times | None) -> dict[str, Any]:
    record = {"workload": workload.name, "peer": program.peer.name, "direction": program.direction, "status": status}
    if worst:
        error = worst.error if math.isfinite(worst.error) else str(worst.error)  # JSON has no such numbers
        record["worst"] = {"result": worst.name, "error": error, "limit": worst.limit}
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


def ceilings(repetitions: int) -> dict[str, float]:
    """The bytes/s and flop/s that this machine reaches in programs that only copy or negate, or only multiply."""
    platform = jax.devices()[0].platform
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
    medians = {p.direction: t.median for p in programs if (t := _timed([p], platform, repetitions).get(p.run.name))}
    seconds = min(medians["copy"], medians["negate"])
    return {"bytes_per_s": 2 * a.size * 2 / seconds, "flop_per_s": 2 * side**3 / medians["matmul"]}


_CEILING = Peer("ceiling", "what the machine can do", "jax", "jax", lambda workload: jnp.copy)
