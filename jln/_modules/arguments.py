"""The arguments of a module's call beside x, checked: a residual with its bias and gate, a gate, another norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jln import _checks
from jln._junction.arguments import Gate, checked
from jln._junction.arrays import Arrays
from jln._modules.norms import Prepared

Products = tuple[tuple[Any, ...], Any]  # of each Linear, and the total


def axes(axis: int | Iterable[int]) -> tuple[int, ...]:
    """The axes as a tuple, where Flax takes an int too."""
    return tuple(axis) if isinstance(axis, Iterable) else (axis,)


AS_GIVEN = "all arguments are the operator's"


class Inputs(NamedTuple):
    """The array that a norm reads, with the other arrays that go with it.

    total: the array that is normalised, x or the sum of x and a residual; None where `x_norm` must be called first.
    addends: the addends of a sum, as the operators take them; None where nothing is added in front.
    gated: x with the z whose silu multiplies the norm's result, or x; None without one.
    added_to: the array to which the norm's result is added; None without one.
    x_norm: another norm, whose result for x is added to the residual; None without one.
    """

    total: Any
    addends: Arrays | None = None
    gated: Arrays | None = None
    added_to: jax.Array | None = None
    x_norm: Any = None

    def read_by(self, norm: Prepared, reads_as_given: bool) -> tuple[Arrays, str]:
        """Return the arrays that the operator takes for `norm` of the total, and why.

        reads_as_given: whether the norm's x is the total, but for a cast.
        """
        if self.addends is None:
            return Arrays(norm.x), AS_GIVEN
        if not reads_as_given or norm.x.dtype != self.total.dtype:
            return Arrays(norm.x), "but for the sum of x and the residual: the norm promotes what it reads"
        return self.addends, AS_GIVEN

    def result(self, products: Products, several: bool = False) -> Any:
        """The result as the modules' users get it: y, or (y, total) of a sum; for several products y is a tuple."""
        ys, total = products
        y = ys if several else ys[0]
        return y if self.addends is None else (y, total)


def summed(x: Any, residual: Any, x_bias: Any, gate: Gate, over: int | Iterable[int] = -1) -> Inputs:
    """The record of `residual + gate * (x + x_bias)`, or of `x` where there is no residual.

    x_bias, gate: as of `jln.add_layer_norm`, with the normalised axes in ascending order.
    over: the normalised axes.

    Raises:
      TypeError: a residual is given, and an array is none or has an unsupported dtype.
      ValueError: the residual, `x_bias` or `gate` does not fit `x`; or one of the latter is given without a residual.
    """
    if residual is None:
        for name, a in (("x_bias", x_bias), ("gate", gate)):
            if a is not None:
                raise ValueError(f"{name} needs a residual, to which x is added with it; got residual=None")
        return Inputs(x)
    x = _checks.array("x", x)
    order = tuple(sorted({a + x.ndim if a < 0 else a for a in axes(over)}))
    arrays = Arrays(x, _checks.array("residual", residual), x_bias=x_bias, gate=gate)
    addends = checked(arrays, order)
    dtype = _checks.promoted(x.dtype, addends.residual.dtype)
    # The operators add up for themselves; a sum that nothing reads is not in a compiled program.
    return Inputs(_sum(addends, order, dtype).astype(dtype), addends)


def taken(
    x: Any,
    over: int | Iterable[int],
    *,
    residual: Any = None,
    x_bias: Any = None,
    gate: Gate = None,
    added_to: Any = None,
    x_norm: Any = None,
    z: Any = None,
    norm_before_gate: bool = True,
) -> Inputs:
    """The record of all that a norm by itself may take.

    over, residual, x_bias, gate: as of `summed`.
    added_to: the array to which the norm's result is added.
    x_norm: another norm, whose result for x is added to the residual.
    z, norm_before_gate: as of `jln.rms_norm_gated`.

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
    if x_norm is not None:
        if residual is None:
            raise ValueError("x_norm needs a residual, to which its result is added; got residual=None")
        return Inputs(
            None, checked(Arrays(_checks.array("x", x), _checks.array("residual", residual)), ()), x_norm=x_norm
        )
    if added_to is not None:
        x, added_to = _checks.array("x", x), _checks.array("added_to", added_to)
        _checks.shape("added_to", added_to, x.shape, "that of x")
        return Inputs(x, added_to=added_to)
    if z is not None:
        x, z = _checks.array("x", x), _checks.array("z", z)
        operands = checked(Arrays(x=x, z=z) if norm_before_gate else Arrays(x=x, x_z=z), ())
        return Inputs(operands.x, gated=operands)
    return summed(x, residual, x_bias, gate, over)


def _go_without(name: str, argument: Any, why: str, **others: Any) -> None:
    for other, a in others.items():
        if argument is not None and a is not None:
            raise ValueError(f"{name} goes without {other}: {why}")


def _sum(addends: Arrays, order: tuple[int, ...], dtype: Any) -> jax.Array:
    """The sum of the addends; more than two are added in float32 at least, as the operators do."""
    x, bias, gate = addends.x, addends.x_bias, addends.gate
    if bias is None and gate is None:
        return x.astype(dtype) + addends.residual.astype(dtype)

    def spread(a: jax.Array) -> jax.Array:
        a = a.astype(wide)
        return a if a.ndim == x.ndim else jnp.expand_dims(a, [i for i in range(x.ndim) if i not in order])

    wide = jnp.promote_types(dtype, jnp.float32)
    branch = x.astype(wide) if bias is None else x.astype(wide) + spread(bias)
    return addends.residual.astype(wide) + (branch if gate is None else spread(gate) * branch)
