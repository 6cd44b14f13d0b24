"""Sizes near 2**31: the kernels' arithmetic of rows and offsets runs in the interpreter, without arrays so large."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from jln._junction.geometry import Interleaved  # noqa: E402
from jln._junction.kernels import addresses as access  # noqa: E402
from jln._junction.linears import tiles as linear_tiles  # noqa: E402
from jln._triton.chip import CHIPS  # noqa: E402
from jln._triton.launch import launch  # noqa: E402
from jln._triton.target import Interpreter, interpreting  # noqa: E402
from jln._triton.tile import Tile  # noqa: E402

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")


@triton.jit
def last_tile_kernel(
    rows,
    tiles_ptr,  # [1]
    size_ptr,  # [1]
    row_ptr,  # [BLOCK_ROWS]
    start_ptr,  # [BLOCK_ROWS]
    valid_ptr,  # [BLOCK_ROWS]
    H: tl.constexpr,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Write what every kernel computes of a group's last tile: rows, offsets, and which rows exist, as float64."""
    tiles = access.tiles_of(rows, INTERLEAVED.run, BLOCK_ROWS)
    row, base, start, valid = access.rows_of(tiles - 1, rows, H, INNER, INTERLEAVED, None, BLOCK_ROWS)
    at = tl.arange(0, BLOCK_ROWS)
    tl.store(tiles_ptr, tiles.to(COMPUTE))
    tl.store(size_ptr, access.size_of(rows, H, INNER).to(COMPUTE))
    tl.store(row_ptr + at, row.to(COMPUTE))
    tl.store(start_ptr + at, (base + start).to(COMPUTE))
    tl.store(valid_ptr + at, valid.to(COMPUTE))


@pytest.mark.parametrize(
    ("rows", "h", "inner", "run"),  # a run of rows that lie together, between groups or side by side
    [
        *((rows, 16, 1, 1) for rows in (1, 2**31 - 1, 2**31, 2**32 - 1, 2**32)),  # int32, uint32 and int64 to Triton
        *((inner, 4, inner, inner) for inner in (2**31 - 8, 2**31 - 1, 2**31, 2**32)),
        (3 * 2**30, 8, 2**30, 2**30),
        (2**31 - 1, 2**15, 2**31 - 1, 2**31 - 1),
        (3 * 2**30, 8, 1, 2**30),
    ],
)
def test_the_last_tile_of_many_rows(rows, h, inner, run):
    block, outer = 16, rows // run
    in_front = (outer - 1) * run if run > 1 else 0
    neighbours = run if run > 1 else rows
    tiles = -(-neighbours // block) * (outer if run > 1 else 1)
    last = [-(-neighbours // block) * block - block + i for i in range(block)]
    expected = {
        "tiles": [tiles],
        "size": [rows * h],
        "row": [in_front + n for n in last],
        "start": [in_front * h + (n if inner > 1 else n * h) for n in last],
        "valid": [n < neighbours for n in last],
    }
    found = launch(
        Interpreter(),
        last_tile_kernel,
        {"rows": rows},
        {name: jax.ShapeDtypeStruct((len(e),), "float64") for name, e in expected.items()},
        programs=1,
        tile=Tile(block, 1, 1),
        compute=jnp.dtype("float64"),
        H=h,
        INNER=inner,
        INTERLEAVED=Interleaved(1, run),
    )
    for name, e in expected.items():
        np.testing.assert_array_equal(found[name], e, err_msg=name)


def test_a_row_too_long_for_the_kernels_is_an_error_that_names_x():
    x = jax.ShapeDtypeStruct((2**31, 2), "bfloat16")
    with pytest.raises(ValueError, match=r"x of shape \(2147483648, 2\) is normalised over 2147483648 elements.*'xla'"):
        jax.jit(lambda x: jln.layer_norm(x, axis=0, implementation="triton")).lower(x)


def test_more_programs_than_a_grid_has_are_an_error_that_names_x():
    x = jax.ShapeDtypeStruct((2**31, 2048), "bfloat16")
    with pytest.raises(ValueError, match=r"x of shape \(2147483648, 2048\) takes 2147483648 programs.*'xla'"):
        jax.jit(lambda x: jln.layer_norm(x, implementation="triton")).lower(x)


def test_a_kernel_whose_offsets_have_more_than_32_bits_is_composed():
    chip = CHIPS["h200"]
    for h, is_fused in ((2**23 - 8, True), (2**23, False)):
        for choose in (linear_tiles.forward_tile, linear_tiles.backward_plan):
            assert (choose(10**6, h, 256, "bfloat16", chip) is not None) == is_fused
