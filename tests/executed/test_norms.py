"""Compiled kernels of the norms, executed: values and every gradient, at sizes where the kernels work differently."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from cases import Case, cases, check, lowering_for
from ptx import Program

# Row lengths. 1: one element, and a variance of 0. 17, 33 and 65: a thread has one element. 64, 128, 256 and 1024: full
# tiles of several rows or one. 768: a quarter of the tile is masked. 1000: ragged, with rows on 16 bytes; 1001: ragged,
# with rows off them. 4096: at most two tiles are loaded ahead. 8192: the widest whole rows in 16 bits. 16384: two to
# four programs a row. 16385: chunks, and a kernel for the row sums. In float64 the last two come at 4096 and 4097.
# 20000 and 32768: chunks of rows that an RMSNorm in 16 bits takes in one kernel. 20488 and 32768 of a LayerNorm, and
# 16388 and 17416 in float32: such rows shared by two programs, the last part of an odd number of chunks.
# Numbers of rows. 1; fewer than a tile has; one more than whole tiles have; and on three SMs, several tiles a program,
# the last one ragged.
SIZES = [
    Case("layer_norm", (1, 1)),
    Case("rms_norm", (5, 1), "bfloat16", "a100"),
    Case("add_layer_norm", (37, 17), "float32"),
    Case("layer_norm", (9, 33), "bfloat16", "l4"),
    Case("rms_norm", (21, 65), "float16", "b200"),
    Case("add_rms_norm", (1, 64), "float64", "a100"),
    Case("layer_norm", (70, 64), "float16", "small-h200"),
    Case("layer_norm", (1, 128), "bfloat16", "b200"),
    Case("add_layer_norm", (401, 128), "bfloat16", "small-h200"),
    Case("rms_norm", (197, 128), "float32", "small-a100"),
    Case("layer_norm", (33, 256), "float64", "l4"),
    Case("add_rms_norm", (130, 256), "bfloat16", "small-b200"),
    Case("layer_norm", (70, 768), "bfloat16", "small-h200"),
    Case("add_layer_norm", (33, 768), "float16", "a100"),
    Case("rms_norm", (5, 768), "float32", "l4"),
    Case("add_layer_norm", (29, 1000), "float32", "small-l4"),
    Case("layer_norm", (29, 1001), "bfloat16", "small-h200"),
    Case("layer_norm", (17, 1024), "float32", "b200"),
    Case("rms_norm", (7, 1024), "float64", "small-h200"),
    Case("add_rms_norm", (1, 4096), "float16", "h200"),
    Case("layer_norm", (29, 4096), "bfloat16", "small-h200"),
    Case("add_layer_norm", (7, 4096), "float32", "small-b200"),
    Case("layer_norm", (3, 4096), "float64", "small-a100"),
    Case("layer_norm", (7, 8192), "bfloat16", "small-a100"),
    Case("rms_norm", (4, 8191), "float32", "small-h200"),
    Case("layer_norm", (7, 16384), "float32", "small-h200"),
    Case("add_rms_norm", (3, 16384), "bfloat16", "small-l4"),
    Case("add_layer_norm", (5, 16385), "bfloat16", "small-h200"),
    Case("layer_norm", (2, 16388), "float32", "b200"),
    Case("rms_norm", (1, 40000), "float16", "h200"),
    Case("add_layer_norm", (3, 4097), "float64", "small-h200"),
    Case("rms_norm", (7, 32768), "bfloat16", "small-h200"),
    Case("layer_norm", (7, 32768), "bfloat16", "small-h200"),
    Case("layer_norm", (5, 20488), "bfloat16", "h200"),
    Case("add_rms_norm", (3, 17416), "float32", "h200"),
    Case("add_rms_norm", (5, 20000), "float16", "small-a100", zero_centered_scale=True),
]

OPTIONS = [
    *(Case("add_layer_norm", (19, 100), "float32", "small-h200", without=w) for w in ("s", "o", "so")),
    Case("rms_norm", (19, 256), "bfloat16", "small-h200", without="s"),
    Case("layer_norm", (2, 16400), "bfloat16", "small-h200", without="s"),
    Case("layer_norm", (2, 16400), "float32", "a100", without="o", zero_centered_scale=True),
    Case("layer_norm", (19, 100), "bfloat16", "small-a100", zero_centered_scale=True, epsilon=0.5),
    Case("add_rms_norm", (19, 768), "float16", "b200", zero_centered_scale=True),
    Case("rms_norm", (6, 1000), "float32", epsilon=1e-2, magnitude=1e-2),
    Case("add_layer_norm", (19, 128), "bfloat16", "small-h200", forward_mode=True),
    Case("rms_norm", (3, 5, 40), "float32", "l4", forward_mode=True, zero_centered_scale=True),
    Case("layer_norm", (37, 1000), "float32", mean=1000.0),
    Case("layer_norm", (3, 16385), "float32", mean=1000.0),
    Case("rms_norm", (3, 8, 16), "float64", "a100", axis=(-1, -2)),
]

# The residual, or the parameters, have another dtype than x. 64 to 8192: a stream in float32, one warp a row and many.
MIXED = [
    Case("layer_norm", (37, 256), "bfloat16", "small-h200", parameters="float32"),
    Case("rms_norm", (37, 768), "float32", "a100", parameters="bfloat16"),
    Case("layer_norm", (5, 100), "float16", "b200", parameters="float64"),
    Case("layer_norm", (5, 100), "float64", "h200", parameters="float32"),
    Case("add_layer_norm", (37, 1024), "bfloat16", "small-h200", residual="float32", parameters="float32"),
    Case("add_rms_norm", (37, 1000), "float32", "l4", residual="bfloat16"),
    Case("add_layer_norm", (9, 65), "float16", "small-b200", residual="bfloat16", parameters="bfloat16"),
    Case("add_rms_norm", (5, 4096), "bfloat16", "small-a100", residual="float64"),
    Case("add_layer_norm", (2, 16392), "bfloat16", "small-h200", residual="float32"),
    *(
        Case("add_layer_norm", (2**15 // h, h), "bfloat16", "h200", residual="float32", parameters="float32")
        for h in (64, 256, 768, 4096, 8192)
    ),
]

# vmap makes groups of rows, which share some operands: whole rows, with several programs a group; and chunks.
VMAP = [
    *(
        Case("add_layer_norm", (9, 40), "float32", "small-h200", over=over)
        for over in ("x", "xrdt", "so", "s", "rt", "d", "xrsodt", "odt")
    ),
    Case("layer_norm", (70, 128), "bfloat16", over="sod"),
    Case("rms_norm", (5, 768), "float16", "b200", over="xs"),
    Case("add_rms_norm", (3, 16400), "bfloat16", "small-h200", over="rsd"),
    Case("layer_norm", (3, 16400), "float32", "small-a100", over="od"),
    Case("layer_norm", (200, 64), "float64", "l4", over="xso"),
]


@cases(SIZES, quick=(0, 4, 6, 8, 12, 15, 16, 20, 25, 27, 30))
def test_sizes(case):
    check(case)


@cases(OPTIONS, quick=(0, 4, 6, 10, 13))
def test_options(case):
    check(case)


@cases(MIXED, quick=(0, 3, 4))
def test_mixed_dtypes(case):
    check(case)


@cases(VMAP, quick=(0, 2, 3, 5, 10, 11))
def test_vmap(case):
    check(case)


# x's, the scale's and the offset's. Of examples along two axes; of heads, and of examples; of one along the other's and
# one more; and in chunks.
APART = [
    ((3, 13, 9, 128), (3, 1, 1, 128), (1, 13, 1, 128)),
    ((2, 9, 5, 100), (1, 1, 5, 100), (2, 1, 1, 100)),
    ((2, 9, 3, 64), (2, 1, 3, 64), (2, 1, 1, 64)),
    ((2, 4, 16400), (2, 1, 16400), (1, 1, 16400)),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("shape", "of_scale", "of_offset"), APART)
def test_parameters_along_different_axes(shape, of_scale, of_offset, dtype):
    """Results, and the backward pass of a product behind, which makes the norm's result again, are the reference's."""
    operands = [workbench.normal(i, of, dtype) for i, of in enumerate([shape, of_scale, of_offset, shape])]
    kernel = workbench.normal(4, (shape[-1], 8), dtype)

    def step(module, *operands):
        def f(x, scale, offset, kernel):
            return module.layer_norm(x, scale, offset), module.layer_norm_linear(x, scale, offset, kernel)

        *given, dy = operands
        y, pullback = jax.vjp(f, *given, kernel.astype(dy.dtype))
        return y, pullback((dy, dy[..., :8]))

    with lowering_for("small-h200"):
        program = Program(functools.partial(step, jln), *operands)
    assert {call.name for call in program.calls} >= {"jln_forward_kernel", "jln_backward_kernel"}
    got = program.run(*operands)
    wide = [a.astype("float64") for a in operands]
    plain, true = jax.jit(functools.partial(step, jln.reference))(*operands), step(jln.reference, *wide)
    for a, p, t in zip(*map(jax.tree.leaves, (got, plain, true)), strict=True):
        error, allowed = (np.linalg.norm(np.asarray(v, "float64") - t) for v in (a, p))
        assert error <= 2 * allowed + float(jnp.finfo(dtype).eps) / 2 * np.linalg.norm(t)
