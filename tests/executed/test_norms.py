"""Compiled kernels of the norms, executed: values and every gradient, at sizes where the kernels work differently."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from cases import Case, check, lowering_for
from ptx import Program

# Row lengths. 1: one element, and a variance of 0. 65: a thread has one element. 128: full tiles of several rows.
# 768: a quarter of the tile is masked. 1000: ragged, with rows on 16 bytes; 1001: ragged, with rows off them. 4096: at
# most two tiles are loaded ahead. 16384: two to four programs a row. 16401, in float64 4097: chunks, and a kernel for
# the row sums. 17416: such rows shared by two programs, the last part of an odd number of chunks. 20000: chunks of rows
# that an RMSNorm in 16 bits takes in one kernel.
# Numbers of rows. 1; fewer than a tile has; and on three SMs, several tiles a program, the last one ragged.
SIZES = [
    Case("layer_norm", (1, 1)),
    Case("rms_norm", (21, 65), "float16", "b200"),
    Case("add_layer_norm", (401, 128), "bfloat16", "small-h200"),
    Case("layer_norm", (70, 768), "bfloat16", "small-h200"),
    Case("add_layer_norm", (29, 1000), "float32", "small-l4"),
    Case("layer_norm", (29, 1001), "bfloat16", "small-h200"),
    Case("layer_norm", (29, 4096), "bfloat16", "small-h200"),
    Case("layer_norm", (7, 16384), "float32", "small-h200"),
    Case("layer_norm", (3, 16401), "bfloat16", "small-h200"),
    Case("add_layer_norm", (3, 4097), "float64", "small-h200"),
    Case("add_rms_norm", (5, 20000), "float16", "small-a100", zero_centered_scale=True),
    Case("add_rms_norm", (3, 17416), "float32", "h200"),
]
OPTIONS = [
    Case("add_layer_norm", (19, 100), "float32", "small-h200", without="s"),
    Case("layer_norm", (19, 100), "bfloat16", "small-a100", zero_centered_scale=True, epsilon=0.5),
    # The residual, or the parameters, have another dtype than x.
    Case("add_layer_norm", (37, 1024), "bfloat16", "small-h200", residual="float32", parameters="float32"),
]
# Kernels of groups of rows, which share some operands. vmap makes them of whole rows and of chunks. A head has several
# programs or one; vmap's examples share heads' parameters.
GROUPS = [
    Case("add_layer_norm", (9, 40), "float32", "small-h200", over="rsd"),
    Case("add_rms_norm", (3, 16400), "bfloat16", "small-h200", over="rsd"),
    Case("layer_norm", (21, 3, 64), "bfloat16", "small-h200", of_heads=True, over="sd"),
    Case("rms_norm", (3, 4, 2, 16400), "bfloat16", "small-a100", of_heads=True),
    Case("rms_norm", (3, 40, 4, 64), "bfloat16", "small-b200", of_examples=True, of_heads=True),
]
FIRST, LAST = "rms_norm_gated", "rms_norm_gated, norm_before_gate=False"
GATED = [
    Case(FIRST, (29, 1000), "float32", "small-l4"),
    Case(LAST, (33, 768), "bfloat16", "small-b200", parameters="float32", zero_centered_scale=True),
    Case(LAST, (5, 16384), "bfloat16", "small-a100"),
    Case(FIRST, (2, 40000), "float32", "small-h200"),
    Case(LAST, (40, 4, 128), "bfloat16", "small-h200", of_heads=True),
]
# Sums with x's bias and a gate, which may be of each example's own.
LAYER, RMS = "add_layer_norm, x_bias and gate", "add_rms_norm, x_bias and gate"
SUMS = [
    Case(LAYER, (29, 1000), "float32", "small-l4"),
    Case(RMS, (33, 768), "bfloat16", "small-b200", residual="float32", parameters="float32"),
    Case(LAYER, (2, 40000), "float32", "small-h200", without="g"),
    Case(LAYER, (3, 70, 128), "bfloat16", "small-h200", without="e", of_examples=True),
    Case(LAYER, (9, 40), "float32", "small-h200", over="eg"),
]
# A norm in front of a sum, and norms on both sides of one, with a gate between or none. 5376 beside a float32 residual:
# a fourth round of a thread's is left out. 16384: two kernels forward and two backward, and XLA multiplies by the gate.
BOTH = "rms_norm_add_rms_norm"
SIDES = [
    Case("rms_norm_add", (33, 768), "bfloat16", "small-b200", residual="float32", parameters="float32"),
    Case("layer_norm_add", (2, 40000), "bfloat16", "small-h200"),
    Case(BOTH, (29, 1001), "bfloat16", "small-a100"),
    Case(BOTH, (7, 8192), "bfloat16", "small-h200", zero_centered_scale=True),
    Case(BOTH, (7, 5376), "bfloat16", "small-h200", residual="float32", parameters="float32"),
    Case(BOTH, (9, 40), "float32", "small-h200", over="ps"),
    Case(f"{BOTH}, gate", (9, 100), "float64", "a100", zero_centered_scale=True),
    Case(f"{BOTH}, gate", (3, 16384), "bfloat16", "small-h200"),
    Case(f"{BOTH}, gate", (5, 3, 100), "float32", "small-a100", of_heads=True),
]
CASES = [*SIZES, *OPTIONS, *GROUPS, *GATED, *SUMS, *SIDES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norms(case):
    check(case)


# x's, the scale's and the offset's. Of examples along two axes; of heads, and of examples; and in chunks.
APART = [
    ((3, 13, 9, 128), (3, 1, 1, 128), (1, 13, 1, 128)),
    ((2, 9, 5, 100), (1, 1, 5, 100), (2, 1, 1, 100)),
    ((2, 4, 16400), (2, 1, 16400), (1, 1, 16400)),
]


@pytest.mark.parametrize(("shape", "of_scale", "of_offset"), APART)
def test_parameters_along_different_axes(shape, of_scale, of_offset):
    """Results, and the backward pass of a product behind, which makes the norm's result again, are the reference's."""
    dtype = "bfloat16"
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
    wide = [a.astype("float64") for a in operands]
    plain, true = (jax.jit(functools.partial(step, jln.reference))(*of) for of in (operands, wide))
    for a, p, t in zip(*map(jax.tree.leaves, (program.run(*operands), plain, true)), strict=True):
        error, allowed = (np.linalg.norm(np.asarray(v, "float64") - t) for v in (a, p))
        assert error <= 2 * allowed + float(jnp.finfo(dtype).eps) / 2 * np.linalg.norm(t)
