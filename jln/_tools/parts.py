"""Helpers of the peers, whatever their framework."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from jln._tools.catalogue import GATE_FIRST
from jln._tools.workloads import Workload
from jln._triton import target


class Unsupported(Exception):
    """The error of a peer that has nothing for a workload, or does not run on this machine; its message says why."""


def kernels_asked_for() -> dict[str, str]:
    """The arguments with which an operator runs its kernels on the chip in use; none where it does so unasked."""
    chip = target.target_chip()
    return {} if chip is None or chip.platform in target.UNASKED else {"implementation": "triton"}


def composed(
    workload: Workload,
    norm: Callable[..., Any],
    linear: Callable[..., Any],
    silu: Callable[[Any], Any],
    *,
    of_examples: bool = False,
) -> Callable[..., Any]:
    """A workload's function, composed of `norm(x, scale, offset)`, `linear(z, kernel, bias)` and `silu(z)`.

    offset and bias may be None. Several Linears are several calls. The sum with a residual is the framework's `+`, in
    its dtype.

    of_examples: whether the norm can take parameters of each example. Where it cannot, a workload that has them raises
      Unsupported.
    """
    names, adds = workload.signature.names, workload.entry.adds
    gate_first = workload.options == GATE_FIRST
    if workload.of_examples and not of_examples:
        raise Unsupported("its norms have one scale and one offset for all examples")

    def function(*arguments: Any) -> Any:
        operands = dict(zip(names, arguments, strict=True))
        x = operands["x"]
        if workload.entry.both_sides:
            x = norm(x, operands.get("x_scale"), operands.get("x_offset"))
        if "x_bias" in operands:
            x = x + operands["x_bias"]
        if "gate" in operands:
            x = x * operands["gate"]
        x = x + operands["residual"] if adds else x
        if gate_first:
            x = x * silu(operands["z"])
        y = norm(x, operands.get("scale"), operands.get("offset"))
        if "z" in operands and not gate_first:
            y = y * silu(operands["z"])
        if workload.entry.adds_behind:
            y = operands["residual"] + y
        if workload.is_linear:
            y = linears(y, operands["kernel"], operands.get("bias"), linear)
        return (y, x) if adds else y

    return function


def multiplied(z: Any, kernel: Any, bias: Any) -> Any:
    """A Linear in plain operations, for arrays of any framework."""
    y = z @ kernel
    return y if bias is None else y + bias


def linears(z: Any, kernel: Any, bias: Any, linear: Callable[..., Any]) -> Any:
    """`linear(z, kernel, bias)`, or for a tuple of kernels a tuple of such products."""
    if not isinstance(kernel, tuple):
        return linear(z, kernel, bias)
    return tuple(linear(z, k, b) for k, b in zip(kernel, bias or (None,) * len(kernel), strict=True))


def one_line(error: Exception) -> str:
    """The message of an error of another library on one line, however many it has."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def version(distribution: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
