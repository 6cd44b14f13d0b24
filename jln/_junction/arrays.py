"""The arrays of a junction: the table of them, the one record that holds them, and what is static.

    branch = x + x_bias  |  rms_norm(x) * x_scale  |  x * silu(x_z)
    total  = residual + gate * branch                            # rounded once; this is what is normalised
    y      = norm(total) * scale + offset   [* silu(z)]   [+ added]   [@ kernels + biases]   [in eight bits]

What the operators do with an array follows from its line: its dimensions and its Shardy rule, the shape of a result,
which gradients are sums over rows, what is kept for the backward pass, and what is dead code.

Inside of an operation the first `batch_dims` axes are vmap's: on them any operand may have size 1 instead of the
batch's, results always have the batch's, and gradients are not summed over them. The next `examples` axes, and that of
heads in front of H, are as vmap's, but every operand has their sizes.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp


class Shape(enum.Enum):
    """The shapes that an array can have, beside that of x."""

    ROW = "[*lead, H, *inner], as x"
    COLUMN = "[1, ..., H, ..., 1], with the sizes of x on the axes of examples and heads"
    NUMBER = "[*lead, 1, *inner]"
    ONE = "[1, ..., 1], with the sizes of x on the axes of examples and heads"
    BLOCK = "[*lead, H / 32]"
    KERNEL = "[H, *features], one for each Linear"
    BIAS = "[*features], one for each Linear"


@dataclasses.dataclass(frozen=True)
class Array:
    """A line of the table.

    shape: the array's. made_of: the names of the arrays that a result is made of, and that an operand's gradient
      is made of. more: those that come to them where x is normalised in front of the sum. is_operand: whether a user
      gives it. is_kept: whether it is made for the derivatives alone.
    """

    shape: Shape
    made_of: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    is_operand: bool = False
    is_kept: bool = False


def _operand(shape: Shape, *made_of: str, more: tuple[str, ...] = ()) -> Array:
    return Array(shape, made_of, more, is_operand=True)


# The cotangents that come to y, of a norm in front of several products one of each.
DY = ("dy", "dy2", "dy3")
# What total is made of, its cotangent, x_hat, and what x_hat is to total in the norm of x.
_SUM = ("x", "residual", "x_bias", "gate", "x_z", "x_scale")
_PULLED = (*DY, "dtotal", "total", "scale", "mean", "rstd", "z", "x_z")
_X_HAT = ("total", "mean", "rstd", "x_z")
_U = ("x", "x_rstd")
_Y = (*_SUM, "scale", "offset", "z", "added")


class Arrays(NamedTuple):
    """Arrays by name, None where one is absent; or their dtypes, shapes or tangents, by the same names.

    A gradient stands under the name of its operand. Without a residual, `total` is x itself. Without a gate and a norm
    of x, one gradient goes to both x and the residual: it is in total's dtype, under the name of x.

    kernel, bias and, with Linears, y and dy are tuples, with one for each Linear. The norm in front of them
    has no sum of what they pull back, but its summands: dy, dy2 and dy3.

    y in eight bits is y / y_scale, whose y_max are the largest |y| of rows, or has a block_scale for every 32 elements.
    It has no cotangent: carrier is zero, and has that of the y that was rounded.
    """

    x: Annotated[Any, _operand(Shape.ROW, *_PULLED, "gate", more=("x_scale", *_U))] = None
    residual: Annotated[Any, _operand(Shape.ROW, *_PULLED)] = None
    scale: Annotated[Any, _operand(Shape.COLUMN, *DY, *_X_HAT, "z")] = None
    offset: Annotated[Any, _operand(Shape.COLUMN, *DY)] = None
    x_bias: Annotated[Any, _operand(Shape.COLUMN, *_PULLED, "gate")] = None
    gate: Annotated[Any, _operand(Shape.COLUMN, *_PULLED, "x", "x_bias", more=("x_scale", *_U))] = None
    z: Annotated[Any, _operand(Shape.ROW, *DY, *_X_HAT, "scale", "z")] = None
    x_z: Annotated[Any, _operand(Shape.ROW, *_PULLED)] = None
    added: Annotated[Any, _operand(Shape.ROW, "dy")] = None
    x_scale: Annotated[Any, _operand(Shape.COLUMN, *_PULLED, "gate", more=_U)] = None
    kernel: Annotated[Any, _operand(Shape.KERNEL, "dy", *_X_HAT, "scale", "offset", "y_scale")] = None
    bias: Annotated[Any, _operand(Shape.BIAS, "dy")] = None
    y: Annotated[Any, Array(Shape.ROW, (*_Y, "kernel", "bias", "y_scale"))] = None
    y_max: Annotated[Any, Array(Shape.NUMBER, _Y)] = None
    block_scale: Annotated[Any, Array(Shape.BLOCK, _Y)] = None
    total: Annotated[Any, Array(Shape.ROW, _SUM)] = None
    mean: Annotated[Any, Array(Shape.NUMBER, _SUM, is_kept=True)] = None
    rstd: Annotated[Any, Array(Shape.NUMBER, _SUM, is_kept=True)] = None
    x_rstd: Annotated[Any, Array(Shape.NUMBER, _SUM, is_kept=True)] = None
    dy: Annotated[Any, Array(Shape.ROW)] = None
    dy2: Annotated[Any, Array(Shape.ROW)] = None
    dy3: Annotated[Any, Array(Shape.ROW)] = None
    dtotal: Annotated[Any, Array(Shape.ROW)] = None
    y_scale: Annotated[Any, Array(Shape.ONE)] = None
    carrier: Annotated[Any, Array(Shape.ROW)] = None

    def present(self) -> dict[str, Any]:
        """The arrays that are not absent, by name."""
        return {name: a for name, a in zip(self._fields, self, strict=True) if a is not None}

    def only(self, names: Iterable[str]) -> "Arrays":
        """The arrays with these names."""
        return Arrays(**{name: getattr(self, name) for name in names})


TABLE: dict[str, Array] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Arrays, include_extras=True).items()
}
OPERANDS = tuple(name for name, array in TABLE.items() if array.is_operand)
KEPT = tuple(name for name, array in TABLE.items() if array.is_kept)
# Those whose gradient is a sum over rows of which programs have shares.
COLUMNS = tuple(name for name in OPERANDS if TABLE[name].shape is Shape.COLUMN)


BLOCK = 32  # the elements of a row that have one scale in the OCP's microscaling formats


# What is static


class Switches(NamedTuple):
    """The static switches for which kernels are compiled: the constexpr NORM."""

    subtract_mean: bool
    zero_centered_scale: bool = False


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm, in all that is static about it.

    axis: negative; kernels take -1 alone. examples: how many of the first axes are those of examples with parameters of
      their own. heads: whether the axis in front of H, which is the last then, has parameters of its own, too.
      both_sides: whether x is normalised too, in front of the sum. remat: whether gradients are made of what total is
      made of, not of total and of statistics that were kept. blocks: the name of the dtype for whose numbers blocks
      have their scales; "" where there are no blocks.
    """

    axis: int
    epsilon: float
    switches: Switches
    examples: int = 0
    heads: bool = False
    both_sides: bool = False
    remat: bool = False
    blocks: str = ""

    @property
    def has_groups(self) -> bool:
        """True where some rows have other parameters than others."""
        return self.examples > 0 or self.heads

    def axes_of_groups(self, ndim: int, batch_dims: int) -> list[int]:
        """The axes of vmap, examples and heads of arrays with `ndim` axes."""
        return [*range(batch_dims + self.examples), *[ndim - 2] * self.heads]

    def sizes(self, shape: Shape, x: Sequence[int], batch_dims: int) -> tuple[int, ...]:
        """The sizes of an array of that shape beside an x of these sizes, vmap's axes included."""
        h = len(x) + self.axis
        if shape is Shape.ROW:
            return tuple(x)
        if shape is Shape.BLOCK:
            return (*x[:-1], x[-1] // BLOCK)
        of_groups = {*self.axes_of_groups(len(x), batch_dims)}
        own = {Shape.COLUMN: {*of_groups, h}, Shape.ONE: of_groups}.get(shape, {*range(len(x))} - {h})
        return tuple(n if i in own else 1 for i, n in enumerate(x))


@dataclasses.dataclass(frozen=True)
class Junction:
    """An operator's static arguments, as its rules need them.

    y_dtype: a dtype's name; with Linears, whose results have that of their products, z's, or None where that is x's.
    gives_total: whether total is a result. Without a residual it is x itself, and what its readers pull back comes to
      the backward operation.
    copies: of y, not of one with Linears, how many are results, in a tuple if they are several: what their readers pull
      back comes to the backward operation, too.
    precision: of the products, as `jax.lax.dot_general` takes it. features: how many axes of features each kernel has.
    in_one: whether norm and products are one operation, as `few_features` says.
    eight_bits: "one" of a y, or with Linears z, in eight bits with one scale, "blocks" of one with a scale for each
      block, else "". by_cudnn: whether cuDNN multiplies blocks where a program runs on an NVIDIA GPU.
    """

    norm: Norm
    y_dtype: str | None = None
    gives_total: bool = False
    copies: int = 1
    implementation: str | None = None
    precision: Any = None
    features: tuple[int, ...] = ()
    in_one: bool = False
    eight_bits: str = ""
    by_cudnn: bool = False

    @property
    def quantises(self) -> bool:
        """True where y itself is in eight bits."""
        return self.eight_bits != "" and not self.features

    @property
    def may_be_plain(self) -> bool:
        """True where plain jnp may run in the operations' place."""
        return self.implementation != "triton" and not self.eight_bits


# What follows from the table


def total_dtype(operands: Arrays) -> str:
    """The dtype of the array that is normalised: of x, or of its sum with the residual."""
    x, residual = operands.x, operands.residual
    return (x.dtype if residual is None else jnp.promote_types(x.dtype, residual.dtype)).name


def gradient_dtypes(wanted: Arrays, total: str, parts: bool) -> Arrays:
    """The dtypes of the gradients to be computed for those of the wanted operands.

    wanted: dtypes' names. total: that of the total. parts: whether total is more than x and a residual added up, so
      that their gradients differ; where it is not, one goes to both.
    """
    dtypes = wanted._replace(added=None)
    if parts:
        return dtypes
    return dtypes._replace(x=None if wanted.x is None and wanted.residual is None else total, residual=None)


def reads_of_gradients(norm: Norm, gradients: Arrays, with_linears: bool = False) -> set[str]:
    """The names of the arrays that the wanted gradients, those with a dtype, are made of; and y, made again."""
    names: set[str] = set()
    for name, dtype in gradients.present().items():
        if not jax.tree.leaves(dtype):
            continue
        array = TABLE[name]
        names |= {*_X_HAT, "scale", "offset"} if name == "y" else {*array.made_of}
        names |= {*array.more} if norm.both_sides else set()
        names |= {"kernel"} if with_linears and name not in ("kernel", "bias") else set()
    again = names.intersection(("total", *KEPT)) if norm.remat else set()
    return (names - again) | {*_SUM} if again else names


def statistics_dtypes(operands: Arrays, norm: Norm, names: Iterable[str]) -> Arrays:
    """The dtypes of those of a row's statistics that are among `names`."""
    dtypes = {}
    for name in KEPT:
        if name in names and (norm.switches.subtract_mean or "mean" not in name):
            of = operands.x.dtype if name.startswith("x_") else total_dtype(operands)
            dtypes[name] = jnp.promote_types(of, jnp.float32).name
    return Arrays(**dtypes)


def reads_of_results(results: Arrays) -> set[str]:
    """The names of the operands that the wanted results, those with a dtype, are made of."""
    wanted = [name for name, dtype in results.present().items() if jax.tree.leaves(dtype)]
    return {operand for name in wanted for operand in TABLE[name].made_of}
