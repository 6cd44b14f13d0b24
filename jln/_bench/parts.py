"""What peers of every framework are made of, and their versions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from jln._bench.workloads import Workload
from jln._catalogue import GATE_FIRST
from jln._triton import target


class Unsupported(Exception):
    """A peer has nothing for a workload, or does not run here; the message says what."""


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
    """A workload's function of its parts: norm(x, scale, offset or None), linear(z, kernel, bias or None), of which
    several are several, silu(z).

    The sum with a residual is the peer's `+`, in its dtype. of_examples: whether the norm may have parameters of each
    example; raises Unsupported where it may not and has.
    """
    names, adds = workload.signature.names, workload.entry.adds
    gate_first = workload.options == GATE_FIRST
    if workload.of_examples and not of_examples:
        raise Unsupported("its norms have one scale and one offset for all examples")

    def function(*arguments: Any) -> Any:
        given = dict(zip(names, arguments, strict=True))
        x = given["x"]
        if "x_bias" in given:
            x = x + given["x_bias"]
        if "gate" in given:
            x = x * given["gate"]
        if workload.entry.in_front is not None:
            x = norm(x, given.get("x_scale"), None)
        x = x + given["residual"] if adds else x
        if gate_first:
            x = x * silu(given["z"])
        y = norm(x, given.get("scale"), given.get("offset"))
        if "z" in given and not gate_first:
            y = y * silu(given["z"])
        if workload.entry.adds_behind:
            y = given["residual"] + y
        if workload.is_linear:
            y = linears(y, given["kernel"], given.get("bias"), linear)
        return (y, x) if adds else y

    return function


def multiplied(z: Any, kernel: Any, bias: Any) -> Any:
    """A Linear in plain operations, of any framework's arrays."""
    y = z @ kernel
    return y if bias is None else y + bias


def linears(z: Any, kernel: Any, bias: Any, linear: Callable[..., Any]) -> Any:
    """linear(z, kernel, bias), or of each kernel of a tuple."""
    if not isinstance(kernel, tuple):
        return linear(z, kernel, bias)
    return tuple(linear(z, k, b) for k, b in zip(kernel, bias or (None,) * len(kernel), strict=True))


def one_line(error: Exception) -> str:
    """Another library's errors run over many."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def version(distribution: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
