"""Cases drawn at random: everything that a call of an operator can be made of, together."""

from __future__ import annotations

import dataclasses
import math
import random

import jax.numpy as jnp

import jln
from case import Array, Case, Level, grown
from catalogue import FORMS, Operator

# Powers of two, their neighbours, 1 and what models have. From 32 rows of 64 elements on XLA gives sums on a CPU to
# another library, so these are frequent.
H = (
    1, 2, 3, 7, 8, 16, 31, 32, 33, *(64,) * 6, 65, 100, 127, *(128,) * 3, 129, 256, 257, 512, 768, 1000, 1024,
    2047, 2048,
)  # fmt: skip
ROWS = (1, 1, 2, 2, 3, 3, 4, 5, 8, 17, *(32,) * 4, 33, 48, 64)
FEATURES = ((1,), (2,), (3,), (8,), (16,), (17,), (32,), (4, 3), (130,))
ELEMENTS, BY_KERNELS = 2**16, 2**12  # the most that x has, over all levels; and by Triton's interpreter
SPREADS = ((0.0, 1.0), (1.0, 1.0), (100.0, 1.0), (0.0, 0.01), (0.0, 30.0))  # of rows: mean and standard deviation
WIDE, FLOAT32, NARROW = "float64", "float32", ("bfloat16", "float16")
POLICIES = ("everything_again", "statistics", "dots", "jln.dots_saveable", "jln.dots_and_statistics_saveable")


def draw(seed: int) -> Case:
    """The case of a seed; of every tenth under a loss of means, of every fifth in eight bits where it can be."""
    case = (UnderMeans if seed % 10 == 3 else Draw)(seed).case()
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
    return dataclasses.replace(case, static=static, quantize=r.choice(kinds))


class Draw:
    """A draw of the case of a seed: of sizes that a CPU computes."""

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
        largest = (BY_KERNELS if by_kernels else ELEMENTS) // math.prod(level.size for level in levels)
        shape, axes = self.shape_and_axes(form, largest)
        normalised = tuple(shape[a % len(shape)] for a in axes)
        dtypes = self.dtypes(form, asks)

        several = r.choice((2, 3)) if form.is_linear and self.chance(0.25) else 0
        some = FEATURES[:-1] if several or by_kernels else FEATURES
        features = [r.choice(some) for _ in range(several or 1)]
        shapes, number = {}, None
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

        levels, operands = self.with_levels(shapes, levels, outer, dtypes)
        static = self.static(form, shapes, dtypes, axes)
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
        shape = [r.choice(H if i in normalised else ROWS) for i in range(ndim)]
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
        return levels, {n: self.operand(n, shapes[n], levels, batched[n], dtypes, hides) for n in names}

    def operand(self, name, shape, levels, batched, dtypes, hides):
        def place(i, level, shape):
            if not batched[i]:
                return None
            return 0 if level.by == "scan" or self.chance(0.7) else self.r.randint(0, len(shape))

        shape, axes = grown(shape, levels, place)
        dtype, small = dtypes(name if name in ("scale", "offset") else "other"), shape
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

    def static(self, form: Operator, shapes, dtypes, axes):
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

        def place(i, level, shape):
            if i < case.outer:
                return 0 if self.chance(0.7) else None
            return level.out

        found = {}
        for n in used:
            shape, axes = grown(case.result_shape(n), case.levels, place)
            small = shape
            how = self.r.random()
            if how < 0.2:
                small = tuple(1 if self.chance(0.4) else n for n in shape)
            elif how < 0.3:
                small = (1,) * len(shape)
            found[n] = Array("result's", shape, axes, small)
        return found


class UnderMeans(Draw):
    """A draw of rows as long as models have them, under a loss of means over rows: a cotangent is one row, repeated."""

    def case(self) -> Case:
        case = super().case()
        wanted = case.wanted[:1] if self.seed % 20 == 13 else case.wanted
        return dataclasses.replace(case, wanted=wanted, implementation="xla")

    def shape_and_axes(self, form: Operator, largest: int):
        return (self.r.choice((64, 96, 128)), self.r.choice((640, 768, 1000, 1024))), (-1,)

    def cotangents(self, case: Case):
        found = super().cotangents(case)
        return {n: dataclasses.replace(a, small=(*[1] * (len(a.shape) - 1), a.shape[-1])) for n, a in found.items()}
