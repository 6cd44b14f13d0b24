"""PyTorch's peers: the workloads' functions, their directions as programs, and its profiler as a clock.

Parameters are in x's dtype, as PyTorch's models keep them and its kernels for GPUs want them. This module is imported
only when one of PyTorch's peers is asked for.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
import torch._dynamo.config
import torch._functorch.config
import torch.nn.functional as F

import clocks
from catalogue import EPSILON
from clocks import Run, Times
from composition import Unsupported, composed, multiplied
from workloads import Workload

# For how long threads of PyTorch's CPU kernels may go on to spin: GNU's and Intel's OpenMP take 0.2 s at most.
PAUSE = 0.25
_WINDOW = "jln_bench_window"


def _eager(workload: Workload) -> Callable[..., Any]:
    last, centres = workload.is_over_last, workload.entry.centres

    def norm(x, scale, offset):
        z = x if last else x.movedim(workload.axis, -1)  # its norms are over last axes
        if not centres:
            z = F.rms_norm(z, (workload.width,), scale, EPSILON)
        else:
            z = F.layer_norm(z, (workload.width,), scale, offset, EPSILON)
        return z if last else z.movedim(-1, workload.axis)

    return composed(workload, norm, multiplied, F.silu)


def _compiled(workload: Workload) -> Callable[..., Any]:
    # The backward pass runs several times on what one forward pass saved.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 1000
    return torch.compile(_eager(workload), dynamic=False)


def _liger(workload: Workload) -> Callable[..., Any]:
    if not workload.is_over_last:
        raise Unsupported("its norms are over the last axis")
    if workload.is_linear:
        raise Unsupported("it has no norm fused with a Linear")
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def norm(x, scale, offset):
        if not workload.entry.centres:
            # Not in place: that overwrites the cotangent, which the next run needs.
            return LigerRMSNormFunction.apply(x, scale, EPSILON, 0.0, "llama", False)
        return LigerLayerNormFunction.apply(x, scale, offset, EPSILON)

    return composed(workload, norm, multiplied, F.silu)


FUNCTIONS = {"eager": _eager, "compiled": _compiled, "liger": _liger}


def to_torch(array: jax.Array, dtype: str) -> torch.Tensor:
    return torch.from_dlpack(jax.block_until_ready(array)).to(getattr(torch, dtype), copy=True)


def to_jax(tensor: torch.Tensor) -> jax.Array:
    finish()
    return jax.numpy.from_dlpack(tensor.detach().contiguous())


def finish(_: Any = None) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def calls(
    workload: Workload, function: Callable[..., Any], arguments: Sequence[Any], cotangents: Sequence[Any]
) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Calls that run each direction: "forward", "backward", "both" and "gradient", as the programs of JAX's peers."""
    tensors = jax.tree.map(lambda a: to_torch(a, workload.dtype).requires_grad_(), arguments)
    dys = [to_torch(a, workload.dtype) for a in jax.tree.leaves(cotangents)]
    wanted = jax.tree.leaves(workload.entry.own_gradients(tensors))

    def results() -> list[torch.Tensor]:
        return jax.tree.leaves(function(*tensors))

    def forward() -> list[torch.Tensor]:
        with torch.no_grad():
            return results()

    calls = {"forward": forward}
    if "backward" in workload.directions:
        saved = results()
        calls["backward"] = lambda: list(torch.autograd.grad(saved, wanted, dys, retain_graph=True))

        def both() -> list[torch.Tensor]:
            outputs = results()
            return [*(a.detach() for a in outputs), *torch.autograd.grad(outputs, wanted, dys)]

        calls["both"] = both
        calls["gradient"] = lambda: both()[len(dys) :]
    return calls


def peak_bytes(call: Callable[[], Any], arrays: Sequence[Any]) -> int | None:
    """The most bytes that a call holds, with `arrays` and what it allocates; None on the CPU, where nobody counts."""
    if not torch.cuda.is_available():
        return None
    finish()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    finish()
    return torch.cuda.max_memory_allocated() - before + sum(a.nbytes for a in jax.tree.leaves(arrays))


def profiled(runs: Sequence[Run], repetitions: int, cold_bytes: int = clocks.COLD_BYTES) -> dict[str, Times]:
    """Times by PyTorch's profiler on a GPU, as `clocks.traced` has them from JAX's.

    Raises TraceError where the trace shows no kernel of a run.
    """
    buffer = torch.zeros(cold_bytes // 4, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
    for run in runs:
        run.call()
    order = clocks.shuffled(runs, repetitions)
    windows = _windows(order, lambda: buffer.add_(1))
    if len(windows) != len(order):
        raise clocks.TraceError(f"PyTorch's trace shows {len(windows)} runs of {len(order)}")
    if not all(windows):
        raise clocks.TraceError("PyTorch's trace shows runs without kernels")
    return {r.name: clocks.program_times([w for o, w in zip(order, windows, strict=True) if o is r]) for r in runs}


def _windows(order: Sequence[Run], chill: Callable[[], Any]) -> list[list[clocks.Event]]:
    # The CPU's events carry the windows.
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for run in order:
            chill()
            finish()  # or what is left of it would be in the window
            with torch.profiler.record_function(_WINDOW):
                run.call()
                finish()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return clocks.torch_events(path.read_text(), _WINDOW)


def evented(runs: Sequence[Run], repetitions: int, cold_bytes: int = clocks.COLD_BYTES) -> dict[str, Times]:
    """Times by events, for a GPU whose profiler cannot be read: gaps between kernels are included."""
    buffer = torch.zeros(cold_bytes // 4, dtype=torch.int32, device="cuda")
    taken: dict[str, list[float]] = {run.name: [] for run in runs}
    for run in runs:
        run.call()
    for run in clocks.shuffled(runs, repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        finish()
        buffer.add_(1)
        start.record()
        run.call()
        end.record()
        finish()
        taken[run.name].append(start.elapsed_time(end) * 1e-3)
    return {name: Times(tuple(seconds), "events") for name, seconds in taken.items()}
