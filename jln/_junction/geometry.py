"""The layout of rows for the norm's kernels, and the operands and results that a launch hands to one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jln._junction import tiles
from jln._junction.arrays import TABLE, Arrays, Norm, Shape
from jln._triton.tile import Tile, ceil_div


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The layout of rows for the kernels: `[*batch, *lead, H]` as `[groups, rows, H]`, or of heads next to H.

    batch: the sizes of vmap's axes, of which there are `batch_dims`, and of those of examples. grouped: whether these
    axes are groups; else they are rows like any other. Heads are groups in any case.
    """

    norm: Norm
    shape: tuple[int, ...]
    batch: tuple[int, ...]
    batch_dims: int
    grouped: bool

    @property
    def h(self) -> int:
        return self.shape[-1]

    @property
    def heads(self) -> int:
        return self.shape[-2] if self.norm.heads else 1

    @property
    def groups(self) -> int:
        return (math.prod(self.batch) if self.grouped else 1) * self.heads

    @property
    def rows(self) -> int:
        return math.prod(self.shape) // (self.h * self.groups)

    def tiles(self, tile: Tile) -> int:
        """The number of tiles of rows in a group, the same as of `tiles_of` in the kernels."""
        return ceil_div(self.rows, tile.rows)

    def programs(self, tile: Tile) -> int:
        """The number of programs, one for each tile of rows. Raises ValueError where no grid has so many."""
        programs = self.groups * self.tiles(tile)
        if programs >= 2**31:
            raise ValueError(
                f"x of shape {self.shape} takes {programs} programs, and a GPU's grid has fewer than {2**31}: "
                "use implementation='xla'"
            )
        return programs

    def chunks(self, tile: Tile) -> int:
        return ceil_div(self.h, tile.columns)

    def results(self, dtypes: Arrays) -> Arrays:
        """The shapes of results, or of gradients, in these dtypes."""
        shapes = {n: self.norm.sizes(TABLE[n].shape, self.shape, self.batch_dims) for n in dtypes.present()}
        return Arrays(**{n: jax.ShapeDtypeStruct(shapes[n], dtype) for n, dtype in dtypes.present().items()})


def geometry_of(operands: Arrays, norm: Norm, batch_dims: int, has_sums: bool = False) -> Geometry:
    """The layout of these operands for the kernels.

    The axes of vmap, and those of examples, become rows like any other where no operand is shared on them, no parameter
    varies and no sum over rows is wanted.

    Raises ValueError where a row is too long for the kernels' 32-bit numbers of columns.
    """
    assert norm.axis == -1, "no kernel takes rows over another axis"
    in_front = batch_dims + norm.examples
    arrays = operands.present()
    batches = {name: a.shape[:in_front] for name, a in arrays.items()}
    batch: Any = jnp.broadcast_shapes(*batches.values())
    x = next(a for name, a in arrays.items() if TABLE[name].shape is Shape.ROW)
    if x.shape[-1] >= tiles.LONGEST_ROW:
        raise ValueError(
            f"x of shape {x.shape} is normalised over {x.shape[-1]} elements, and the Triton kernels take fewer "
            f"than {tiles.LONGEST_ROW}: use implementation='xla'"
        )
    of_columns = (Shape.COLUMN, Shape.ONE)
    plain = all(math.prod(b) == 1 if TABLE[n].shape in of_columns else b == batch for n, b in batches.items())
    return Geometry(norm, batch + x.shape[in_front:], batch, batch_dims, grouped=has_sums or not plain)


def shared_operands(operands: Arrays, geometry: Geometry) -> tuple[Any, Arrays]:
    """Return the names of the operands with one copy for all groups, None for one group, and the operands.

    An operand that is shared over some batch axes and not over others is written out over all of them.
    """
    if not geometry.grouped:
        return () if geometry.norm.heads else None, operands
    n, arrays = len(geometry.batch), operands.present()
    shared = [name for name, a in arrays.items() if a.shape[:n] != geometry.batch and math.prod(a.shape[:n]) == 1]
    sizes = {name: a.shape if name in shared else geometry.batch + a.shape[n:] for name, a in arrays.items()}
    return tuple(shared), Arrays(**{name: jnp.broadcast_to(a, sizes[name]) for name, a in arrays.items()})


def element_sizes(*operands: jax.Array | jax.ShapeDtypeStruct | None) -> tuple[int, bool]:
    """The bytes of the widest element, and whether the arrays have several dtypes."""
    dtypes = {a.dtype for a in operands if a is not None}
    return max(d.itemsize for d in dtypes), len(dtypes) > 1


def vector(*records: Arrays) -> int | None:
    """The elements in 16 bytes of the widest array of rows, if others are narrower; else None."""
    rows = (a for arrays in records for name, a in arrays.present().items() if TABLE[name].shape is Shape.ROW)
    widths = {a.dtype.itemsize for a in rows}
    return 16 // max(widths) if len(widths) > 1 else None
