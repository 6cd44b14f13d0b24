"""Rung 4: bytes moved and held on one H200 under vmap, and where no kernel takes rows as they lie.

`pytest -n0 -s --confcutdir=tests/program tests/program/test_vmaps.py` prints what moves.
"""

import functools

import jax
import pytest
from transformed import H, M, N, gradient, scale_and_offset

import jln
import program
from absent_gpu import struct


def with_gradients(f):
    def step(dy, *operands):
        y, pullback = jax.vjp(f, *operands)
        return y, pullback(dy)

    return step


def both_ways(f, *operands):
    """The report of a step that returns the result of `f`, and all gradients under a cotangent that is given."""
    return program.compile_for(with_gradients(f), jax.eval_shape(f, *operands), *operands)


def tell(own, plain):
    print(f"\n{own.bytes_total / 1e6:.0f} MB, {own.bytes_total / plain.bytes_total:.2f} of plain jnp")


def gated_sum(module, **how):
    return lambda x, residual, scale, offset, gate: module.add_layer_norm(x, residual, scale, offset, gate=gate, **how)


def over(*axis, name="layer_norm"):
    return lambda m: functools.partial(getattr(m, name), axis=axis)


# Of x in bfloat16: an operator of a module, its vmaps from the innermost with the places of its axis in operands and
# result, the operands' shapes, and the most MB of a step. Behind it what plain jnp moves.
X, OWN, SHARED, HEADS = (4, 2048, 4096), (4, 4096), (4096,), (4, 2048, 32, 128)
EACH, ALL = ((0, None, None),), ((0, 0, 0),)
MOVED = {
    "parameters for all": (lambda m: m.layer_norm, (), (X, SHARED, SHARED), 345),
    "rows in front": (lambda m: m.layer_norm, (EACH,), (X, SHARED, SHARED), 345),
    "rows in the middle": (lambda m: m.layer_norm, (((1, None, None), 1),), (X, SHARED, SHARED), 345),
    "rows, as in Equinox": (lambda m: m.layer_norm, (EACH, EACH), (X, SHARED, SHARED), 345),
    "adaLN": (lambda m: m.layer_norm, (), (X, (4, 1, 4096), (4, 1, 4096)), 345),
    "adaLN by vmaps": (lambda m: m.layer_norm, (EACH, ALL), (X, OWN, OWN), 345),
    "adaLN with a gate": (gated_sum, (), (X, X, *[(4, 1, 4096)] * 3), 686),
    "adaLN with a gate by vmap": (gated_sum, (((0, 0, 0, 0, 0),),), (X, X, OWN, OWN, OWN), 686),
    "heads": (lambda m: m.rms_norm, (), (HEADS, (128,)), 340),
    "heads with scales": (lambda m: m.rms_norm, (), (HEADS, (1, 1, 32, 128)), 340),
    "heads with scales by vmap": (lambda m: m.rms_norm, (((2, 0), 2),), (HEADS, (32, 128)), 340),
    "gated heads": (lambda m: m.rms_norm_gated, (), ((4, 2048, 8, 512), (4, 2048, 8, 512), (1, 1, 8, 512)), 541),
    "an offset of each position": (lambda m: m.layer_norm, (), (X, SHARED, (1, 2048, 4096)), 540),  # 841
    "rows wider than a tile": (lambda m: m.layer_norm, (), ((2048, 20480), (20480,), (20480,)), 600),  # 764
    "channels first": (over(1), (), ((64, 768, 196), (768,), (768,)), 158),  # 175
    "two axes in front": (over(0, 1, name="rms_norm"), (), ((64, 64, 8192), (64, 64)), 405),  # 403
    "axes apart": (over(0, 2, name="rms_norm"), (), ((64, 8192, 64), (64, 64)), 415),  # 413
    "a residual for all": (
        lambda m: m.add_layer_norm,
        (((0, None, None, None),),),
        (X, X[1:], SHARED, SHARED),
        1117,
    ),  # 1112
    "parameters in the middle": (
        gated_sum,
        (((1, 1, 0, None, 0), 1),),
        ((8, 32, 2048, 128), (8, 32, 2048, 128), (32, 128), (128,), (32, 128)),
        2560,
    ),  # 2551
}


@pytest.mark.parametrize(("operator", "vmaps", "shapes", "megabytes"), MOVED.values(), ids=MOVED)
def test_bytes(operator, vmaps, shapes, megabytes):
    """A step that one call makes moves every array once; by XLA or in plain jnp it moves no more than plain jnp's."""
    f = functools.reduce(lambda f, places: jax.vmap(f, *places), vmaps, operator(jln))
    report = both_ways(f, *(struct(*shape) for shape in shapes))
    print(f"\n{report.bytes_total / 1e6:.1f} MB, {report.temp_bytes / 1e6:.1f} held")
    assert report.bytes_total <= 1e6 * megabytes


# Of each example by itself: the operator, the places of the examples in the operands, the shapes of the operands, and
# the most that moves beside plain jnp. Results lie as x does.
OF_PARAMETERS = (32, 128), (128,), (32, 128)
MIDDLE, BEHIND = (8, 32, 2048, 128), (8, 2048, 128, 32)
OF_EACH = {
    "in front": (gated_sum, (0, 0, 0, None, 0), (*[(32, 8, 2048, 128)] * 2, *OF_PARAMETERS), 0.54),
    "in the middle": (gated_sum, (1, 1, 0, None, 0), (MIDDLE, MIDDLE, *OF_PARAMETERS), 1.001),
    "behind H": (gated_sum, (3, 3, 0, None, 0), (BEHIND, BEHIND, *OF_PARAMETERS), 0.94),
    "a residual for all": (gated_sum, (1, None, 0, None, 0), (MIDDLE, (8, 2048, 128), *OF_PARAMETERS), 1.001),
    "a norm in the middle": (lambda m: m.layer_norm, (1, None, None), (MIDDLE, (128,), (128,)), 1.001),
    "a norm behind H": (lambda m: m.rms_norm, (3, 0), (BEHIND, (32, 128)), 1.17),
}


def of_each(f, places, *operands):
    """The report of a vmap around a step of `f`, whose results lie as the first operand does."""
    out = places[0] or 0
    step = jax.vmap(with_gradients(f), (out, *places), (out, tuple(i or 0 for i in places)))
    return program.compile_for(step, jax.eval_shape(jax.vmap(f, places, out), *operands), *operands)


@pytest.mark.parametrize(("operator", "places", "shapes", "most"), OF_EACH.values(), ids=OF_EACH)
def test_gradients_of_each_example(operator, places, shapes, most):
    """A vmap around the derivative has x where it lies: kernels take it in front, else XLA reads it once more.

    Plain jnp reads x once for the sums of both passes, which in a model are apart.
    """
    own, plain = (of_each(operator(m), places, *(struct(*s) for s in shapes)) for m in (jln, jln.reference))
    tell(own, plain)
    assert own.bytes_total <= most * plain.bytes_total and own.temp_bytes <= 1.01 * plain.temp_bytes


def test_scales_of_each_example_write_no_copies_of_x():
    """A vmap around 64 scales, of 32 rows each or the same 32, moves little more than one scale of 64 x 32 rows."""
    scale, offset = scale_and_offset()
    scales, step = struct(64, H, dtype="float32"), gradient(jln.layer_norm)
    flat = program.compile_for(step, struct(64 * 32, H), scale, offset)
    own = program.compile_for(jax.vmap(step, (0, 0, None)), struct(64, 32, H), scales, offset)
    same = program.compile_for(jax.vmap(step, (None, 0, None)), struct(32, H), scales, offset)
    print(f"\n{own.bytes_total / flat.bytes_total:.2f}, {same.bytes_total / flat.bytes_total:.2f}")
    assert own.bytes_total <= 1.2 * flat.bytes_total
    assert same.bytes_total <= flat.bytes_total


@pytest.mark.parametrize("forward_mode", [False, True])
def test_rows_that_share_a_linear(forward_mode):
    """The program of grad(vmap) over rows moves as many bytes as without vmap: no example has a dkernel of its own."""
    operands = (struct(16, 256, H), struct(H), struct(H), struct(H, N), struct(N))

    def f(*a):
        return jln.layer_norm_linear(*a, forward_mode=forward_mode)

    flat = program.compile_for(gradient(f, 5), *operands)
    batched = program.compile_for(gradient(jax.vmap(f, (0, *[None] * 4)), 5), *operands)
    assert batched.bytes_total == flat.bytes_total and batched.temp_bytes == flat.temp_bytes


@pytest.mark.parametrize("n", [64, 4096], ids=["few", "many"])
def test_groups_that_share_a_linear(n):
    """A vmap with a scale and an offset of each example moves what an axis of examples does, and holds no more."""
    x, own, kernel, bias = struct(4, 2048, 4096), struct(4, 4096), struct(4096, n), struct(n)
    batched = both_ways(jax.vmap(jln.layer_norm_linear, (0, 0, 0, None, None)), x, own, own, kernel, bias)
    own_axis = struct(4, 1, 4096)
    flat = both_ways(jln.layer_norm_linear, x, own_axis, own_axis, kernel, bias)
    assert batched.bytes_total <= 1.001 * flat.bytes_total and batched.temp_bytes <= 1.001 * flat.temp_bytes


# The places of the examples in x, scale, kernel and bias, the shapes, and the most that moves beside plain jnp under a
# vmap around a derivative.
DIFFERENT = {
    "experts": ((0, None, 0, None), ((8, M, H), (H,), (8, H, 512), (512,)), 0.87),
    "heads": ((None, None, 0, None), ((M, H), (H,), (8, H, 512), (512,)), 0.86),
    "heads of few features": ((None, None, 0, None), ((M, H), (H,), (8, H, 16), (16,)), 0.88),
    "members": ((None, 0, 0, None), ((M, H), (8, H), (8, H, 512), (512,)), 0.8),
    "biases of rows": ((0, None, None, 0), ((8, M, H), (H,), (H, 512), (8, 512)), 1.0),
}


@pytest.mark.parametrize(("places", "shapes", "around"), DIFFERENT.values(), ids=DIFFERENT)
def test_examples_that_differ_in_a_linear(places, shapes, around):
    """Inside of a derivative examples that differ in a Linear are plain jnp's step; around one they move less."""
    operands, norms = [struct(*s) for s in shapes], (jln.rms_norm_linear, jln.reference.rms_norm_linear)
    own, plain = (both_ways(jax.vmap(f, places), *operands) for f in norms)
    assert own.bytes_total == plain.bytes_total and own.temp_bytes == plain.temp_bytes
    own, plain = (of_each(f, places, *operands) for f in norms)
    tell(own, plain)
    assert own.bytes_total <= around * plain.bytes_total


def both_sides(module, **how):
    return lambda *a: module.rms_norm_add_rms_norm(*a, **how)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("f", "columns"), [(gated_sum, 3), (both_sides, 2)], ids=["gate", "both sides"])
def test_sums_by_xla_beside_plain_jnp(f, columns, dtype):
    """The total's cotangent, of which several gradients are made, is in memory once, and no wider than total.

    Plain jnp makes rstd with the sums of the backward pass in one read, which in a model are apart.
    """
    x, column = struct(8192, 4096, dtype=dtype), struct(4096, dtype=dtype)
    operands = x, x, *[column] * columns
    own, plain = (both_ways(g, *operands) for g in (f(jln, implementation="xla"), f(jln.reference)))
    tell(own, plain)
    once_more = x.size * x.dtype.itemsize
    assert own.bytes_total <= plain.bytes_total + 1.02 * once_more and own.temp_bytes <= 1.02 * plain.temp_bytes
