"""The catalogue of public operators: what each takes, gives and computes.

`check`, `bench`, `report`, `tune`, `doctor`, the tests and the reports go over this one list, and guess nothing from
names: a new operator joins them all by its entry here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jln

EPSILON = 1e-6  # the default of every signature, where it stands in figures for its readers
DIRECTIONS = ("forward", "backward")
Role = Literal["activation", "scale", "offset", "gate", "kernel", "bias"]


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument or a result of an operator.

    role: "activation" (of as many rows as x), "scale" or "offset" of a norm, "gate" of a sum, "kernel" or "bias" of a
      product.
    dimensions: "x" for all of x's axes, "rows" for all but the normalised ones, "H" for the normalised ones, "N" for a
      Linear's features, "examples" for the first axis of rows with 1 for the others.
    optional: may be None.
    gradient_of: another argument whose gradient is this one's too, so that a program needs it once; or the result whose
      cotangent is this one's gradient.
    """

    name: str
    role: Role
    dimensions: tuple[str, ...]
    optional: bool = False
    gradient_of: str | None = None

    def of(self, sizes: Mapping[str, Any], dtype: Any, parameter_dtype: Any) -> Any:
        """The array's shape and dtype at these sizes; a tuple of them where it belongs to each of several Linears.

        dtype: that of all arrays but the norm's scale and offset, which have `parameter_dtype`.
        """
        if "N" in self.dimensions and isinstance(features := sizes["N"], Several):
            return tuple(self.of({**sizes, "N": n}, dtype, parameter_dtype) for n in features)
        shape = tuple(size for dimension in self.dimensions for size in sizes[dimension])
        return jax.ShapeDtypeStruct(shape, jnp.dtype(parameter_dtype if self.role in ("scale", "offset") else dtype))


class Several(tuple[tuple[int, ...], ...]):
    """The features of each of several Linears behind one norm."""


def flat_names(named: Iterable[tuple[str, Any]]) -> list[str]:
    """Names of the leaves of named trees: `y` for an array, `y[0]` and `y[1]` for a tuple."""
    paths = [(name, jax.tree.leaves_with_path(tree)) for name, tree in named]
    return [name + jax.tree_util.keystr(path) for name, leaves in paths for path, _ in leaves]


def sizes(shape: tuple[int, ...], axes: int | tuple[int, ...], features: tuple[int, ...] | Several) -> dict[str, Any]:
    """The sizes of each of the dimensions of `Array`, for an x of that shape normalised over `axes`."""
    chosen = [a % len(shape) for a in (axes if isinstance(axes, tuple) else (axes,))]
    rows = tuple(n for i, n in enumerate(shape) if i not in chosen)
    return {
        "x": shape,
        "rows": rows,
        "H": tuple(shape[a] for a in chosen),
        "N": features,
        "examples": tuple(n if i == 0 else 1 for i, n in enumerate(rows)),
    }


@dataclasses.dataclass(frozen=True)
class Signature:
    """The arguments and results of a function of named arrays, in order.

    reread: the arguments and results that its backward pass reads, beside the results' cotangents.
    """

    name: str
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    reread: tuple[str, ...]

    names = property(lambda self: tuple(a.name for a in self.arguments))

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arguments, then the results."""
        return self.arguments + self.results

    @property
    def parameters(self) -> tuple[Array, ...]:
        return tuple(a for a in self.arguments if a.role != "activation")

    @property
    def gradients(self) -> tuple[Array, ...]:
        """The arguments with a gradient of their own."""
        return tuple(a for a in self.arguments if a.gradient_of is None)

    def without(self, absent: Iterable[str]) -> Signature:
        """The signature without some optional arguments."""
        left = tuple(a for a in self.arguments if a.name not in absent)
        return Signature(self.name, left, self.results, tuple(n for n in self.reread if n not in absent))

    def packed(self, results: Iterable[Any]) -> Any:
        """The results, or their cotangents, as the function returns them: one by itself, several as a tuple."""
        several = tuple(results)
        return several if len(self.results) > 1 else several[0]

    def own_gradients(self, gradients: Iterable[Any]) -> list[Any]:
        """The gradients of `gradients` that are not another argument's, too.

        A program that returned one array as two gradients would copy it. gradients: those of all arguments, in order.
        """
        return [g for a, g in zip(self.arguments, gradients, strict=True) if a.gradient_of is None]

    def bytes_once(self, arrays: Mapping[str, Any], direction: str) -> int:
        """The bytes of arguments and results of these shapes that a direction moves, if it moves each once.

        Forward reads the arguments and writes the results. Backward reads the cotangents and the arrays of `reread`,
        and writes the gradients.
        """

        def sizes(names: Iterable[str]) -> int:
            leaves = jax.tree.leaves([arrays[name] for name in names])
            return sum(a.size * a.dtype.itemsize for a in leaves)

        results = sizes(a.name for a in self.results)
        if direction == "forward":
            return sizes(a.name for a in self.arguments) + results
        return results + sizes(self.reread) + sizes(a.name for a in self.gradients)


@dataclasses.dataclass(frozen=True)
class Operator(Signature):
    """A public operator, as a function and as the same function in plain jnp.

    centres: whether the mean is subtracted.
    per_element: operations on each element of x, forward and backward, without those of a product.
    norm: the operator in front of the product; None without a product.
    of_sum: the operator that the sum of x and the residual goes through; None without such a sum.
    in_front: the operator that x goes through before the sum; None without one.
    extras: the arrays that it takes by keyword and few models have; `including` makes them arguments.
    options: static keywords that say which form of the operator this is; empty for the defaults.
    """

    centres: bool
    per_element: tuple[int, int]
    norm: Operator | None = None
    of_sum: Operator | None = None
    in_front: Operator | None = None
    extras: tuple[Array, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    function = property(lambda self: getattr(jln, self.name))
    reference = property(lambda self: getattr(jln.reference, self.name))
    adds = property(lambda self: self.of_sum is not None)
    adds_behind = property(lambda self: not self.adds and "residual" in self.names)
    is_linear = property(lambda self: self.norm is not None)
    is_gated = property(lambda self: _Z in self.arguments)

    @property
    def given_extras(self) -> tuple[str, ...]:
        """The names of the extras that are among the arguments of this form of the operator."""
        extras = {a.name for a in OPERATORS[self.name].extras}
        return tuple(name for name in self.names if name in extras)

    @property
    def title(self) -> str:
        """The operator's name in tables, with its extras and options."""
        said = [*(" and ".join(self.given_extras),), *(f"{name}={value}" for name, value in self.options)]
        return ", ".join((self.name, *filter(None, said)))

    def including(
        self, *extras: str, of_examples: Iterable[str] = (), options: tuple[tuple[str, Any], ...] = ()
    ) -> Operator:
        """The operator with some of its extras among the arguments.

        With a gate the gradients of x and of the residual are two arrays, and the gate's own reads x and its bias. A
        gate is one operation more of each element forward and three backward; x's bias is one each way.

        of_examples: the parameters of which every example has its own.
        options: static keywords that say which form of the operator it is.
        """
        added = tuple(a for a in self.extras if a.name in extras)
        forward, backward = self.per_element
        arguments, reread = self.arguments, self.reread
        if "gate" in extras:
            arguments = tuple(dataclasses.replace(a, gradient_of=None) for a in arguments)
            reread = tuple(dict.fromkeys((*reread, "x", *(a.name for a in added))))
        own = {name: ("examples", "H") for name in of_examples}
        arguments = tuple(
            dataclasses.replace(a, dimensions=own.get(a.name, a.dimensions)) for a in (*arguments, *added)
        )
        more = 3 * ("gate" in extras) + ("x_bias" in extras)
        return dataclasses.replace(
            self,
            arguments=arguments,
            reread=reread,
            extras=(),
            per_element=(forward + len(added), backward + more),
            options=options,
        )

    def in_order(
        self, function: Callable[..., Any], given: Sequence[str] | None = None, **options: Any
    ) -> Callable[..., Any]:
        """A function of the arrays named in `given`, in order, from a function of this operator's arguments by name.

        given: None: all arguments. Those that are not given are None.
        """
        names = self.names if given is None else given

        def of_arrays(*arrays: Any, **more: Any) -> Any:
            named = dict(zip(names, arrays, strict=True))
            static = dict(self.options) | options
            return function(**{name: named.get(name) for name in self.names}, **static, **more)

        # The names that `jln.testing` reports by.
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
        of_arrays.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        return of_arrays

    def operations(self, elements: int, features: int, direction: str) -> int:
        """The operations on `elements` elements of x in a direction; an addition and a multiplication are two."""
        products = self.product_operations(elements, features, direction)
        return self.per_element[DIRECTIONS.index(direction)] * elements + products

    def product_operations(self, elements: int, features: int, direction: str) -> int:
        """The operations of the product alone: one product forward, two backward."""
        return 2 * (1 + DIRECTIONS.index(direction)) * elements * features if self.is_linear else 0


_X = Array("x", "activation", ("x",))
_RESIDUAL = Array("residual", "activation", ("x",), gradient_of="x")
_SCALE = Array("scale", "scale", ("H",), optional=True)
_OFFSET = Array("offset", "offset", ("H",), optional=True)
_Z = Array("z", "activation", ("x",))
_X_BIAS = Array("x_bias", "bias", ("H",), optional=True)
_GATE = Array("gate", "gate", ("H",), optional=True)
_KERNEL = Array("kernel", "kernel", ("H", "N"))
_BIAS = Array("bias", "bias", ("N",), optional=True)
_Y = Array("y", "activation", ("x",))
_TOTAL = Array("total", "activation", ("x",))
_PRODUCT = Array("y", "activation", ("rows", "N"))


def _with_linear(norm: Operator) -> Operator:
    """The operator of a norm and the product behind it."""
    return dataclasses.replace(
        norm,
        name=f"{norm.name}_linear",
        arguments=(*norm.arguments, _KERNEL, _BIAS),
        results=(_PRODUCT, *norm.results[1:]),
        reread=(*norm.reread, "kernel"),
        norm=norm,
        of_sum=None if norm.of_sum is None else _with_linear(norm.of_sum),
    )


def _adding(operator: Operator) -> Operator:
    """The same operator of the sum of x and a residual, one operation more of each element each way."""
    forward, backward = operator.per_element
    return dataclasses.replace(
        operator,
        name=f"add_{operator.name}",
        arguments=(_X, _RESIDUAL, *(a for a in operator.arguments if a != _X)),
        results=(*operator.results, _TOTAL),
        reread=tuple("total" if name == "x" else name for name in operator.reread),
        per_element=(forward + 1, backward + 1),
        norm=None if operator.norm is None else _adding(operator.norm),
        of_sum=operator,
        extras=(_X_BIAS, _GATE),
    )


def _added(norm: Operator) -> Operator:
    """The operator that adds a residual behind the norm: the residual's gradient is y's cotangent."""
    forward, backward = norm.per_element
    residual = dataclasses.replace(_RESIDUAL, gradient_of="y")
    arguments = (_X, residual, *norm.arguments[1:])
    return dataclasses.replace(norm, name=f"{norm.name}_add", arguments=arguments, per_element=(forward + 1, backward))


def _both_sides(norm: Operator) -> Operator:
    """The operator that normalises x, adds it to a residual, and normalises the sum."""
    forward, backward = norm.per_element
    parameters = norm.arguments[1:]
    of_x = tuple(dataclasses.replace(a, name=f"x_{a.name}") for a in parameters)
    return dataclasses.replace(
        norm,
        name=f"{norm.name}_add_{norm.name}",
        arguments=(_X, dataclasses.replace(_RESIDUAL, gradient_of=None), *of_x, *parameters),
        results=(_Y, _TOTAL),
        reread=("x", "x_scale", "total", "scale"),
        per_element=(2 * forward + 1, 2 * backward + 1),
        in_front=norm,
        of_sum=norm,
        extras=(_GATE,),
    )


# An element forward: mean 1, x - mean 1, its square summed 2, times rstd 1, scale 1, offset 1. Backward: x_hat 2, g 1,
# c1 1, c2 2, dx 4, dscale 2, doffset 1. An RMSNorm has neither mean, c1 nor offset.
_NORMS = (
    Operator("layer_norm", (_X, _SCALE, _OFFSET), (_Y,), ("x", "scale"), centres=True, per_element=(7, 13)),
    Operator("rms_norm", (_X, _SCALE), (_Y,), ("x", "scale"), centres=False, per_element=(4, 9)),
)
# silu(z) 4, the product 1. Backward: silu 4, its derivative 2, x or dy times silu(z) 1, dz 2, dx or y times silu(z) 1.
_GATED = Operator("rms_norm_gated", (_X, _Z, _SCALE), (_Y,), ("x", "z", "scale"), centres=False, per_element=(9, 19))
# The norms by themselves, of a sum, in a sum, on both sides of one, gated; with a Linear behind, and that of a sum.
_LINEARS = tuple(map(_with_linear, _NORMS))
_BOTH_SIDES = tuple(map(_both_sides, reversed(_NORMS)))
OPERATORS: dict[str, Operator] = {
    o.name: o
    for family in (
        (*_NORMS, *map(_adding, _NORMS), *map(_added, _NORMS), *_BOTH_SIDES, _GATED),
        (*_LINEARS, *map(_adding, _LINEARS), *map(_with_linear, _BOTH_SIDES)),
    )
    for o in family
}


def fullest(*, is_linear: bool, adds: bool) -> Operator:
    """The operator with the most arguments among those of a kind, but for gated ones and norms on both sides.

    is_linear: with a product behind the norm. adds: with a residual in front of it.
    """
    plain = [o for o in OPERATORS.values() if not o.is_gated and o.in_front is None]
    fitting = [o for o in plain if (o.is_linear, o.adds) == (is_linear, adds)]
    return max(fitting, key=lambda o: len(o.arguments))


# The operators by title: as most models have them, then with all their extras, and in their other forms.
_FULL = [o.including(*(a.name for a in o.extras)) for o in OPERATORS.values() if o.extras]
GATE_FIRST = (("norm_before_gate", False),)
FORMS: dict[str, Operator] = OPERATORS | {o.title: o for o in (*_FULL, _GATED.including(options=GATE_FIRST))}
