"""The one call that computes what a vmap of calls does: examples are rows, or groups with parameters of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jln._core.operation import behind_rows
from jln._junction.arguments import are_few_rows, write_out
from jln._junction.arrays import TABLE, Arrays, Junction, Shape


def sum_examples_as_rows(junction: Junction, operands: Arrays, axes: Arrays) -> tuple[Junction, Arrays, int] | None:
    """The one call, which adds up gradients over examples as over rows, as `jln._core.reverse_mode.Widen` says.

    None where examples share an array of x's size, differ in a Linear, have a largest magnitude each, lie behind rows,
    or are groups of few rows that share a parameter.

    axes: the place of vmap's axis in each operand, None in one that is shared.
    """
    moved = {name for name, place in axes.present().items() if jax.tree.leaves(place)}
    names = [name for name in operands.present() if name not in ("kernel", "bias")]
    rows, columns = ({name for name in names if TABLE[name].shape is shape} for shape in (Shape.ROW, Shape.COLUMN))
    if junction.eight_bits == "one" or rows - moved or moved & {"kernel", "bias"}:
        return None
    norm, place, written = junction.norm, axes.x, set[str]()
    h = operands.x.ndim - 1 + norm.axis
    last = h - norm.heads
    if columns & moved and norm.examples < place == h and norm.axis == -1 and not norm.heads:
        norm, written = dataclasses.replace(norm, heads=True), columns
    elif columns & moved or place < norm.examples:
        last = norm.examples
        norm, written = dataclasses.replace(norm, examples=norm.examples + 1), columns
    if place > last:
        behind_rows(junction.implementation)  # may raise
        return None
    if norm != junction.norm and junction.may_be_plain:
        of_groups = {*norm.axes_of_groups(operands.x.ndim, 0), operands.x.ndim + norm.axis}
        if are_few_rows(operands.x.shape, of_groups, len(columns - moved)):
            return None

    def put(name: str) -> Any:
        a, given = getattr(operands, name), getattr(axes, name)
        if given is not None:
            return jnp.moveaxis(a, given, place)
        return write_out(jnp.expand_dims(a, place), operands.x, [place] if name in written else [])

    operands = operands._replace(**{name: put(name) for name in names})
    junction = dataclasses.replace(junction, norm=norm, in_one=junction.in_one and not norm.has_groups)
    return junction, operands, place
