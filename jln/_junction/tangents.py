"""Forward mode: tangents of the results, by JAX from the formulas in jnp.

They are taken at what reverse mode keeps, so that the transpose of one rule is the other: of the sum in front of the
norm, and of the norm and the products at the total that was saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jln._junction import formulas
from jln._junction.arrays import TABLE, Arrays, Junction, Norm
from jln._junction.linears import formulas as linears


def tangent(
    operands: tuple[Arrays, Arrays], settings: tuple[Junction, tuple[int, ...]], dtypes: Arrays, batch_dims: int
) -> Arrays:
    """The tangents of y and total, linear in those of the operands, of which those that are None are zero.

    operands: the tangents, and what was saved. No result that moves is made of an operand that was not saved, unless it
      is linear in it: such an operand is zero here. So is a total without elements, of which none is made.
    settings: the junction, and the shape of x.
    """
    (tangents, saved), (junction, shape) = operands, settings
    batch = formulas.common_batch(batch_dims, *jax.tree.leaves(operands))
    if saved.total.shape[batch_dims:] != shape:
        saved = saved._replace(total=jnp.zeros((*saved.total.shape[:batch_dims], *shape), saved.total.dtype))
    alone = dataclasses.replace(junction.norm, both_sides=False)
    of_sum = [name for name in TABLE["total"].made_of if name != "x_z"]

    def total(summands: Arrays) -> jax.Array:
        return _total(summands, junction.norm, formulas.compute_dtype(saved.total.dtype))

    def result(behind: Arrays) -> Any:
        if not junction.features:
            return formulas.forward(behind, alone, Arrays(y=dtypes.y), batch_dims).y
        of_one = dataclasses.replace(junction, norm=alone)
        return linears.forward(behind, of_one, Arrays(y=dtypes.y), batch_dims).y

    summands = saved.only(of_sum)
    if saved.x is None and tangents.x is None:
        summands = summands._replace(x=jnp.zeros_like(saved.total))
    dtotal = _jvp(total, summands, tangents.only(of_sum))
    behind: dict[str, Any] = dict.fromkeys((*of_sum, "total"))
    wide = saved.total if dtotal is None else saved.total.astype(dtotal.dtype)
    at = saved._replace(**behind | {"x": wide, "bias": (None,) * len(junction.features) or None})
    dy = _jvp(result, at, tangents._replace(**behind | {"x": dtotal}))
    moved = Arrays(y=dy, total=None if dtypes.total is None else dtotal)

    def in_dtype(dtype: str, a: Any) -> jax.Array:
        return formulas.with_batch(a, batch).astype(dtype)

    if dtypes.total is not None and dtotal is None:
        moved = moved._replace(total=jnp.zeros_like(saved.total))
    return jax.tree.map(in_dtype, dtypes, moved)


def _total(summands: Arrays, norm: Norm, dtype: Any) -> jax.Array:
    """Term (23) or (33), not rounded."""
    if norm.both_sides:
        summands = summands._replace(x_rstd=formulas.statistics(summands.x, norm)[2])
    total = formulas.apply_gate(formulas.branch(summands, norm, dtype), summands)
    return total if summands.residual is None else total + summands.residual.astype(dtype)


def _jvp(function: Callable[[Arrays], Any], operands: Arrays, tangents: Arrays) -> Any:
    """The tangent of `function(operands)`; None where nothing moves. An operand that moves and is absent is zero."""
    given, tree = jax.tree.flatten(tangents, is_leaf=lambda a: a is None)
    there = tree.flatten_up_to(operands)
    at, along = {}, {}
    for i, moves in enumerate(given):
        if moves is not None:
            a = jnp.zeros_like(moves) if there[i] is None else there[i]
            shape = jnp.broadcast_shapes(a.shape, moves.shape)
            at[i], along[i] = jnp.broadcast_to(a, shape), jnp.broadcast_to(moves, shape)

    def call_moved(new: dict[int, jax.Array]) -> Any:
        return function(tree.unflatten([new.get(i, a) for i, a in enumerate(there)]))

    return jax.jvp(call_moved, (at,), (along,))[1] if at else None
