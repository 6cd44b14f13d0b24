"""Cases drawn at random: everything that a call of an operator can be made of, together."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import jax.numpy as jnp
import numpy as np

import jln
from jln._tools.catalogue import EPSILON, FORMS, Operator

# Powers of two, their neighbours, 1 and what models have. From 32 rows of 64 elements on XLA gives sums on a CPU to
# another library, so these are frequent.
H = (
    1,
    2,
    3,
    7,
    8,
    16,
    31,
    32,
    33,
    *(64,) * 6,
    65,
    100,
    127,
    *(128,) * 3,
    129,
    256,
    257,
    512,
    768,
    1000,
    1024,
    2047,
    2048,
)
ROWS = (1, 1, 2, 2, 3, 3, 4, 5, 8, 17, *(32,) * 4, 33, 48, 64)
FEATURES = ((1,), (2,), (3,), (8,), (16,), (17,), (32,), (4, 3), (130,))
SPREADS = ((0.0, 1.0), (1.0, 1.0), (100.0, 1.0), (0.0, 0.01), (0.0, 30.0))  # of rows: mean and standard deviation
WIDE, FLOAT32, NARROW = "float64", "float32", ("bfloat16", "float16")
POLICIES = (
    "everything_again", "statistics", "dots", "jln.dots_saveable", "jln.dots_and_statistics_saveable",
)  # fmt: skip
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
        for name, value in self.static.items():
            lines.append(f"  {name}={value!r}")
        for i, level in enumerate(self.levels):
            where = "outside" if i < self.outer else "inside"
            lines.append(f"  {level.by} of {level.size}, {where} the derivative, results along {level.out}")
        for name, a in (self.operands | {f"cotangent of {n}": c for n, c in self.cotangents.items()}).items():
            made = "" if a.small == a.shape else f", broadcast from {a.small}"
            more = f", examples along {a.axes}" if self.levels else ""
            lines.append(f"  {name}: {a.dtype} {a.shape}{made}{more}, {a.mean:g} +- {a.spread:g}")
        if self.number is not None:
            lines.append(f"  gate={self.number}")
        said = {
            "wanted": self.wanted, "implementation": self.implementation, "jitted": self.jitted, "policy": self.policy,
            "constant rows": self.constant_rows, "values too": self.values_too, "by a loss": self.by_loss,
            "reverse mode twice": self.twice_reverse, "quantize": self.quantize,
        }  # fmt: skip
        return "\n".join([*lines, "  " + ", ".join(f"{n} {v}" for n, v in said.items())])


def draw(seed: int) -> Case:
    """The case of a seed; of every fifth in eight bits where it can be."""
    case = Draw(seed).case()
    return in_eight_bits(case) if seed % 5 == 2 else case


def in_eight_bits(case: Case) -> Case:
    """The case with its result, or its products, in eight bits; as it is where it has what does not go with them."""
    if case.asks not in ("value", "gradient") or any(a.dtype == WIDE for a in case.operands.values()):
        return case
    r = random.Random(f"eight bits of {case.seed}")
    dtype = r.choice((jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2))
    kinds = [jln.Float8(r.choice((0.003, 0.02, 0.1, 1.0)), dtype), jln.Float8(dtype=dtype)]
    if case.axes == (len(case.shape) - 1,) and case.shape[-1] % 32 == 0:
        kinds += [jln.MXFloat8(dtype)] * 2
    static = {n: a for n, a in case.static.items() if n not in ("dtype", "precision")} | {"forward_mode": False}
    quantize = r.choice(kinds)
    if quantize == jln.Float8(dtype=dtype) and r.random() < 0.4:
        quantize = jln.Float8(rule_of_scale, dtype)
    return dataclasses.replace(case, static=static, quantize=quantize)


def rule_of_scale(amax):
    """A scale that is made of the largest number, as a user may write it, of numbers in NumPy, too."""
    return (amax + 1e-3) / 448


class Draw:
    """A draw of the case of a seed: of sizes that a CPU computes. A subclass may have others.

    largest: the most elements that x has, over all levels; of a case by Triton's interpreter.
    """

    h, rows, features = H, ROWS, FEATURES
    largest, largest_by_kernels = 2**16, 2**12

    def __init__(self, seed: int):
        self.seed, self.r, self.usual = seed, random.Random(seed), False

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def case(self) -> Case:
        r = self.r
        form = r.choice(list(FORMS.values()))
        implementation = r.choices((None, "xla", "triton"), (2, 7, 2))[0]
        by_kernels = implementation == "triton"
        # What models have under vmap, and what jaxlib gives to another library.
        self.usual = not by_kernels and self.chance(0.3)
        asks = r.choices(("value", "gradient", "tangent", "second"), (5, 70, 10, 15))[0]
        absent = [a.name for a in form.arguments if a.optional and self.chance(0.25)]
        levels = tuple(
            Level(r.choices(("vmap", "scan"), (4, 1))[0], r.choice((1, 2, 3, 3, 4, 5)), 0)
            for _ in range(r.choices((0, 1, 2, 3), (0 if self.usual else 5, 10, 5, 1))[0])
        )
        outer = r.choice((0, 0, *range(len(levels) + 1))) if asks in ("gradient", "second") else 0
        largest = (self.largest_by_kernels if by_kernels else self.largest) // math.prod(level.size for level in levels)
        shape, axes = self.shape_and_axes(form, largest)
        normalised = tuple(shape[a % len(shape)] for a in axes)
        dtypes = self.dtypes(form, asks)

        # An example's own shapes.
        shapes = {}
        several = r.choice((2, 3)) if form.is_linear and self.chance(0.25) else 0
        features = [
            r.choice(self.features[:-1] if several or by_kernels else self.features) for _ in range(several or 1)
        ]
        number = None
        for a in form.arguments:
            if a.name in absent:
                continue
            if a.role == "activation":
                shapes[a.name] = shape
            elif a.role in ("scale", "offset", "gate"):
                shapes[a.name] = self.parameter(a.role, shape, axes, normalised)
            elif a.name == "x_bias":
                shapes[a.name] = normalised
            else:
                for i, f in enumerate(features):
                    own = f"{a.name}[{i}]" if several else a.name
                    if a.name == "kernel" or self.chance(0.8):
                        shapes[own] = (*normalised, *f) if a.name == "kernel" else f
        if "gate" in shapes and self.chance(0.1):
            del shapes["gate"]
            number = r.choice((0.5, -2.0, 0.0))

        # Levels: each has an operand of examples, or jax.vmap would have nothing to go over.
        levels, operands = self.with_levels(shapes, levels, outer, dtypes)
        static = self.static(form, shapes, dtypes, axes, len(shape))
        static["forward_mode"] = asks == "tangent" or self.chance(0.2)
        # Not drawn with the rest, so that every seed has the rest that it had.
        if form.is_linear and not static["forward_mode"] and self.seed % 3 == 0:
            static["remat"] = True
        axes = tuple(a % len(shape) for a in axes)

        case = Case(
            self.seed, form, shape, axes, levels, outer, operands, {}, (), asks, static, several,
            implementation=implementation,
            number=number,
            constant_rows=self.chance(0.05),
            jitted=self.chance(0.95),
            values_too=self.chance(0.4),
            policy=r.choice(POLICIES) if self.chance(0.25) else None,
            by_loss=self.chance(0.5),
            twice_reverse=self.chance(0.4),
        )  # fmt: skip
        names = list(operands)
        wanted = r.choice(([r.choice(names)], r.sample(names, r.randint(1, len(names))), names))
        return dataclasses.replace(
            case,
            wanted=tuple(n for n in names if n in wanted) if asks != "value" else (),
            cotangents=self.cotangents(case) if asks in ("gradient", "second") else {},
        )

    def shape_and_axes(self, form: Operator, largest: int):
        """Draw an example's shape of x, and the normalised axes as they are given."""
        r = self.r
        if self.usual:
            return (*r.choice(((), (), (2,))), r.choice((32, 48)), r.choice((64, 128))), (-1,)
        ndim = r.choices((1, 2, 3, 4), (1, 8, 9, 2))[0]
        axes = (-1,)
        if not form.is_linear and self.chance(0.4):
            axes = tuple(r.sample(range(ndim), min(ndim, r.choice((1, 1, 2)))))
        normalised = [a % ndim for a in axes]
        shape = [r.choice(self.h if i in normalised else self.rows) for i in range(ndim)]
        if len(axes) == 2:
            shape[normalised[1]] = r.choice((1, 2, 3, 8, 16))
        while math.prod(shape) > largest:
            at = max(range(ndim), key=lambda i: (i not in normalised or shape[i] > 2048, shape[i]))
            if shape[at] == 1:
                at = max(range(ndim), key=lambda i: shape[i])
            shape[at] = max(1, shape[at] // 2)
        return tuple(shape), tuple(a if self.chance(0.5) else a % ndim - ndim for a in axes)

    def parameter(self, role: str, shape, axes, normalised):
        if role == "gate" and self.chance(0.1):
            return ()
        if self.chance(0.6):
            return normalised
        chosen = {a % len(shape) for a in axes}
        of_rows = role == "gate" and self.chance(0.5)
        return tuple(
            (1 if of_rows else n) if i in chosen else (n if self.chance(0.5) else 1) for i, n in enumerate(shape)
        )

    def dtypes(self, form: Operator, asks: str):
        """Draw a function from an array's role to its dtype."""
        r = self.r
        if self.usual or self.chance(0.5):
            return lambda role: FLOAT32
        if asks == "second":  # JAX adds up an operand's several parts in the operand's dtype
            return lambda role: WIDE
        some = (FLOAT32, WIDE, *NARROW)
        if self.chance(0.5):
            one = r.choice(some)
            other = r.choice((one, FLOAT32))
            return lambda role: other if role in ("scale", "offset") else one
        return lambda role: r.choice(some)

    def with_levels(self, shapes, levels, outer, dtypes):
        r = self.r
        names = list(shapes)
        batched = {n: [] for n in names}
        for _ in levels:
            p = r.choice((0.2, 0.5, 0.9))
            chosen = [n for n in names if self.chance(p)] or [r.choice(names)]
            for n in names:
                batched[n].append(n in chosen)
        levels = tuple(
            dataclasses.replace(level, out=0 if level.by == "scan" or i < outer or self.chance(0.7) else 1)
            for i, level in enumerate(levels)
        )
        hides = self.chance(0.3)
        operands = {}
        for n in names:
            shape, axes = shapes[n], []
            for level, has in zip(reversed(levels), reversed(batched[n]), strict=True):
                axis = None
                if has:
                    axis = 0 if level.by == "scan" or self.chance(0.7) else r.randint(0, len(shape))
                    shape = (*shape[:axis], level.size, *shape[axis:])
                axes.insert(0, axis)
            operands[n] = self.array(n, self.of_role(n, dtypes), shape, tuple(axes), hides)
        return levels, operands

    def of_role(self, name, dtypes):
        return dtypes(name if name in ("scale", "offset") else "other")

    def array(self, name, dtype, shape, axes, hides):
        small = shape
        if hides and self.chance(0.5):
            small = tuple(1 if self.chance(0.3) else n for n in shape)
        mean, spread = 0.0, 1.0
        if name in ("x", "residual"):
            mean, spread = self.r.choices(SPREADS, (6, 2, 1, 1, 1))[0]
        elif name.endswith("scale"):
            mean = 1.0
        elif name.startswith("kernel"):
            spread = 1 / math.sqrt(shape[-2] if len(shape) > 1 else 1)
        return Array(dtype, shape, axes, small, mean, spread)

    def static(self, form: Operator, shapes, dtypes, axes, ndim):
        r, static = self.r, {}
        if not form.is_linear:
            if axes != (-1,) or self.chance(0.3):
                static["axis"] = axes[0] if len(axes) == 1 and self.chance(0.8) else axes
            if self.chance(0.2):
                static["dtype"] = r.choice((FLOAT32, *NARROW))
        elif self.chance(0.1):
            static["precision"] = "highest"
        if {"scale", "x_scale"} & {*shapes} and self.chance(0.2) and ("scale" in shapes or form.both_sides):
            static["zero_centered_scale"] = True
        if self.chance(0.3):
            static["epsilon"] = r.choice((1e-5, 1e-3, 1e-8, 0.5))
        return static

    def cotangents(self, case: Case):
        """Draw those of the results that are used: of examples or shared, whole arrays or broadcast from less."""
        results = [f"y[{i}]" for i in range(case.several)] or ["y"]
        if case.form.adds:
            results.append("total")
        used = [n for n in results if self.chance(0.75)] or [self.r.choice(results)]
        found = {}
        for n in used:
            shape, axes = case.result_shape(n), []
            for i, level in reversed(list(enumerate(case.levels))):
                axis = level.out
                if i < case.outer:
                    axis = 0 if self.chance(0.7) else None
                if axis is not None:
                    shape = (*shape[:axis], level.size, *shape[axis:])
                axes.insert(0, axis)
            small = shape
            how = self.r.random()
            if how < 0.2:
                small = tuple(1 if self.chance(0.4) else n for n in shape)
            elif how < 0.3:
                small = (1,) * len(shape)
            found[n] = Array("result's", shape, tuple(axes), small)
        return found


def result_dtype(case: Case, name: str) -> str:
    """The dtype of a result."""
    of = {n: a.dtype for n, a in case.operands.items()}
    if name in (SCALE, LARGEST) or (name == "y" and case.quantize is not None and not case.form.is_linear):
        return FLOAT32
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
