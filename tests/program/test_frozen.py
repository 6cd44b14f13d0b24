"""Rung 4: bytes that the backward pass moves on an H200 where some arguments are frozen, as under LoRA."""

import jax
import jax.numpy as jnp
import pytest

import jln
import program
from absent_gpu import struct

MB = 10**6
M, H = 8192, 4096
NORM = ("x", "scale", "offset")
LINEAR = (*NORM, "kernel", "bias")


def operands(n=None):
    """Return the shapes of dy and of an operator's operands: the norm's, or with `n` features the Linear's too."""
    parameter = struct(H, dtype="float32")
    norm = (struct(M, n or H), struct(M, H), parameter, parameter)
    return norm if n is None else (*norm, struct(H, n), struct(n))


def gradients(function, names, some):
    """Return a step that returns y and the gradients of the arguments that `some` names."""

    def step(dy, *operands):
        def of_some(given):
            return function(*(given.get(name, a) for name, a in zip(names, operands, strict=True)))

        y, pullback = jax.vjp(of_some, {n: a for n, a in zip(names, operands, strict=True) if n in some})
        return y, pullback(dy)

    return step


def backward(function, names, some):
    """Return a step that returns the gradients alone, so that y is used for nothing."""
    step = gradients(function, names, some)
    return lambda *operands: step(*operands)[1]


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(
    ("some", "megabytes", "launches"),
    [
        (("x",), 269, 2),  # x is read twice and dy once, dx is written, y is not
        (("scale",), 211, 3),  # x is read twice and dy once, shares of dscale are written
        (("offset",), 68, 2),  # dy is read
        (("x", "scale"), 278, 3),
        (NORM, 286, 3),
    ],
)
def test_norm(some, megabytes, launches, forward_mode):
    """No y is written where only its derivatives are used, and no gradient that is not asked for.

    With everything computed the step moved 344 or 353 MB.
    """

    def norm(*a):
        return jln.layer_norm(*a, forward_mode=forward_mode)

    report = program.compile_for(backward(norm, NORM, some), *operands())
    slack = 3 if forward_mode and some == ("offset",) else 0  # XLA sums the rows in shares of 64 to 128
    assert report.bytes_total / MB <= megabytes + slack
    assert report.launches <= launches


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(
    ("some", "megabytes", "launches"),
    [(("x",), 1074, 4), (("x", "scale", "offset"), 1092, 5), (("kernel",), 1007, 4), (("offset",), 807, 5)],
)
def test_composed_linear(some, megabytes, launches, forward_mode):
    """No z or dz is computed for gradients that do not need it.

    With them the four steps moved 1143, 1146, 1512 and 1146 MB.
    """

    def linear(*a):
        return jln.layer_norm_linear(*a, forward_mode=forward_mode)

    report = program.compile_for(gradients(linear, LINEAR, some), *operands(12288))
    slack = 10 if forward_mode and some == ("offset",) else 0
    assert report.bytes_total / MB <= megabytes + slack
    assert report.launches <= launches


def test_a_frozen_linear_costs_what_norm_and_product_do():
    def apart(x, scale, offset, kernel, bias):
        return jln.layer_norm(x, scale, offset) @ kernel + bias

    fused, plain = (
        program.compile_for(gradients(f, LINEAR, ("x",)), *operands(12288)) for f in (jln.layer_norm_linear, apart)
    )
    assert fused.bytes_total <= plain.bytes_total and fused.launches <= plain.launches


@pytest.mark.parametrize(
    ("some", "megabytes", "launches"),
    [
        (("x",), 288, 3),  # x is read three times, dx is written
        (("x", "scale", "offset"), 291, 4),
        (("kernel",), 173, 4),  # x is read twice
        (("bias",), 78, 3),
        (LINEAR, 310, 4),
    ],
)
def test_fused_linear(some, megabytes, launches):
    report = program.compile_for(gradients(jln.layer_norm_linear, LINEAR, some), *operands(256))
    assert report.bytes_total / MB <= megabytes
    assert report.launches <= launches


@pytest.mark.parametrize("some", [("x",), ("scale",), ("offset",)], ids="+".join)
def test_what_is_not_used_of_all_gradients_is_not_computed(some):
    """Gradients that are asked for and not used, as where an optimizer leaves a parameter alone, cost nothing.

    The program moves and launches what that of the used gradients does.
    """
    every = backward(jln.layer_norm, NORM, NORM)
    report = program.compile_for(lambda *a: [every(*a)[0][n] for n in some], *operands())
    asked = program.compile_for(backward(jln.layer_norm, NORM, some), *operands())
    assert (report.bytes_total, report.launches) == (asked.bytes_total, asked.launches)


def lora(x, scale, offset, kernel, bias, a, b):
    """Return a frozen Linear behind a norm plus a product of low rank, which is trained."""
    return jln.layer_norm_linear(x, scale, offset, kernel, bias) + jln.layer_norm(x, scale, offset) @ a @ b


def test_layers_under_lora():
    """Three checkpointed layers in a scan have no kernel that writes a dscale, a doffset, or a z for dkernel."""
    n, rank = H, 16
    parameters = [struct(3, *a.shape, dtype=a.dtype) for a in operands(n)[2:]]
    adapters = [struct(3, H, rank), struct(3, rank, n)]

    def loss(adapters, x, *parameters):
        def layer(x, p):
            return x + lora(x, *p), None

        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, (*parameters, *adapters))[0].astype("float32")))

    report = program.compile_for(jax.grad(loss), adapters, struct(M, H), *parameters)
    written = [k.bytes_written for k in report.kernels if k.is_triton]
    assert len(written) <= 6  # of each norm: forward, forward again, and backward
    assert max(written) <= 2 * M * H + 2 * 4 * M


def test_nothing_of_the_forward_is_kept_for_an_offset():
    def step(x, scale, offset):
        y, pullback = jax.vjp(lambda offset: jln.layer_norm(x, scale, offset), offset)
        return y, jax.tree.leaves(pullback)

    report = program.compile_for(step, *operands()[1:])
    assert report.output_bytes <= 2 * M * H + 2 * 4 * H
