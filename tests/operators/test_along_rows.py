"""A norm's result from its statistics, in eight bits with a scale for every 32 rows of a column: its bits and scales.

Beside numpy where the numbers are the operand's own, those of mean 0, rstd 1 and no scale; else beside XLA.
"""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jln
import workbench
from in_eight_bits import along_last, blocks_of_rows, compare, every_bfloat16
from jln._junction.along_rows import AlongRows, in_blocks_of_rows
from jln._junction.arrays import Arrays, Norm, Switches
from jln._junction.operations import along_rows as operation
from jln._triton import chip as chips
from jln._triton import target
from jln._triton.chip import CHIPS

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def quantised(operands, transposed, to, implementation, **switches):
    """The values and the scales as a user would have them."""
    settings = AlongRows(Norm(-1, 1e-6, Switches(operands.mean is not None, **switches)), transposed)

    def by(*arguments):
        return operation(*arguments, implementation=implementation)

    values, scale = in_blocks_of_rows(by, operands, settings, jnp.dtype(to).name)
    return jln.Quantized(values, jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu))


def given(rows, h, dtype, centred=False):
    """Operands whose columns differ much in size, the statistics made up."""
    of_row, column = (*rows, 1), (*[1] * len(rows), h)
    sizes = jnp.exp2(jnp.arange(h, dtype="float32") % 24 - 12).reshape(column)
    return Arrays(
        x=workbench.normal(0, (*rows, h), dtype) * sizes.astype(dtype),
        scale=workbench.normal(1, column, dtype),
        offset=workbench.normal(2, column, dtype) if centred else None,
        mean=workbench.normal(3, of_row, "float32") if centred else None,
        rstd=1 + jnp.abs(workbench.normal(4, of_row, "float32")),
    )


def as_they_are(numbers):
    """Operands of which each row is its own norm."""
    return Arrays(x=numbers, rstd=jnp.ones((*numbers.shape[:-1], 1), "float32"))


# A block's rows are a tile's, fewer, and more than one tile has; rows leave room in the last block, or blocks go over
# several axes; a row without others. H fills tiles of columns, and does not.
SIZES = [((32,), 96), ((3, 64), 40), ((4, 160), 64), ((3, 11), 96), ((8, 4), 64), ((300,), 200), ((), 64)]


@pytest.mark.parametrize("transposed", [False, True], ids=["rows first", "H first"])
@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize(("rows", "h"), SIZES, ids=str)
def test_bits(rows, h, to, transposed, implementation):
    numbers = given(rows, h, "float32").x
    got = jax.jit(quantised, static_argnums=(1, 2, 3))(as_they_are(numbers), transposed, TYPES[to], implementation)
    compare(*along_last(transposed, got, blocks_of_rows(numbers, transposed, TYPES[to])))


@pytest.mark.parametrize("transposed", [False, True], ids=["rows first", "H first"])
@pytest.mark.parametrize("to", TYPES)
def test_every_number_of_bfloat16(to, transposed, implementation):
    """Infinities, NaN and both zeros, each in a block with its neighbours, and a block of zeros."""
    numbers = every_bfloat16(flushed=True).reshape(-1, 32).T.copy()
    numbers[:, 0] = 0
    got = quantised(as_they_are(jnp.asarray(numbers)), transposed, TYPES[to], implementation)
    compare(*along_last(transposed, got, blocks_of_rows(numbers, transposed, TYPES[to])))


@pytest.mark.parametrize("transposed", [False, True], ids=["rows first", "H first"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "h"), SIZES, ids=str)
def test_the_kernel_beside_xla(rows, h, dtype, transposed):
    """Equal bit for bit, with a scale, whatever is NaN or infinite, and where rows do not fill that block."""
    operands = given(rows, h, dtype)
    x = operands.x.reshape(-1, h).at[-1, 3].set(jnp.nan).at[-1, 5].set(jnp.inf).at[-1, 7].set(-jnp.inf)
    operands = operands._replace(x=x.reshape(operands.x.shape))
    call = jax.jit(quantised, static_argnames=("transposed", "to", "implementation", "zero_centered_scale"))
    how = {"transposed": transposed, "to": jnp.float8_e4m3fn, "zero_centered_scale": True}
    ours, theirs = (call(operands, implementation=i, **how) for i in ("triton", "xla"))
    bits = [np.asarray(q.values).view("u1") for q in (ours, theirs)]
    np.testing.assert_array_equal(*[np.asarray(q.scale).view("u1") for q in (ours, theirs)])
    is_nan = [b & 0x7F == 0x7F for b in bits]
    np.testing.assert_array_equal(*is_nan)
    np.testing.assert_array_equal(bits[0][~is_nan[0]], bits[1][~is_nan[1]])
    assert np.isnan(np.asarray(ours.scale, "float32")).sum() == 3
    assert is_nan[0].sum() >= 1


@pytest.mark.parametrize("transposed", [False, True], ids=["rows first", "H first"])
@pytest.mark.parametrize(("rows", "h"), [((3, 64), 40), ((3, 11), 96)], ids=str)
def test_a_mean_and_an_offset(rows, h, transposed, implementation):
    """The bits are those of y in float64, but for numbers that its last bits put on another side of a tie."""
    operands = given(rows, h, "float32", centred=True)
    x, scale, offset, mean, rstd = (
        np.asarray(a, "float64") for a in operands.only(("x", "scale", "offset", "mean", "rstd")).present().values()
    )
    y = (x - mean) * rstd * scale + offset
    got = quantised(operands, transposed, jnp.float8_e4m3fn, implementation)
    true = blocks_of_rows(y, transposed, jnp.float8_e4m3fn)
    same = np.asarray(got.values).view("u1") == np.asarray(true.values).view("u1")
    assert np.mean(~same) < 2e-3 and np.mean(np.asarray(got.scale, "float32") != true.scale) < 2e-3
    values = got.values if transposed else np.moveaxis(np.asarray(got.values), -1, 0)
    if rows == (3, 11):
        assert not np.any(np.asarray(values, "float32")[:, 33:])


@pytest.mark.parametrize("transposed", [False, True], ids=["rows first", "H first"])
@pytest.mark.parametrize("rows", [(3, 64), (3, 11)], ids=str)
def test_vmap(rows, transposed, implementation):
    """Each example has blocks of its own, where rows fill none as well; parameters are shared, or examples' own."""
    one = given(rows, 40, "float32")
    x = jnp.stack([one.x * (1 + i) for i in range(3)])
    scale = jnp.stack([one.scale, -one.scale, 2 * one.scale])
    how = (transposed, jnp.float8_e4m3fn, implementation)
    rstd = jnp.stack([one.rstd] * 3)
    for own in ({"x": x}, {"scale": scale}, {"x": x, "scale": scale}, {"x": x, "rstd": rstd}):
        left = one._replace(scale=None) if "rstd" in own else one
        axes = Arrays(**{name: 0 for name in own})
        got = jax.vmap(lambda a, left=left: quantised(left._replace(**a.present()), *how), (axes,))(Arrays(**own))
        for i in range(3):
            alone = quantised(left._replace(**{name: a[i] for name, a in own.items()}), *how)
            chex.assert_trees_all_equal(jax.tree.map(lambda a, i=i: a[i], got), alone)


@pytest.mark.parametrize(("chip", "triton", "converts"), [("l4", (3, 8, 0), False), ("h200", (3, 9, 0), True)])
def test_chips_that_do_not_convert_have_all_of_it_by_xla(chip, triton, converts, monkeypatch):
    monkeypatch.setattr(chips, "triton_version", lambda: triton)
    with target.using(target.Recorder(CHIPS[chip])) as recorder:
        operands = as_they_are(jnp.ones((64, 64), "float32"))
        jax.jit(lambda a: quantised(a, False, jnp.float8_e4m3fn, "triton")).trace(operands).lower(
            lowering_platforms=("cuda",)
        )
    assert len(recorder.launches) == converts
