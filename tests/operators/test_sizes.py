"""Sizes near 2**31: the kernels' arithmetic of rows and offsets runs in the interpreter, without arrays so large."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from jln._junction.kernels import addresses as access  # noqa: E402
from jln._triton.launch import launch  # noqa: E402
from jln._triton.target import Interpreter, interpreting  # noqa: E402
from jln._triton.tile import Tile  # noqa: E402

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")


@triton.jit
def last_tile_kernel(
    rows,
    tiles_ptr,  # [1]
    row_ptr,  # [BLOCK_ROWS]
    start_ptr,  # [BLOCK_ROWS]
    valid_ptr,  # [BLOCK_ROWS]
    H: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Write what every kernel computes of a group's last tile: rows, offsets, and which rows exist, as float64."""
    tiles = access.tiles_of(rows, BLOCK_ROWS)
    row, base, start, valid = access.rows_of(tiles - 1, rows, H, BLOCK_ROWS, HEADS)
    at = tl.arange(0, BLOCK_ROWS)
    tl.store(tiles_ptr, tiles.to(COMPUTE))
    tl.store(row_ptr + at, row.to(COMPUTE))
    tl.store(start_ptr + at, (base + start).to(COMPUTE))
    tl.store(valid_ptr + at, valid.to(COMPUTE))


@pytest.mark.parametrize(
    ("rows", "h", "heads"),
    [
        *((rows, 16, 1) for rows in (1, 2**31 - 1, 2**31, 2**32 - 1, 2**32)),  # int32, uint32 and int64 to Triton
        *((rows, 8, 5) for rows in (2**29, 2**31 - 1, 2**32)),
        (2**31 - 1, 2**15, 2**16),
        (37, 2**27, 3),  # the rows of one tile are further apart than 32 bits say
    ],
)
def test_the_last_tile_of_many_rows(rows, h, heads):
    block = 16
    tiles = -(-rows // block)
    last = [(tiles - 1) * block + i for i in range(block)]
    expected = {
        "tiles": [tiles],
        "row": [n * heads for n in last],
        "start": [n * heads * h for n in last],
        "valid": [n < rows for n in last],
    }
    results = {name: jax.ShapeDtypeStruct((len(e),), "float64") for name, e in expected.items()}
    how = {"programs": 1, "tile": Tile(block, 1, 1), "compute": jnp.dtype("float64"), "H": h, "HEADS": heads}
    found = launch(Interpreter(), last_tile_kernel, {"rows": rows}, results, **how)
    for name, e in expected.items():
        np.testing.assert_array_equal(found[name], e, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 2**31), r"x of shape \(2, 2147483648\) is normalised over 2147483648 elements.*'xla'"),
        ((2**31, 2048), r"x of shape \(2147483648, 2048\) takes 2147483648 programs.*'xla'"),
    ],
)
def test_what_is_too_large_for_the_kernels_is_an_error_that_names_x(shape, message):
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: jln.layer_norm(x, implementation="triton")).lower(jax.ShapeDtypeStruct(shape, "bfloat16"))
