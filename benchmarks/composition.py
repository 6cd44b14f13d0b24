"""Workloads' functions composed of another library's norm, Linear and silu, or of plain operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from catalogue import GATE_FIRST
from workloads import Workload


class Unsupported(Exception):
    """The error of a peer that has nothing for a workload, or does not run on this machine; its message says why."""


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
    entry, names, is_linear = workload.entry, workload.entry.names, workload.is_linear
    gate_first = workload.options == GATE_FIRST
    if workload.of_examples and not of_examples:
        raise Unsupported("its norms have one scale and one offset for all examples")

    def function(*arguments: Any) -> Any:
        operands = dict(zip(names, arguments, strict=True))
        x = operands["x"]
        if entry.both_sides:
            x = norm(x, operands.get("x_scale"), None)
        if "x_bias" in operands:
            x = x + operands["x_bias"]
        if "gate" in operands:
            x = x * operands["gate"]
        x = x + operands["residual"] if entry.adds else x
        if gate_first:
            x = x * silu(operands["z"])
        y = norm(x, operands.get("scale"), operands.get("offset"))
        if "z" in operands and not gate_first:
            y = y * silu(operands["z"])
        if entry.adds_behind:
            y = operands["residual"] + y
        if is_linear:
            y = linears(y, operands["kernel"], operands.get("bias"), linear)
        return (y, x) if entry.adds else y

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
