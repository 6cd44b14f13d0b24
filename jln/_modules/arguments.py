"""The arguments of a module's call beside x, listed and checked: a residual with its bias and gate, a gate, a norm."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar

import jax
import jax.numpy as jnp

from jln import _checks
from jln._junction.arguments import Gate, checked
from jln._junction.arrays import Arrays
from jln._modules.norms import Prepared
from jln._operators.eight_bits import Quantize

AS_GIVEN = "all arguments are the operator's"

Call = TypeVar("Call", bound=Callable[..., Any])


class OfSum(TypedDict, total=False):
    """The arguments of every module's call, beside the framework's own; `OfRMSNorm` says what they are."""

    residual: jax.Array | None
    x_bias: jax.Array | None
    gate: Gate
    quantize: Quantize


class OfLayerNorm(OfSum, total=False):
    """The arguments of every norm's call, beside the framework's own; `OfRMSNorm` says what they are."""

    added_to: jax.Array | None


class OfRMSNorm(OfLayerNorm, total=False):
    """The arguments of every RMSNorm's call, beside the framework's own: the first of these is `x` here.

    Attributes:
      residual: `x`'s shape. The norm is of `total = residual + gate * (x + x_bias)`, as of `jln.add_layer_norm` and
        `jln.add_rms_norm`, and the result is `(y, total)`.
      x_bias: the bias of the Linear that made `x`, as of `jln.add_layer_norm`; goes with a residual. Of several
        normalised axes it has the shape in ascending order, as `gate` has.
      gate: a factor of the branch, as of `jln.add_layer_norm`; goes with a residual. adaLN has a scale and an offset of
        each example too, which are no parameters of a module: call `jln.add_layer_norm(x, residual, scale, offset,
        gate=gate, zero_centered_scale=True)` in its place, with arrays `[B, 1, H]`, and without Equinox's vmap.
      added_to: `x`'s shape. The norm's result is added to it, as of `jln.layer_norm_add` and `jln.rms_norm_add`.
      x_norm: another RMSNorm. The norm is of `total = residual + x_norm(x)`, as of `jln.rms_norm_add_rms_norm`.
      z: `x`'s shape. The result is gated by `silu(z)`, as of `jln.rms_norm_gated`.
      norm_before_gate: whether `silu(z)` multiplies the norm's result, or `x`, as of `jln.rms_norm_gated`.
      quantize: `jln.MXFloat8()` or `jln.Float8(scale)`, as of `jln.layer_norm` and `jln.layer_norm_linear`: `y` is a
        `jln.Quantized`, whatever the layer's dtype; or Linears multiply in eight bits, and with a given scale `y` is a
        `jln.Scaled`. Without forward mode. A call that the operators cannot compute is an error.
    """

    x_norm: Any
    z: jax.Array | None
    norm_before_gate: bool


def listing(arguments: type) -> Callable[[Call], Call]:
    """A decorator of a call with `**beside: Unpack[arguments]`, for `help` to list these one by one.

    They stand in the call's signature, and in its docstring in the place of the line on `**beside`.
    """
    meanings = re.findall(r"  (\w+): (.*(?:\n    .*)*)", inspect.getdoc(OfRMSNorm) or "")
    lines = "".join(f"  {name}: {text}\n" for name, text in meanings if name in arguments.__annotations__)
    lines = textwrap.dedent(lines)

    def decorate(call: Call) -> Call:
        signature, defaults = inspect.signature(call), inspect.signature(taken).parameters
        own = list(signature.parameters.values())[:-1]
        each = [defaults[name].replace(annotation=of.__forward_arg__) for name, of in arguments.__annotations__.items()]
        call.__signature__ = signature.replace(parameters=[*own, *each])  # pyright: ignore[reportFunctionMemberAccess]
        if call.__doc__:
            # Python 3.13 takes a docstring's indentation away where it compiles it.
            call.__doc__ = re.sub(r"( *)\*\*beside: .*\n", lambda of: textwrap.indent(lines, of[1]), call.__doc__)
        return call

    return decorate


def refuse_others(beside: Mapping[str, Any], arguments: type, layer: Any) -> None:
    """Raise TypeError for a keyword that is none of the arguments, as Python does."""
    for name in beside:
        if name not in arguments.__annotations__:
            raise TypeError(f"{type(layer).__name__}.__call__() got an unexpected keyword argument {name!r}")


def axes(axis: int | Iterable[int]) -> tuple[int, ...]:
    """The axes as a tuple, where Flax takes an int too."""
    return tuple(axis) if isinstance(axis, Iterable) else (axis,)


class Inputs(NamedTuple):
    """The array that a norm reads, with the other arrays that go with it.

    total: the array that is normalised, x or the sum of x and a residual; None where `x_norm` must be called first.
    arrays: x with what goes with it, as the operators take them: a residual, its bias and gate; an array to which the
      norm's result is added; a z.
    x_norm: another norm, whose result for x is added to the residual; None without one.
    quantize: as of `OfRMSNorm`.
    """

    total: Any
    arrays: Arrays
    x_norm: Any = None
    quantize: Quantize = None

    def read_by(self, norm: Prepared, reads_as_given: bool) -> tuple[Arrays, str]:
        """Return the arrays that the operator takes for `norm` of the total, and why.

        reads_as_given: whether the norm's x is the total, but for a cast.
        """
        if self.arrays.residual is None:
            return self.arrays._replace(x=norm.x), AS_GIVEN
        if not reads_as_given or norm.x.dtype != self.total.dtype:
            return Arrays(norm.x), "but for the sum of x and the residual: the norm promotes what it reads"
        return self.arrays, AS_GIVEN

    def result(self, y: Any, total: jax.Array | None = None) -> Any:
        """The result as the modules' users get it: y, or (y, total) of a sum, which the operator may have made."""
        return y if self.arrays.residual is None else (y, self.total if total is None else total)

    def refuse_own_code(self, why: str) -> None:
        """Raise ValueError if the operators, which cannot compute the call, are asked for eight bits."""
        if self.quantize is not None:
            raise ValueError(f"quantize={self.quantize!r} is of jln's operators, which cannot compute this call: {why}")

    def computed_by(self, plain: Callable[[Any], Any]) -> Any:
        """The norm's result by `plain`, the framework's own code, with what the operator does beside it."""
        of = self.arrays
        if of.x_z is not None:
            return plain(_times_silu(self.total, of.x_z))
        y = plain(self.total)
        if of.z is not None:
            return _times_silu(y, of.z)
        return y if of.added is None else promoted_sum(of.added, y)


def taken(
    x: Any,
    over: int | Iterable[int] = -1,
    *,
    residual: Any = None,
    x_bias: Any = None,
    gate: Gate = None,
    added_to: Any = None,
    x_norm: Any = None,
    z: Any = None,
    norm_before_gate: bool = True,
    quantize: Quantize = None,
) -> Inputs:
    """The record of the arguments of `OfRMSNorm`. over: the normalised axes.

    Raises:
      TypeError: an array is none or has an unsupported dtype; or `norm_before_gate` is no bool.
      ValueError: an array does not fit `x`, or two arguments are given that exclude each other, or one without another
        that it needs.
    """
    of_x = {"x_bias": x_bias, "gate": gate}
    if not _checks.flag("norm_before_gate", norm_before_gate) and z is None:
        raise ValueError("norm_before_gate=False needs a z, whose silu multiplies x; got z=None")
    _go_without("added_to", added_to, "the norm's result is added", residual=residual, x_norm=x_norm, z=z, **of_x)
    _go_without("x_norm", x_norm, "its result is added to the residual", z=z, **of_x)
    _go_without("z", z, "the sum is not gated", residual=residual, **of_x)
    if residual is None:
        if x_norm is not None:
            raise ValueError("x_norm needs a residual, to which its result is added; got residual=None")
        for name, a in of_x.items():
            if a is not None:
                raise ValueError(f"{name} needs a residual, to which x is added with it; got residual=None")
        if added_to is None and z is None:
            return Inputs(x, Arrays(x), quantize=quantize)
    x = _checks.array("x", x)
    residual, added, z = (
        _checks.optional_array(name, a) for name, a in (("residual", residual), ("added_to", added_to), ("z", z))
    )
    _checks.shape("added_to", added, x.shape, "that of x")
    adds_x = residual is not None and x_norm is None
    order = tuple(sorted({a + x.ndim if a < 0 else a for a in axes(over)})) if adds_x else ()
    of_z = {"z" if norm_before_gate else "x_z": z}
    arrays = checked(Arrays(x, residual, x_bias=x_bias, gate=gate, added=added, **of_z), order)
    if x_norm is not None:
        return Inputs(None, arrays, x_norm, quantize)
    # The operators add up for themselves; a sum that nothing reads is not in a compiled program.
    return Inputs(_sum(arrays, order) if adds_x else x, arrays, quantize=quantize)


def _go_without(name: str, argument: Any, why: str, **others: Any) -> None:
    for other, a in others.items():
        if argument is not None and a is not None:
            raise ValueError(f"{name} goes without {other}: {why}")


def _sum(addends: Arrays, order: tuple[int, ...]) -> jax.Array:
    """The sum of the addends; more than two are added in float32 at least, as the operators do."""
    x, bias, gate = addends.x, addends.x_bias, addends.gate
    if bias is None and gate is None:
        return promoted_sum(x, addends.residual)

    def spread(a: jax.Array) -> jax.Array:
        a = a.astype(wide)
        return a if a.ndim == x.ndim else jnp.expand_dims(a, [i for i in range(x.ndim) if i not in order])

    dtype = _checks.promoted(x.dtype, addends.residual.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    branch = x.astype(wide) if bias is None else x.astype(wide) + spread(bias)
    return (addends.residual.astype(wide) + (branch if gate is None else spread(gate) * branch)).astype(dtype)


def promoted_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of two arrays in the dtype to which theirs promote."""
    dtype = _checks.promoted(a.dtype, b.dtype)
    return a.astype(dtype) + b.astype(dtype)


def _times_silu(a: jax.Array, z: jax.Array) -> jax.Array:
    """`a * silu(z)`, rounded to a's dtype as between the framework's own layers."""
    wide = _checks.promoted(a.dtype, jnp.float32)
    return (a.astype(wide) * jax.nn.silu(z.astype(wide))).astype(a.dtype)
