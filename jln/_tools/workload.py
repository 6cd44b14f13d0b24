"""A workload: one operator at one size, or a block around two of them, with its programs and its data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jln
from jln._tools import catalogue
from jln._tools.catalogue import DIRECTIONS, OPERATORS, Array, Operator, Several, Signature

FORWARD = ("forward",)
Init = Literal["ones", "integers", "normal", "uniform", "large-mean"]


@dataclasses.dataclass(frozen=True)
class Workload:
    """One operator at one size.

    shape: x's, and the residual's.
    features: N of a Linear, or a tuple of those of several Linears behind one norm; None for a norm.
    axis: the normalised one.
    dtype: that of x, residual, kernel, bias and the results.
    parameter_dtype: that of scale and offset.
    directions: both in training, "forward" alone in inference.
    why: the model and the place that this size is from.
    absent: the optional arguments that are left out.
    extras: the rare optional arguments that are given.
    of_examples: the parameters of which every example has its own.
    options: the operator's form, as in the catalogue.
    """

    name: str
    operator: str
    shape: tuple[int, ...]
    why: str
    features: int | tuple[int, ...] | None = None
    axis: int = -1
    dtype: str = "bfloat16"
    parameter_dtype: str = "float32"
    directions: tuple[str, ...] = DIRECTIONS
    absent: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    of_examples: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def entry(self) -> Operator:
        form = {"absent": self.absent, "of_examples": self.of_examples, "options": self.options}
        return OPERATORS[self.operator].including(*self.extras, **form)

    is_linear = property(lambda self: self.entry.is_linear)
    is_over_last = property(lambda self: self.axis in (-1, len(self.shape) - 1))
    width = property(lambda self: self.shape[self.axis])
    rows = property(lambda self: math.prod(self.shape) // self.width)

    @property
    def signature(self) -> Signature:
        return self.entry

    @property
    def all_features(self) -> tuple[int, ...]:
        """The features of all Linears together."""
        return self.features if isinstance(self.features, tuple) else () if self.features is None else (self.features,)

    axis_option = property(lambda self: {} if self.is_linear else {"axis": self.axis})
    shape_text = property(lambda self: "x".join(map(str, self.shape)))
    features_text = property(lambda self: "+".join(map(str, self.all_features)))
    title = property(lambda self: self.entry.title)

    def __str__(self) -> str:
        features = f" -> {self.features_text} features" if self.is_linear else ""
        return f"{self.title} of {self.shape_text}{features} in {self.dtype}"

    @classmethod
    def sized(cls, form: Operator, shape: tuple[int, ...], features: int | tuple[int, ...], dtype: str) -> Workload:
        """The workload of a form of an operator at one size, with all arrays in one dtype.

        features: of a Linear; those of a norm are left out.
        """
        how: dict[str, Any] = {"dtype": dtype, "parameter_dtype": dtype, "extras": form.given_extras}
        n = features if form.is_linear else None
        return cls(form.name, form.name, shape, "", n, options=form.options, **how)

    def sizes(self) -> dict[str, Any]:
        several = isinstance(self.features, tuple)
        features = Several((n,) for n in self.all_features) if several else self.all_features
        return catalogue.sizes(self.shape, self.axis, features)

    def arrays(self) -> dict[str, Any]:
        """Shapes and dtypes of the arguments in order, then those of the results, which are their cotangents' too.

        The kernels, biases and products of several Linears are a tuple each.
        """
        sizes = self.sizes()
        return {a.name: a.of(sizes, self.dtype, self.parameter_dtype) for a in self.signature.arrays}

    def arguments(self) -> list[Any]:
        return list(self.arrays().values())[: len(self.signature.arguments)]

    def cotangents(self) -> list[Any]:
        return list(self.arrays().values())[len(self.signature.arguments) :]

    def function(self, module: Any = jln, **options: Any) -> Callable[..., Any]:
        """The operator of `module`, `jln` or `jln.reference`, as a function of this workload's arguments in order."""
        return self.entry.in_order(getattr(module, self.operator), **self.axis_option, **options)

    def names(self, direction: str = "both", *, every: bool = False) -> list[str]:
        """The names of what a program returns, by default of a whole step. "gradient" is "both" without the results.

        every: as of `step`.
        """
        shapes, signature = self.arrays(), self.signature
        results = [(a.name, shapes[a.name]) for a in signature.results if direction in ("forward", "both")]
        own = signature.arguments if every else signature.gradients
        wanted = direction != "forward" and "backward" in self.directions
        return catalogue.flat_names(results + [(f"d{a.name}", shapes[a.name]) for a in own if wanted])

    def step(self, function: Callable[..., Any], *, every: bool = False) -> Callable[..., Any]:
        """Return a function (*arguments, *cotangents) -> results, and gradients where both directions are asked for.

        The cotangents wait for the results, as they do in a model: otherwise XLA could leave a result to a backward
        kernel.

        every: return dresidual where it is dx, too. A program that returned both would copy it.
        """
        signature = self.signature
        count = len(signature.arguments)

        def forward(*arrays):
            return function(*arrays[:count])

        def both(*arrays):
            results, pullback = jax.vjp(function, *arrays[:count])
            results, cotangents = jax.lax.optimization_barrier((results, arrays[count:]))
            gradients = pullback(signature.packed(cotangents))
            return results, list(gradients) if every else signature.own_gradients(gradients)

        return both if "backward" in self.directions else forward

    def step_arguments(self) -> list[Any]:
        """The arguments of the function that `step` returns."""
        return self.arguments() + (self.cotangents() if "backward" in self.directions else [])

    def bytes_once(self, direction: str | None = None) -> int:
        """The bytes moved if every array is moved once: in a direction, or in all of this workload's."""
        return sum(self.signature.bytes_once(self.arrays(), d) for d in self._directions(direction))

    def held_bytes(self, function: Callable[..., Any]) -> int | None:
        """Return the bytes that `jax.vjp` of the function hands from forward to backward; None in inference.

        x and the parameters that the function needs are among them. XLA may keep less in a program that has both.
        """
        if "backward" not in self.directions:
            return None
        program = jax.make_jaxpr(lambda *a: jax.vjp(function, *a)[1])(*self.arguments()).jaxpr
        arrays = [v.aval for v in dict.fromkeys(program.outvars)]
        return sum(a.size * a.dtype.itemsize for a in arrays)

    def operations(self, direction: str) -> int:
        """The operations of a direction; an addition and a multiplication are two."""
        return self.entry.operations(math.prod(self.shape), sum(self.all_features), direction)

    def product_flops(self, direction: str | None = None) -> int:
        """The additions and multiplications of the Linears: one product forward, two backward."""
        elements, features = math.prod(self.shape), sum(self.all_features)
        return sum(self.entry.product_operations(elements, features, d) for d in self._directions(direction))

    def _directions(self, direction: str | None) -> tuple[str, ...]:
        return self.directions if direction is None else (direction,)

    def draw(self, init: Init = "normal", seed: int = 0) -> tuple[list[Any], list[Any]]:
        """Return arguments and cotangents that hold that kind of data: arrays of NumPy, or tuples of them.

        ones: every sum can be done in the head.
        integers: from -3 to 3, so that products and short sums are exact.
        normal, uniform: of spread 1, or from -1 to 1. Scales are around 1, and kernels are small enough to keep a
          result as large as what it is made of.
        large-mean: x's mean is 1000 times its spread, which a variance in one pass does not survive. The mean of y's
          cotangent is 10 times its spread, with a scale of 1, so that c1 is large and dx is not.

        All numbers fit the workload's dtype, for peers whose parameters have it.
        """
        random, shapes = np.random.default_rng(seed), self.arrays()

        def filled(array: Array, a: Any) -> np.ndarray:
            return _drawn(random, init, array, a.shape).astype(jnp.dtype(self.dtype)).astype(a.dtype)

        drawn = [
            jax.tree.map(lambda a, array=array: filled(array, a), shapes[array.name]) for array in self.signature.arrays
        ]
        count = len(self.signature.arguments)
        return drawn[:count], drawn[count:]


def _drawn(random: np.random.Generator, init: Init, array: Array, shape: tuple[int, ...]) -> np.ndarray:
    if init == "ones":
        return np.ones(shape)
    if init == "integers":
        return random.integers(-3, 4, shape).astype(float)
    a = random.uniform(-1, 1, shape) if init == "uniform" else random.standard_normal(shape)
    if array.role == "scale":
        return a + 1 if init != "large-mean" else np.ones(shape)
    if array.role == "kernel":
        return a / math.sqrt(shape[0])
    return a + {"x": 1000, "y": 10}.get(array.name, 0) if init == "large-mean" else a


def _norm(i: int) -> tuple[Array, Array]:
    return Array(f"scale_{i}", "scale", ("H",)), Array(f"offset_{i}", "offset", ("H",))


def _linear(name: str, h: str, n: str) -> tuple[Array, Array]:
    return Array(f"kernel_{name}", "kernel", (h, n)), Array(f"bias_{name}", "bias", (n,))


def _signature(*projections: tuple[Array, Array]) -> Signature:
    """The signature of a block, whose queries, keys and values are made by `projections`: pairs of kernel and bias."""
    arguments = (
        *(Array("x", "activation", ("x",)), *_norm(1), *(a for pair in projections for a in pair)),
        *(*_linear("out", "H", "H"), *_norm(2), *_linear("up", "H", "4H"), *_linear("down", "4H", "H")),
    )
    # Its bytes are of arguments, results and gradients: a bound that no implementation reaches.
    return Signature("block", arguments, (Array("y", "activation", ("x",)),), tuple(a.name for a in arguments))


_JOINT = _signature(_linear("qkv", "H", "3H"))
_APART = _signature(*(_linear(name, "H", "H") for name in "qkv"))


@dataclasses.dataclass(frozen=True)
class Block(Workload):
    """A block `x += out(attention(qkv(norm(x)))); x += down(gelu(up(norm(x))))` of `x [batch, tokens, width]`.

    Two operators differ between peers: the first norm with the Linear behind it, and the second norm with the sum in
    front. All the rest is the same program for every peer. The training step is forward and backward: an optimizer
    would add the same to each.

    shape: x's, `[batch, tokens, width]`.
    apart: queries, keys and values have a Linear each, and the second operator has its Linear, too.
    """

    heads: int = 0
    apart: bool = False

    @property
    def signature(self) -> Signature:
        return _APART if self.apart else _JOINT

    is_linear = property(lambda self: False)
    title = property(lambda self: self.operator)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {"x": self.shape, "H": (self.width,), "3H": (3 * self.width,), "4H": (4 * self.width,)}

    def parts(self) -> tuple[Workload, Workload]:
        """The two operators that differ between peers, as workloads."""
        norm = {"shape": self.shape, "dtype": self.dtype, "parameter_dtype": self.parameter_dtype, "why": self.why}
        features = 3 * (self.width,) if self.apart else 3 * self.width
        qkv = Workload(name="qkv", operator="layer_norm_linear", features=features, **norm)
        if self.apart:
            return qkv, Workload(name="up", operator="add_layer_norm_linear", features=4 * self.width, **norm)
        return qkv, Workload(name="add", operator="add_layer_norm", **norm)

    def of(self, norm_linear: Callable[..., Any], add_norm: Callable[..., Any]) -> Callable[..., Any]:
        """The block as a function of its arguments, made with a peer's functions of the two workloads of `parts`."""

        def block(*arguments: jax.Array) -> jax.Array:
            p = dict(zip(self.signature.names, arguments, strict=True))
            first, second = ((p[f"scale_{i}"], p[f"offset_{i}"]) for i in (1, 2))
            if self.apart:
                kernels, biases = (tuple(p[f"{kind}_{name}"] for name in "qkv") for kind in ("kernel", "bias"))
                projected = norm_linear(p["x"], *first, kernels, biases)
            else:
                projected = jnp.split(norm_linear(p["x"], *first, p["kernel_qkv"], p["bias_qkv"]), 3, -1)
            q, k, v = (a.reshape(*a.shape[:-1], self.heads, -1) for a in projected)
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(self.shape)
            branch = attended @ p["kernel_out"] + p["bias_out"]
            if self.apart:
                up, x = add_norm(branch, p["x"], *second, p["kernel_up"], p["bias_up"])
            else:
                z, x = add_norm(branch, p["x"], *second)
                up = z @ p["kernel_up"] + p["bias_up"]
            return x + jax.nn.gelu(up) @ p["kernel_down"] + p["bias_down"]

        return block

    def product_flops(self, direction: str | None = None) -> int:
        """The operations of the four Linears (12 H^2 parameters) and of the causal half of attention."""
        h, tokens = self.width, self.shape[1]
        forward = 2 * self.rows * (12 * h * h + tokens * h)
        return sum(forward * (1 + DIRECTIONS.index(d)) for d in self._directions(direction))
