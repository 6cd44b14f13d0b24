"""The one call that computes what a vmap of calls does: examples are rows, or groups with parameters of their own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jln._core.operation import behind_rows
from jln._junction.arguments import written_out
from jln._junction.arrays import SCALE_OF, TABLE, Arrays, Junction, Shape


def sum_examples_as_rows(junction: Junction, operands: Arrays, axes: Arrays) -> tuple[Junction, Arrays, Arrays] | None:
    """The one call, which adds up gradients over examples as over rows, as `jln._core.reverse_mode.Widen` says.

    None where examples share an array of x's size, differ in a Linear or in what scales eight bits, or lie behind rows.

    axes: the place of vmap's axis in each operand, None in one that is shared.
    """
    moved = {name for name, place in axes.present().items() if jax.tree.leaves(place)}
    names = [name for name in operands.present() if name not in ("kernel", "bias")]
    rows, numbers, columns, ones = (
        {name for name in names if TABLE[name].shape is shape}
        for shape in (Shape.ROW, Shape.NUMBER, Shape.COLUMN, Shape.ONE)
    )
    if junction.eight_bits in ("one", "rows") or rows - moved or moved & {"kernel", "bias", *SCALE_OF.values()}:
        return None
    norm, place, written = junction.norm, axes.x, numbers
    h = operands.x.ndim - 1 + norm.axis
    last = h - norm.heads
    if columns & moved and place == h and norm.axis == -1 and not norm.heads:
        norm, written = dataclasses.replace(norm, heads=True), numbers | columns | ones
    elif columns & moved or place < norm.examples:
        last = norm.examples
        norm, written = dataclasses.replace(norm, examples=norm.examples + 1), numbers | columns | ones
    if place > last:
        behind_rows(junction.implementation)  # may raise
        return None

    def placed(name: str) -> Any:
        a, given = getattr(operands, name), getattr(axes, name)
        if given is not None:
            return jnp.moveaxis(a, given, place)
        return written_out(jnp.expand_dims(a, place), operands.x, [place] if name in written else [])

    operands = operands._replace(**{name: placed(name) for name in names})
    has_total = junction.gives_total or operands.residual is not None
    of_rows = Arrays(y=(place,) * len(junction.features) or place, total=place if has_total else None)
    if junction.quantises:
        more = ["block_scale", "carrier", *("y2", "y3")[: len(junction.more)]]
        more += ["rstd"] if junction.gives_statistics else []
        more += ["mean"] if junction.gives_statistics and norm.switches.subtract_mean else []
        of_rows = of_rows._replace(**dict.fromkeys(more, place))
    junction = dataclasses.replace(junction, norm=norm, in_one=junction.in_one and not norm.heads)
    return junction, operands, of_rows


def only_rows_differ(batch_dims: int, rows: Sequence[Any], parameters: Sequence[Any]) -> bool:
    """True where an operation's axes of vmap are axes of rows like any other.

    On all of these axes every array of rows differs from example to example, and no parameter does. Each of `rows` and
    `parameters` is an array, an aval or None.
    """
    batches = {a.shape[:batch_dims] for a in rows if a is not None}
    return len(batches) == 1 and all(p is None or math.prod(p.shape[:batch_dims]) == 1 for p in parameters)
