"""The kernels of what stands between two Linears, with the bytes of each array that they read and write, compiled."""

from __future__ import annotations

from typing import Any

import jax

from jln import program
from jln._tools.peers import PEERS
from jln._tools.workloads import WORKLOADS
from jln.program import hlo

JUNCTION = "x-bias-4096"
# Of the junction's kernels by jln, in order, and of what they write in order (jln/_junction/launches.py).
LAUNCHES = {
    "forward_kernel": ("y", "total", "mean", "rstd"),
    "backward_kernel": ("dx", "shares"),
    "reduce_kernel": ("dscale", "doffset", "dx_bias"),
}


def compiled() -> dict[str, Any]:
    """Compile the junction by plain jnp and by jln: their kernels, with the bytes of each array read and written."""
    workload = WORKLOADS[JUNCTION]
    signature = workload.signature
    results = [a.name for a in signature.results]
    arguments = [*signature.names, *(f"d{name}" for name in results)]
    outputs = [*results, *("d" + name for name in signature.names if name != "residual")]
    found: dict[str, Any] = {"workload": JUNCTION, "chip": "h200", "jax": jax.__version__, "kernels": {}}
    for peer in ("jnp", "jln"):
        step = workload.step(PEERS[peer].function(workload))
        compiled = program.compile_for(step, *workload.step_arguments())
        kernels = flow(compiled.hlo, arguments, outputs)
        found["kernels"][peer] = named(kernels) if peer == "jln" else kernels
        moved = sum(sum(k["reads"].values()) + sum(k["writes"].values()) for k in kernels)
        assert (moved, len(kernels)) == (compiled.bytes_total, compiled.launches), "the arrows are all bytes there are"
    return found


def flow(text: str, arguments: list[str], outputs: list[str]) -> list[dict[str, Any]]:
    """List the kernels of a program without loops, with the bytes of the arrays that each reads and writes.

    Arrays that are neither arguments nor results have their kernel's name and their place among its results.
    """
    entry = hlo._parse(text)
    launched = {k.name: k for k in hlo.launches(text)}
    names = {a.buffer(): name for name, a in zip(outputs, entry.outputs, strict=True)}
    names |= {a.buffer(): arguments[int(a.name.split("_")[1])] for a in entry.parameters.values()}
    kernels = []
    for value in entry.values.values():
        if value.name in launched:
            parts = {u.buffer(): u.bytes for u, _ in value.users if u.kind == "get-tuple-element"}
            written = parts or {value.buffer(): value.bytes}
            kernels.append(
                {
                    "name": value.name,
                    "reads": {names.get(b, "".join(b)): size for b, size in hlo.reads(value).items()},
                    "writes": {names.get(b, "".join(b)): size for b, size in written.items()},
                }
            )
    return kernels


def named(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give jln's kernels, and what they write, the names that these have in the source."""
    names = {
        f"{kernel['name']} index={i}": name
        for kernel, results in zip(kernels, LAUNCHES.values(), strict=True)
        for i, name in enumerate(results)
    }
    return [
        {"name": name} | {way: {names.get(a, a): size for a, size in k[way].items()} for way in ("reads", "writes")}
        for name, k in zip(LAUNCHES, kernels, strict=True)
    ]
