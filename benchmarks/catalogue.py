"""The catalogue of public operators: what each takes, gives, reads and computes.

Benchmarks and tests go over this one list. It is made of the operators' signatures, and of the table of their arrays in
`jln._junction.arrays`: a new operator joins them all by being public, and a new array by its line there.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp

import jln
from jln._junction.arrays import OPERANDS, TABLE, Arrays, Norm, Shape, Switches, reads_of_gradients

EPSILON = 1e-6  # the default of every signature, where it stands in figures for its readers
DIRECTIONS = ("forward", "backward")

_DIMENSIONS = {Shape.ROW: ("x",), Shape.COLUMN: ("H",), Shape.KERNEL: ("H", "N"), Shape.BIAS: ("N",)}


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
    role: str
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
class Operator:
    """A public operator with some of its optional arguments, as a function and as the same function in plain jnp.

    reread: the arguments and results that its backward pass reads, beside the results' cotangents.
    takes: the names of all arrays that it takes, those by keyword last. keywords: those, which few models have.
    options: static keywords that say which form of the operator this is; empty for the defaults.
    """

    name: str
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    reread: tuple[str, ...]
    takes: tuple[str, ...]
    keywords: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    names = property(lambda self: tuple(a.name for a in self.arguments))
    arrays = property(lambda self: self.arguments + self.results)
    parameters = property(lambda self: tuple(a for a in self.arguments if a.role != "activation"))
    gradients = property(lambda self: tuple(a for a in self.arguments if a.gradient_of is None))  # that have their own

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

    function = property(lambda self: getattr(jln, self.name))
    reference = property(lambda self: getattr(jln.reference, self.name))
    # Whether the mean is subtracted; x is normalised in front of the sum, too; a residual is added in front of the
    # norm, behind it; products follow; y, or x, is multiplied by silu(z).
    centres = property(lambda self: "layer_norm" in self.name)
    both_sides = property(lambda self: "x_scale" in self.takes)
    adds = property(lambda self: len(self.results) > 1)
    adds_behind = property(lambda self: not self.adds and "residual" in self.takes)
    is_linear = property(lambda self: "kernel" in self.takes)
    is_gated = property(lambda self: "z" in self.takes)
    # The names of the extras that this form of the operator has, and of those that `including` would add.
    given_extras = property(lambda self: tuple(name for name in self.keywords if name in self.names))
    extras = property(lambda self: tuple(name for name in self.keywords if name not in self.names))

    @property
    def title(self) -> str:
        """The operator's name in tables, with its extras and options."""
        said = [*(" and ".join(self.given_extras),), *(f"{name}={value}" for name, value in self.options)]
        return ", ".join((self.name, *filter(None, said)))

    @property
    def norm(self) -> Operator:
        """The operator in front of the products."""
        return OPERATORS[self.name.removesuffix("_linear")]

    def including(
        self,
        *extras: str,
        absent: Iterable[str] = (),
        of_examples: Iterable[str] = (),
        options: tuple[tuple[str, Any], ...] = (),
    ) -> Operator:
        """The operator with some of its extras among the arguments.

        absent: optional arguments that are left out. of_examples: the parameters of which every example has its own.
        options: static keywords that say which form of the operator it is.
        """
        given = [name for name in self.takes if name in (*self.names, *extras) and name not in {*absent}]
        return _form(self.name, tuple(given), tuple(of_examples), options)

    def in_order(
        self, function: Callable[..., Any], given: Sequence[str] | None = None, **options: Any
    ) -> Callable[..., Any]:
        """A function of the arrays named in `given`, in order, from a function of this operator's arguments by name.

        given: None: all arguments. Those that are not given are None.
        """
        names = self.names if given is None else given
        positional = [name for name in self.takes if name not in self.keywords]

        def of_arrays(*arrays: Any, **more: Any) -> Any:
            named = dict.fromkeys(positional) | dict(zip(names, arrays, strict=True))
            return function(**named, **dict(self.options) | options, **more)

        # The names that `jln.testing` reports by.
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
        of_arrays.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        return of_arrays


GATE_FIRST = (("norm_before_gate", False),)


@functools.cache
def _form(
    name: str,
    given: tuple[str, ...] | None = None,
    of_examples: tuple[str, ...] = (),
    options: tuple[tuple[str, Any], ...] = (),
) -> Operator:
    """The public operator of a name with these arguments, by default all that are not by keyword alone."""
    hints = get_type_hints(getattr(jln, name))
    parameters = inspect.signature(getattr(jln, name)).parameters
    takes = tuple(n for n in parameters if n in OPERANDS)
    keywords = tuple(n for n in takes if parameters[n].kind is inspect.Parameter.KEYWORD_ONLY)
    names = given if given is not None else tuple(n for n in takes if n not in keywords)
    is_linear, adds = "kernel" in takes, get_origin(hints["return"]) is tuple
    norm = Norm(-1, EPSILON, Switches("layer_norm" in name), both_sides="x_scale" in takes)
    results = {"y": ("rows", "N") if is_linear else ("x",)} | ({"total": ("x",)} if adds else {})

    # The names in the table, and from there back. Without a sum, total is x.
    others = {} if adds else {"residual": "added"}
    others |= {"z": "x_z"} if options == GATE_FIRST else {}
    in_table = {n: others.get(n, n) for n in names}
    back = {n: n for n in (*results, "dy")} | {"total": "total" if adds else "x"} | {t: n for n, t in in_table.items()}

    def reads(n: str) -> set[str]:
        """The arguments and results that the gradient of an argument is made of, and "dy"."""
        made_of = reads_of_gradients(norm, Arrays(**{in_table[n]: "float32"}), is_linear)
        return {back[t] for t in made_of if t in back}

    def argument(n: str) -> Array:
        shape = TABLE[in_table[n]].shape
        role = "activation" if shape is Shape.ROW else n.removeprefix("x_")
        same = None
        if n == "residual":
            same = "y" if reads(n) == {"dy"} else "x" if reads(n) == reads("x") else None
        dimensions = ("examples", "H") if n in of_examples else _DIMENSIONS[shape]
        # A sum is called a sum by what it adds, although it takes None for a residual.
        optional = type(None) in get_args(hints[n]) and n != "residual"
        return Array(n, role, dimensions, optional, same)

    read = {r for n in names for r in reads(n)}
    return Operator(
        name,
        tuple(map(argument, names)),
        tuple(Array(r, "activation", dimensions) for r, dimensions in results.items()),
        tuple(n for n in (*names, *results) if n in read),
        takes,
        keywords,
        options,
    )


OPERATORS: dict[str, Operator] = {name: _form(name) for name in vars(jln.reference) if name in jln.__all__}
# The operators by title: as most models have them, then with all their extras, and in their other forms.
FORMS: dict[str, Operator] = OPERATORS | {
    form.title: form
    for form in (
        *(o.including(*m) for o in OPERATORS.values() for m in ({*o.extras} - {"offset"}, o.extras) if m),
        OPERATORS["rms_norm_gated"].including(options=GATE_FIRST),
    )
}
