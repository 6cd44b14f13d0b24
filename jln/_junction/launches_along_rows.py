"""The launch of `along_rows_kernel`, for the operation of `jln._junction.along_rows`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jln._junction import tiles
from jln._junction.along_rows import AlongRows, formula
from jln._junction.arrays import BLOCK, TABLE, Arrays, Shape
from jln._junction.eight_bits import LARGEST_EXPONENT
from jln._junction.geometry import geometry_of, pointed, shared_operands, vector
from jln._junction.kernels.along_rows import along_rows_kernel
from jln._triton.launch import launch
from jln._triton.target import Target
from jln._triton.tile import ceil_div


def along_rows(operands: Arrays, settings: AlongRows, dtypes: Arrays, batch_dims: int, target: Target) -> Arrays:
    by_xla = functools.partial(formula, settings=settings, dtypes=dtypes, batch_dims=batch_dims)
    if not target.chip.rounds_to_eight_bits:
        return by_xla(operands)
    g = geometry_of(operands, settings.norm, batch_dims, has_sums=batch_dims > 0)  # blocks of each example
    shared, ready = shared_operands(operands, g)
    read, results = pointed(along_rows_kernel, ready), jax.eval_shape(by_xla, operands).present()
    itemsize = max(a.dtype.itemsize for name, a in read.items() if a is not None and TABLE[name].shape is Shape.ROW)
    tile, blocks = tiles.along_rows(g.h, itemsize), ceil_div(g.rows, BLOCK)
    written = launch(
        target,
        along_rows_kernel,
        {**read, "rows": g.rows, "blocks": blocks},
        results,
        programs=g.groups * ceil_div(blocks, tile.rows // BLOCK) * g.chunks(tile),
        tile=tile,
        compute=jnp.dtype("float32"),
        H=g.h,
        VECTOR=vector(read, results),
        SHARED=shared,
        TRANSPOSED=settings.transposed,
        RAGGED=g.rows % BLOCK != 0,
        EXPONENT=LARGEST_EXPONENT[dtypes.y],
        NORM=settings.norm.switches,
    )
    return Arrays(**written)
