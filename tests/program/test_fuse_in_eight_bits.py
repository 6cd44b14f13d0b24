"""Rung 4: norms in front of products in eight bits: fuse leaves RMSNorms to XLA, and takes LayerNorms as they are.

`pytest -n0 -s --confcutdir=tests/program tests/program/test_fuse_in_eight_bits.py` prints MB that a forward pass and a
step move: as written, fused, and of RMSNorms with their operator, too. JAX's products are compiled for a B200, where
cuDNN multiplies, the others for an H200.
"""

import jax
import pytest

import jln
import program
from absent_gpu import struct, triton_kernels
from eight_bit_products import PRODUCTS

MB = 10**6
ROWS, H = 8192, 4096
X, SCALE, KERNEL = struct(ROWS, H), struct(H), struct(H, H)

# Products, whether they are behind a sum, and how many: MB of a forward pass and a step with a LayerNorm's operator.
TABLE = {
    ("JAX", False, 1): (522, 1482),
    ("JAX", False, 3): (944, 3449),
    ("JAX", True, 1): (656, 1750),
    ("Flax", False, 1): (403, 1032),
    ("Flax", False, 2): (604, 1854),
    ("Flax", False, 3): (805, 2542),
    ("Flax", True, 1): (537, 1300),
    ("Flax, rounded", False, 1): (503, 1250),
    ("Flax, rounded", False, 3): (1107, 3196),
    ("Flax, rounded", True, 1): (638, 1519),
    ("current scales", False, 1): (503, 1049),
    ("current scales", False, 3): (906, 2391),
    ("current scales", True, 1): (638, 1317),
}


def plain_norm(kind):
    """The norm of x or of a sum, and what it is of, in plain jnp."""
    norm = getattr(jln.reference, kind)

    def both(x, residual, *parameters):
        total = x if residual is None else x + residual
        return norm(total, *parameters), total

    return both


def by_operator(x, residual, scale):
    """The RMSNorm with its operator called, which fuse does not put there."""
    return (jln.rms_norm(x, scale), x) if residual is None else jln.add_rms_norm(x, residual, scale)


def programs_of(case, norm, count, transformation=lambda f: f):
    """Forward and a step of products behind a norm, each with scales of its own; a sum is a result, too."""
    name, adds, number = case
    multiply, scales = PRODUCTS[name]

    def forward(x, residual, parameters, kernels, scales):
        y, total = norm(x, residual, *parameters)
        products = [multiply(y, kernel, *of) for kernel, of in zip(kernels, scales, strict=True)]
        return products, total if adds else None

    function = transformation(forward)

    def step(*operands):
        results, pull = jax.vjp(function, *operands)
        return pull(results)

    of_each = jax.eval_shape(lambda: scales)
    operands = X, X if adds else None, [SCALE] * count, [KERNEL] * number, [of_each] * number
    chip = "b200" if name == "JAX" else "h200"
    return [program.compile_for(f, *operands, chip=chip) for f in (function, step)]


def megabytes(reports):
    return [report.bytes_total / MB for report in reports]


def show(case, norm, **columns):
    name, adds, number = case
    words = [f"{what} {forward:6.0f} {step:6.0f}" for what, (forward, step) in columns.items()]
    print(f"{name:15} {norm:10} {'a sum' if adds else 'x':6} {number}", *words, sep="  ")


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_an_rms_norm_is_left(case):
    """XLA makes its eight bits: the program has no kernel of the package's, and moves what the author's does."""
    norm = plain_norm("rms_norm")
    plain, fused = programs_of(case, norm, 1), programs_of(case, norm, 1, jln.fuse)
    ours = programs_of(case, by_operator, 1)
    show(case, "rms_norm", plain=megabytes(plain), fused=megabytes(fused), operator=megabytes(ours))
    assert not any(map(triton_kernels, fused)) and all(map(triton_kernels, ours))
    assert megabytes(fused) == megabytes(plain)


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_a_layer_norm_is_taken(case):
    """The operator is one kernel forward, and a step moves 13 to 37 % less than the author's."""
    norm = plain_norm("layer_norm")
    plain, fused = programs_of(case, norm, 2), programs_of(case, norm, 2, jln.fuse)
    show(case, "layer_norm", plain=megabytes(plain), fused=megabytes(fused))
    assert len(triton_kernels(fused[0])) == 1
    assert all(found <= 1.01 * most for found, most in zip(megabytes(fused), TABLE[case], strict=True))
    assert megabytes(fused)[1] <= 0.88 * megabytes(plain)[1]
