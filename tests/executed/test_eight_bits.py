"""Compiled kernels that write eight bits, executed: bits and scales are those of what the kernel writes in float32."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jln
import workbench
from cases import lowering_for
from in_eight_bits import block_scaled, compare, every_bfloat16, scaled, spread
from ptx import Program

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
# Rows of one tile, of a ragged one, of several rows a program, and of chunks; and heads, each with a scale of its own;
# chips that have each their own PTX; in the end whether each 32 numbers have a scale.
CASES = [
    ("rms_norm", (37, 96), "bfloat16", "small-h200", "e4m3", True),
    ("layer_norm", (5, 768), "float16", "l4", "e5m2", False),
    ("add_rms_norm", (9, 4096), "bfloat16", "b200", "e4m3", True),
    ("add_layer_norm", (3, 20000), "bfloat16", "small-h200", "e4m3", False),
    ("rms_norm_add_rms_norm", (19, 256), "float32", "h200", "e5m2", False),
    ("layer_norm", (21, 3, 128), "bfloat16", "small-h200", "e4m3", True),
    ("rms_norm", (2, 3, 20000), "bfloat16", "b200", "e5m2", True),
]


@pytest.mark.parametrize(("name", "shape", "dtype", "chip", "to", "blocks"), CASES)
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
    true = block_scaled(np.asarray(y), eight) if blocks else scaled(np.asarray(y), scale, eight)
    # Another result may have another tile, whose sums of a row differ in their last bits: few numbers are rounded to
    # the next one then.
    values, expected = (np.asarray(a.values, "float32") * spread(a.scale) for a in (got, true))
    assert np.mean(values != expected) < 5e-3
    np.testing.assert_array_less(np.abs(values - expected), 0.3 * np.abs(expected) + 4e-3 * spread(true.scale))
    if not blocks:
        np.testing.assert_allclose(got.amax, true.amax, rtol=3e-6)
        assert got.scale == scale


# Every bfloat16, with infinities and NaN: a row of ones has them as its norm where they are its scale.
@pytest.mark.parametrize(
    ("blocks", "to", "chip"),
    [(False, "e4m3", "h200"), (True, "e4m3", "h200"), (False, "e5m2", "l4"), (True, "e5m2", "b200")],
)
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
