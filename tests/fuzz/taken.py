"""Questions about a drawn case: what kernels and eight bits take, and what is plain jnp."""

from __future__ import annotations

import dataclasses
import math

from case import Case
from jln._junction.arguments import FEWEST_ROWS

PARAMETERS = ("scale", "offset", "x_scale", "gate", "x_bias")
OF_AXES, OF_PARAMETERS, OF_VMAP = (
    "takes rows whose elements lie side by side",
    "takes parameters that vary along x's first axes",
    "takes the examples of this vmap in front of the rows",
)


def refused(case: Case) -> str:
    """The words in which kernels, or eight bits, refuse a case for its axes and parameters; "" where they take it."""
    if case.implementation != "triton" and case.quantize is None:
        return ""
    ndim, h, end = len(case.shape), min(case.axes), max(case.axes) + 1
    own = {i for axes in varying(case).values() for i in axes}
    first = next((i for i in range(h) if i not in own and case.shape[i] > 1), h)
    others = {i for i in own if i > first}
    is_taken = not others or (end == ndim and others == {h - 1})
    if end != ndim or end - h != len(case.axes):
        leaves = case.implementation != "triton" and end - h == len(case.axes) and is_taken  # to XLA
        return "" if leaves else OF_AXES
    return "" if is_taken else OF_PARAMETERS


def varying(case: Case) -> dict[str, tuple[int, ...]]:
    """The axes of rows along which each parameter of an example varies."""
    found = {}
    for name in case.operands.keys() & {*PARAMETERS}:
        shape = case.example_shape(name)
        of_rows = (i for i, n in enumerate(shape) if n > 1 and i not in case.axes)
        found[name] = tuple(of_rows) if case.kind(name) == "x" else ()
    return found


def may_be_plain_jnp(case: Case) -> bool:
    """Return whether JAX may differentiate the operator itself, and round what is between its steps as it is written.

    Of parameters that no operation takes; of groups of few rows; of examples of a vmap inside of the derivative that
    share an array of rows, are behind rows in one, or differ in a Linear.
    """
    if case.implementation == "triton" or case.quantize is not None:
        return False
    own = {i for axes in varying(case).values() for i in axes}
    rows = math.prod(n for i, n in enumerate(case.shape) if i not in {*case.axes, *own})
    narrow = lambda name: case.kind(name) == "x" and all(case.example_shape(name)[a] == 1 for a in case.axes)  # noqa: E731
    shared = sum({*axes} != own or narrow(name) for name, axes in varying(case).items())
    inner = [i for i, level in enumerate(case.levels) if i >= case.outer and level.by == "vmap"]
    places = {name: {a.axes[i] for i in inner} for name, a in case.operands.items()}
    return (
        bool(refused(dataclasses.replace(case, quantize="any")))
        or rows < FEWEST_ROWS * (len(varying(case)) if inner else shared)
        or any(not places[name] <= {0} for name in ("x", "residual", "z") if name in places)
        or any(not places[name] <= {None} for name in places if name.startswith(("kernel", "bias")))
    )
