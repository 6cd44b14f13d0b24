"""Compiled kernels that write eight bits, executed: bits and scales are those of what the kernel writes in float32."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jln
import traffic
import workbench
from cases import lowering_for
from in_eight_bits import along_last, block_scaled, blocks_of_rows, compare, every_bfloat16, scaled, spread
from jln._junction.along_rows import AlongRows, in_blocks_of_rows
from jln._junction.arrays import Arrays, Norm, Switches
from jln._junction.operations import along_rows
from jln._operators.eight_bits import Made, Ways
from ptx import Program

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
# Rows of one tile, of a ragged one, of several rows a program, and of chunks; and heads, each with a scale of its own;
# chips that have each their own PTX.
CASES = [
    ("rms_norm", (37, 96), "bfloat16", "small-h200", "e4m3"),
    ("layer_norm", (5, 768), "float16", "l4", "e5m2"),
    ("add_rms_norm", (9, 4096), "bfloat16", "b200", "e4m3"),
    ("add_layer_norm", (3, 20000), "bfloat16", "small-h200", "e4m3"),
    ("rms_norm_add_rms_norm", (19, 256), "float32", "h200", "e5m2"),
    ("layer_norm", (21, 3, 128), "bfloat16", "small-h200", "e4m3"),
    ("rms_norm", (2, 3, 20000), "bfloat16", "b200", "e4m3"),
]


@pytest.mark.parametrize(("name", "shape", "dtype", "chip", "to"), CASES)
@pytest.mark.parametrize("blocks", [False, True], ids=["one scale", "blocks"])
def test_bits(name, shape, dtype, chip, to, blocks):
    operator = workbench.OPERATORS.get(name) or workbench.FORMS[name]
    x, *rest = workbench.arguments(operator, shape, dtype)
    magnitudes = jnp.exp2(jnp.arange(shape[0]) % 24 - 12).reshape(-1, *[1] * (len(shape) - 1))
    x = (x * magnitudes).astype(dtype).at[0].set(0)
    rest = [None if a is None else a * 3 for a in rest]
    if len(shape) > 2:
        rest = [None if a is None else jnp.stack([a * (i + 1) for i in range(shape[1])])[None] for a in rest]
    scale, eight = np.float32(0.037), DTYPES[to]
    quantize = jln.MXFloat8(eight) if blocks else jln.Float8(scale, eight)

    def step(x, *rest):
        def call(**how):
            result = operator(x, *rest, module=jln, implementation="triton", **how)
            return result[0] if isinstance(result, tuple) and not isinstance(result, jln.Quantized) else result

        return call(quantize=quantize), call(dtype="float32")

    with lowering_for(chip):
        program = Program(step, x, *rest)
    got, y = program.run(x, *rest)
    # Another result may have another tile, whose sums of a row differ in their last bits.
    low, high = (
        block_scaled(a, eight) if blocks else scaled(a, scale, eight)
        for a in (np.asarray(y, "float64") * (1 - 1e-6), np.asarray(y, "float64") * (1 + 1e-6))
    )
    values = np.asarray(got.values, "float32") * spread(got.scale)
    between = [np.asarray(a.values, "float32") * spread(a.scale) for a in (low, high)]
    assert np.all(values >= np.minimum(*between)) and np.all(values <= np.maximum(*between))
    assert np.mean(between[0] != between[1]) < 5e-3  # nearly all bits are known
    if blocks:
        assert np.all((got.scale.astype("float32") == low.scale) | (got.scale.astype("float32") == high.scale))
    else:
        np.testing.assert_allclose(got.amax, high.amax, rtol=3e-6)
        assert got.scale == scale


@pytest.mark.parametrize(("name", "shape", "dtype", "chip", "to"), CASES[:3])
def test_several_ways(name, shape, dtype, chip, to):
    """Each of them has the bits that a kernel for it alone writes; of another tile a number's last ones may differ."""
    operator = workbench.OPERATORS.get(name) or workbench.FORMS[name]
    given = workbench.arguments(operator, shape, dtype)
    kinds = jln.MXFloat8(DTYPES[to]), jln.Float8(0.037), None

    def step(x, *rest):
        def call(**how):
            result = operator(x, *rest, module=jln, implementation="triton", **how)
            return result if isinstance(result, jln.Quantized | Made) or not isinstance(result, tuple) else result[0]

        ways = call(quantize=Ways(kinds), dtype="float32").ways
        alone = [*(call(quantize=k) for k in kinds[:2]), call(dtype="float32")]
        return [[q._replace(carrier=None) if isinstance(q, jln.Quantized) else q for q in of] for of in (ways, alone)]

    with lowering_for(chip):
        program = Program(step, *given)
    for a, b in zip(*(jax.tree.leaves(of) for of in program.run(*given)), strict=True):
        a, b = (np.asarray(v, "float32") for v in (a, b))
        assert np.mean(a != b) < 5e-3 or np.allclose(a, b, rtol=3e-6, atol=1e-6)


# Every bfloat16, with infinities and NaN: a row of ones has them as its norm where they are its scale.
@pytest.mark.parametrize("chip", ["l4", "h200", "b200"])
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("blocks", [False, True], ids=["one scale", "blocks"])
def test_every_number_of_bfloat16(blocks, to, chip):
    numbers, eight = every_bfloat16(flushed=True), DTYPES[to]
    scale = np.float32(0.75)
    quantize = jln.MXFloat8(eight) if blocks else jln.Float8(scale, eight)
    ones = np.ones((64, 1, 1024), "bfloat16")

    def step(ones, numbers):
        return jln.rms_norm(ones, numbers, epsilon=0.0, quantize=quantize, implementation="triton")

    with lowering_for(chip):
        program = Program(step, ones, numbers)
    compare(program.run(ones, numbers), block_scaled(numbers, eight) if blocks else scaled(numbers, scale, eight))


def of_statistics(x, scale, offset, mean, rstd, transposed, eight):
    """The eight bits and scales of blocks along the rows, as a user would have them."""
    settings = AlongRows(Norm(-1, 1e-6, Switches(mean is not None)), transposed)
    values, scales = in_blocks_of_rows(
        functools.partial(along_rows, implementation="triton"),
        Arrays(x=x, scale=scale, offset=offset, mean=mean, rstd=rstd),
        settings,
        jnp.dtype(eight).name,
    )
    return jln.Quantized(values, jax.lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu))


# Whole tiles of blocks, and a part of one; a last block that rows do not fill; columns of half a tile.
ALONG_ROWS = [
    ((256, 512), "bfloat16", "h200", "e4m3"),
    ((3, 64, 96), "float16", "l4", "e5m2"),
    ((5, 32, 160), "bfloat16", "b200", "e4m3"),
    ((300, 96), "float32", "b200", "e4m3"),
    ((11, 32), "bfloat16", "h200", "e5m2"),
]


@pytest.mark.parametrize("transposed", [False, True], ids=["rows first", "H first"])
@pytest.mark.parametrize(("shape", "dtype", "chip", "to"), ALONG_ROWS)
def test_blocks_of_rows(shape, dtype, chip, to, transposed):
    """Bits are those of y in float64 but at ties; every byte is moved once, by 16, in less time than memory needs."""
    of_row, column = (*shape[:-1], 1), (*[1] * (len(shape) - 1), shape[-1])
    x = workbench.normal(0, shape, dtype) * jnp.exp2(jnp.arange(shape[-1]) % 24 - 12).astype(dtype).reshape(column)
    scale, offset = (workbench.normal(i, column, dtype) for i in (1, 2))
    mean, rstd = workbench.normal(3, of_row, "float32"), 1 + jnp.abs(workbench.normal(4, of_row, "float32"))
    operands = x, scale, offset, mean, rstd
    with lowering_for(chip):
        program = Program(lambda *a: of_statistics(*a, transposed, DTYPES[to]), *operands)
    got = program.run(*operands)
    wide = [np.asarray(a, "float64") for a in operands]
    true = blocks_of_rows((wide[0] - wide[3]) * wide[4] * wide[1] + wide[2], transposed, DTYPES[to])
    assert np.mean(np.asarray(got.values).view("u1") != true.values.view("u1")) < 2e-3
    assert np.mean(np.asarray(got.scale, "float32") != true.scale) < 2e-3
    if shape == (256, 512):
        (moved,) = traffic.of(program, frozenset({x.size}))
        assert moved.wide == 1 and moved.sectors <= 1.01
        assert moved.issue_share(x.size * 3 + x.size // 32) <= 0.85


@pytest.mark.parametrize("chip", ["l4", "h200", "b200"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows first", "H first"])
def test_blocks_of_rows_of_every_bfloat16(transposed, chip):
    numbers = every_bfloat16(flushed=True).reshape(-1, 32).T.copy()
    rstd = np.ones((32, 1), "float32")
    with lowering_for(chip):
        program = Program(
            lambda x, rstd: of_statistics(x, None, None, None, rstd, transposed, DTYPES["e4m3"]), numbers, rstd
        )
    true = blocks_of_rows(numbers, transposed, DTYPES["e4m3"])
    compare(*along_last(transposed, program.run(numbers, rstd), true))
