"""The record of a case: a call of an operator with its transformations, what is asked of it, and its arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from catalogue import EPSILON, Operator
from jln._junction.arguments import FEWEST_ROWS

SCALE, LARGEST = "scale of y", "largest |y|"  # of eight bits, written out to x's size
OF_ROWS = ("total", SCALE, LARGEST)


@dataclasses.dataclass(frozen=True)
class Level:
    """A loop over examples, from the outermost in: jax.vmap, or jax.lax.scan.

    out: the axis of the examples in results.
    """

    by: str
    size: int
    out: int


def grown(shape: tuple[int, ...], levels: tuple[Level, ...], place: Callable) -> tuple[tuple, tuple]:
    """A shape with an axis for each level, added from the innermost out, and these axes from the outermost in.

    place: of a level's number, the level and the shape so far, where its axis is put; None where it has none.
    """
    axes: list[int | None] = []
    for i, level in reversed(list(enumerate(levels))):
        axis = place(i, level, shape)
        if axis is not None:
            shape = (*shape[:axis], level.size, *shape[axis:])
        axes.insert(0, axis)
    return shape, tuple(axes)


@dataclasses.dataclass(frozen=True)
class Array:
    """An operand, or a result's cotangent.

    shape: with the axes of all levels on which it has one.
    axes: for each level, from the outermost in, its axis in the array that is left there, or None.
    small: the shape of what the program is given, which it broadcasts to `shape`.
    """

    dtype: str
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    small: tuple[int, ...]
    mean: float = 0.0
    spread: float = 1.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an operator, and what is asked of it.

    shape: that of an example's x. axes: the normalised ones, in the order given.
    several: the number of Linears as a tuple; 0 for one.
    outer: the number of levels around the derivative; the others are inside it.
    asks: "value", "gradient", "tangent" or "second".
    number: a static gate.
    quantize: as of the operators.
    """

    seed: int
    form: Operator
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    levels: tuple[Level, ...]
    outer: int
    operands: dict[str, Array]
    cotangents: dict[str, Array]
    wanted: tuple[str, ...]
    asks: str
    static: dict[str, Any]
    several: int = 0
    implementation: str | None = None
    number: float | None = None
    constant_rows: bool = False
    jitted: bool = True
    values_too: bool = True
    policy: str | None = None
    by_loss: bool = False
    twice_reverse: bool = False
    quantize: Any = None

    epsilon = property(lambda self: self.static.get("epsilon", EPSILON))

    def kind(self, name: str) -> str:
        """Name the layout of an operand or a result: "x" for all that have x's rank."""
        if name.startswith(("kernel", "bias")):
            return name.split("[")[0]
        if name.startswith("y") and self.form.is_linear:
            return "product"
        if name not in self.operands or name in ("x", "residual", "z"):
            return "x"
        shape = self.example_shape(name)
        return "number" if shape == () else "H" if shape == tuple(self.shape[a] for a in self.axes) else "x"

    def example_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an example's operand."""
        shape = self.operands[name].shape
        for axis in self.operands[name].axes:
            if axis is not None:
                shape = (*shape[:axis], *shape[axis + 1 :])
        return shape

    def result_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an example's result."""
        if name in OF_ROWS or not self.form.is_linear:
            return self.shape
        return (*self.shape[:-1], *self.example_shape(f"kernel{name[1:]}")[1:])

    def in_words(self) -> str:
        """The case as lines of text."""
        lines = [f"seed {self.seed}: {self.form.title}, {self.asks} of an x {self.shape} normalised over {self.axes}"]
        for i, level in enumerate(self.levels):
            where = "outside" if i < self.outer else "inside"
            lines.append(f"  {level.by} of {level.size}, {where} the derivative, results along {level.out}")
        for name, a in (self.operands | {f"cotangent of {n}": c for n, c in self.cotangents.items()}).items():
            made = "" if a.small == a.shape else f", broadcast from {a.small}"
            more = f", examples along {a.axes}" if self.levels else ""
            lines.append(f"  {name}: {a.dtype} {a.shape}{made}{more}, {a.mean:g} +- {a.spread:g}")
        said = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in SAID_BEFORE}
        return "\n".join([*lines, *(f"  {name}={value!r}" for name, value in said.items() if value is not None)])


SAID_BEFORE = ("seed", "form", "shape", "axes", "levels", "outer", "operands", "cotangents", "asks")


def result_dtype(case: Case, name: str) -> str:
    """The dtype of a result."""
    of = {n: a.dtype for n, a in case.operands.items()}
    if name in (SCALE, LARGEST) or (name == "y" and case.quantize is not None and not case.form.is_linear):
        return "float32"
    if name == "total":
        return jnp.promote_types(of["x"], of["residual"]).name
    if case.form.is_linear:
        return jnp.promote_types(of["x"], of[f"kernel{name[1:]}"]).name
    if "dtype" in case.static:
        return case.static["dtype"]
    return jnp.promote_types(of["x"], of["residual"]).name if case.form.adds_behind else of["x"]


def made(case: Case) -> tuple[dict, dict, dict]:
    """The arrays of a case in NumPy: operands, cotangents, directions of the operands that are wanted."""
    r = np.random.default_rng(case.seed)

    def array(a: Array, dtype: str):
        values = a.spread * r.standard_normal(a.small) + a.mean
        return values.astype(jnp.dtype(dtype))

    operands = {n: array(a, a.dtype) for n, a in case.operands.items()}
    if case.constant_rows:
        operands["x"] = np.broadcast_to(operands["x"].ravel()[:1], operands["x"].shape)
    cotangents = {n: array(a, result_dtype(case, n)) for n, a in case.cotangents.items()}
    directions = {}
    if case.asks in ("tangent", "second"):
        plain = {n: dataclasses.replace(case.operands[n], mean=0.0) for n in case.wanted}
        directions = {n: array(a, a.dtype) for n, a in plain.items()}
    return operands, cotangents, directions


# What kernels and eight bits take of a case, and what is plain jnp.
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
