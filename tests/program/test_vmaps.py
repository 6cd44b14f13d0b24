"""Rung 4: bytes moved and held under vmap, on one H200.

`pytest -n0 -s --confcutdir=tests/program tests/program/test_vmaps.py` prints what vmaps move.
"""

import functools

import jax
import pytest
from transformed import H, M, N, gradient, over_x, scale_and_offset

import jln
import program
from absent_gpu import struct, triton_kernels


def test_vmap_over_scales_writes_no_copies_of_x():
    """A vmap over 64 scales, of 32 rows each or the same 32, moves little more than one scale over 64 x 32 rows."""
    scale, offset = scale_and_offset()
    scales = struct(64, H, dtype="float32")
    flat = program.compile_for(gradient(jln.layer_norm), struct(64 * 32, H), scale, offset)
    own = program.compile_for(jax.vmap(gradient(jln.layer_norm), (0, 0, None)), struct(64, 32, H), scales, offset)
    same = program.compile_for(jax.vmap(gradient(jln.layer_norm), (None, 0, None)), struct(32, H), scales, offset)
    assert own.bytes_total <= 1.2 * flat.bytes_total
    assert same.bytes_total <= flat.bytes_total


@pytest.mark.parametrize(("lead", "wanted"), [((256, 8), 3), ((16, 8, 16), 1)], ids=["groups", "rows"])
def test_vmap_over_an_axis_that_is_not_in_front_transposes_nothing(lead, wanted):
    """A vmap over the second axis moves what one over the first does; of x alone where it has rows behind it, too."""
    middle = jax.vmap(jln.layer_norm, (1, None, None), 1)
    report = program.compile_for(gradient(middle, wanted), struct(*lead, H), *scale_and_offset())
    first = program.compile_for(
        gradient(jax.vmap(jln.layer_norm, over_x), wanted), struct(8, 256, H), *scale_and_offset()
    )
    assert report.bytes_total <= 1.01 * first.bytes_total


def tell(own, plain):
    print(f"\n{own.bytes_total / 1e6:.0f} MB, {own.bytes_total / plain.bytes_total:.2f} of plain jnp")


def with_gradients(f):
    def step(dy, *operands):
        y, pullback = jax.vjp(f, *operands)
        return y, pullback(dy)

    return step


def both_ways(f, *operands):
    """The report of a step that returns the result of `f`, and all gradients under a cotangent that is given."""

    return program.compile_for(with_gradients(f), jax.eval_shape(f, *operands), *operands)


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_examples_with_parameters_of_their_own_stay_where_they_lie(axis, around):
    """A vmap with parameters of each example moves every array once: in front, between rows, and before H.

    In the middle it moved 2.6 times as much, with x, its gradient, and their results transposed.
    """
    rows = [(32, 8, 2048, 128), (8, 32, 2048, 128), (8, 2048, 32, 128)][axis]
    own, x = struct(32, 128), struct(*rows)

    def f(x, residual, scale, offset, gate):
        return jln.add_layer_norm(x, residual, scale, offset, gate=gate)

    def of_one(*a):
        y, pullback = jax.vjp(f, *a[:5])
        return y, pullback(a[5:])

    places = (axis, axis, 0, None, 0)
    operands = x, x, own, struct(128), own
    if around:
        gradients = (axis, axis, 0, 0, 0)
        mapped = jax.vmap(of_one, (*places, axis, axis), ((axis, axis), gradients))
        report = program.compile_for(mapped, *operands, x, x)
    else:
        report = both_ways(jax.vmap(f, places, axis), *operands)
    of_rows, numbers = 2 * x.size * 10, 2 * 4 * 2 * x.size // 128
    assert report.bytes_total <= 1.01 * (of_rows + numbers)


def gated_sum(module, **how):
    return lambda x, residual, scale, offset, gate: module.add_layer_norm(x, residual, scale, offset, gate=gate, **how)


# A function of a module, the places of examples in the operands and in the result, the shapes, and the most that is
# moved beside plain jnp.
OF_EXAMPLES = {
    "in the middle": (lambda m: m.rms_norm, (2, 0), 2, ((8, 2048, 32, 128), (32, 128)), 0.83),
    "behind H": (lambda m: m.rms_norm, (3, 0), 3, ((8, 2048, 128, 32), (32, 128)), 1.17),
    "a residual for all": (
        lambda m: m.add_rms_norm,
        (2, None, None),
        2,
        ((8, 2048, 32, 128), (8, 2048, 128), (128,)),
        1.0,
    ),
    "a gated branch for all": (
        gated_sum,
        (None, 2, 0, 0, 0),
        2,
        ((8, 2048, 128), (8, 2048, 32, 128), *[(32, 128)] * 3),
        1.001,
    ),
    "a gated branch for all, behind H": (
        gated_sum,
        (None, 3, 0, 0, 0),
        3,
        ((8, 2048, 128), (8, 2048, 128, 32), *[(32, 128)] * 3),
        0.94,
    ),
}


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize(("f", "axes", "out", "shapes", "most"), OF_EXAMPLES.values(), ids=OF_EXAMPLES)
def test_vmap_of_norms_beside_plain_jnp(f, axes, out, shapes, most, around):
    """Examples that lie where a kernel does not take them move what XLA moves, and what they share stays one array.

    Behind H plain jnp reads x once for the sums of both passes, which in a model are apart: XLA reads it once more.
    """

    def report(f):
        mapped, operands = jax.vmap(f, axes, out), [struct(*shape) for shape in shapes]
        if not around:
            return both_ways(mapped, *operands)
        step = jax.vmap(with_gradients(f), (out, *axes), (out, tuple(a or 0 for a in axes)))
        return program.compile_for(step, jax.eval_shape(mapped, *operands), *operands)

    own, plain = report(f(jln)), report(f(jln.reference))
    tell(own, plain)
    assert own.bytes_total <= most * plain.bytes_total and own.temp_bytes <= 1.01 * plain.temp_bytes


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


@pytest.mark.parametrize("n", [64, 4096], ids=["few", "many"])
def test_vmap_that_shares_a_linear_has_one_gradient_of_its_kernel(n):
    """A vmap with a scale and an offset of each example moves what an axis of examples does, and holds no more."""
    x, own, kernel, bias = struct(4, 2048, 4096), struct(4, 4096), struct(4096, n), struct(n)
    mapped = [jax.vmap(m.layer_norm_linear, (0, 0, 0, None, None)) for m in (jln, jln.reference)]
    batched, plain = (both_ways(f, x, own, own, kernel, bias) for f in mapped)
    tell(batched, plain)
    own_axis = struct(4, 1, 4096)
    flat = both_ways(jln.layer_norm_linear, x, own_axis, own_axis, kernel, bias)
    assert batched.bytes_total <= 1.001 * flat.bytes_total and batched.temp_bytes <= 1.001 * flat.temp_bytes


def test_examples_that_share_a_linear_take_its_one_kernel_forward():
    """A vmap that nobody differentiates, with a scale of each example, writes no norm to memory."""
    x, own = struct(4, 2048, 2048), struct(4, 2048)
    report = program.compile_for(jax.vmap(jln.rms_norm_linear, (0, 0, None)), x, own, struct(2048, 64))
    assert len(triton_kernels(report)) == 1 and report.bytes_total <= 1.06 * 2 * x.size


@pytest.mark.parametrize("forward_mode", [False, True])
def test_examples_inside_of_the_derivative_are_rows(forward_mode):
    """The program of grad(vmap) over rows moves as many bytes as without vmap: no example has a dkernel of its own."""
    operands = (struct(16, 256, H), struct(H), struct(H), struct(H, N), struct(N))

    def f(*a):
        return jln.layer_norm_linear(*a, forward_mode=forward_mode)

    flat = program.compile_for(gradient(f, 5), *operands)
    batched = program.compile_for(gradient(jax.vmap(f, (0, *[None] * 4)), 5), *operands)
    assert batched.bytes_total == flat.bytes_total and batched.temp_bytes == flat.temp_bytes


def test_heads_inside_of_the_derivative_are_features():
    """A vmap over kernels that read one x moves what one kernel with an axis of heads does: x has one gradient.

    Heads that do not lie where the product has them are transposed, kernels and results, as plain jnp's are.
    """
    x, scale, kernel = struct(8, 1024, 2048), struct(2048), struct(2048, 32, 64)

    def step(f, dy, *kernel_first):
        return program.compile_for(lambda dy, *a: jax.vjp(f, *a)[1](dy), dy, x, scale, *kernel_first)

    flat = step(jln.rms_norm_linear, struct(8, 1024, 32, 64), kernel)
    in_place = step(jax.vmap(jln.rms_norm_linear, (None, None, 1), 2), struct(8, 1024, 32, 64), kernel)
    assert in_place.bytes_total == flat.bytes_total and in_place.temp_bytes == flat.temp_bytes
    in_front = jax.vmap(jln.rms_norm_linear, (None, None, 0))
    moved = step(in_front, struct(32, 8, 1024, 64), struct(32, 2048, 64))
    transposed = 2 * (2 * 2048 * 2048 * 2 + 8 * 1024 * 2048 * 2)  # kernel and dkernel, and dy, read and written
    assert moved.bytes_total <= flat.bytes_total + 1.01 * transposed


def test_what_is_not_differentiated_is_no_wider_call():
    """A vmap over kernels in front transposes none of them where x has no gradient: norm and product, as without."""
    x, scale, kernels = struct(8192, 2048), struct(2048), struct(32, 2048, 64)
    forward = program.compile_for(jax.vmap(jln.rms_norm_linear, (None, None, 0)), x, scale, kernels)
    arrays = 3 * 8192 * 2048 * 2 + 32 * 2048 * 64 * 2  # x, the norm's result written and read, y is as large
    assert forward.bytes_total <= 1.01 * (arrays + 8192 * 2048 * 2)


# By vmaps from the innermost, with the places of x, scale, kernel and bias in each, the shapes, and the most that is
# moved beside what plain jnp moves.
MIXED = {
    "experts": (((None, None, 0, None), (0, None, 0, None)), ((4, M, H), (H,), (4, 8, H, 512), (512,)), 0.87),
    "heads around experts": (
        ((0, None, 0, None), (None, None, 0, None)),
        ((4, M, H), (H,), (8, 4, H, 512), (512,)),
        0.8,
    ),
    "one expert each": (((0, None, 0, None),), ((8, M, H), (H,), (8, H, 512), (512,)), 0.79),
    "experts of members": (((0, 0, 0, None), (None, 0, 0, None)), ((8, M, H), (4, 8, H), (4, 8, H, 512), (512,)), 0.89),
    "members": (((None, 0, 0, None),), ((M, H), (8, H), (8, H, 512), (512,)), 0.92),
    "biases": (((None, None, None, 0),), ((M, H), (H,), (H, N), (8, N)), 0.87),
    "biases of rows": (((0, None, None, 0),), ((8, M, H), (H,), (H, 512), (8, 512)), 0.74),
}


@pytest.mark.parametrize(("vmaps", "shapes", "most"), MIXED.values(), ids=MIXED)
def test_vmap_of_some_arrays_and_not_of_others(vmaps, shapes, most):
    """Vmaps that mix rows with kernels, scales or biases of examples move less than plain jnp's, forward and backward.

    There is one norm of the rows, each product by itself, and nothing written for examples that share it.
    """

    def report(module):
        f = functools.reduce(jax.vmap, vmaps, module.rms_norm_linear)
        return program.compile_for(gradient(f, 4), *(struct(*shape) for shape in shapes))

    own, plain = report(jln), report(jln.reference)
    tell(own, plain)
    assert own.bytes_total <= most * plain.bytes_total and own.temp_bytes <= 1.01 * plain.temp_bytes
