"""Rung 4: what norms that quantise move, on one H200."""

import jax
import jax.numpy as jnp
import pytest

import jln
import program
from absent_gpu import struct, triton_kernels

ROWS, H = 8192, 4096
X, SCALE, NUMBER = struct(ROWS, H), struct(H), struct(dtype="float32")


def as_read(result):
    """The results without the carrier, which no product reads."""
    y, *total = (result,) if isinstance(result, jln.Quantized) else result
    return y._replace(carrier=None), *total


def delayed(name):
    return lambda *a: as_read(getattr(jln, name)(*a[:-1], quantize=jln.Float8(a[-1])))


def with_kind(name, quantize):
    return lambda *a: as_read(getattr(jln, name)(*a, quantize=quantize))


FORMS = {
    "rms_norm in blocks": (with_kind("rms_norm", jln.MXFloat8()), (X, SCALE)),
    "rms_norm, delayed": (delayed("rms_norm"), (X, SCALE, NUMBER)),
    "layer_norm in blocks": (with_kind("layer_norm", jln.MXFloat8()), (X, SCALE, SCALE)),
    "add_rms_norm in blocks": (with_kind("add_rms_norm", jln.MXFloat8()), (X, X, SCALE)),
    "add_rms_norm, delayed": (delayed("add_rms_norm"), (X, X, SCALE, NUMBER)),
    "both sides in blocks": (with_kind("rms_norm_add_rms_norm", jln.MXFloat8()), (X, X, SCALE, SCALE)),
    "gated in blocks": (with_kind("rms_norm_gated", jln.MXFloat8()), (X, X, SCALE)),
    "vmap in the middle, in blocks": (
        jax.vmap(with_kind("rms_norm", jln.MXFloat8()), (1, None), 1),
        (struct(64, 128, H), SCALE),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_array_once(name):
    """One kernel reads what is given and writes eight bits, scales and the sum: once each, at most 5 % more."""
    step, operands = FORMS[name]
    report = program.compile_for(step, *operands)
    once = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((operands, jax.eval_shape(step, *operands))))
    assert len(triton_kernels(report)) == 1
    assert report.bytes_total <= 1.05 * once and report.temp_bytes <= 0.01 * once


def test_current_scaling_reads_once_more():
    """A first kernel finds the largest number, and makes the sum, which the second one reads."""
    report = program.compile_for(with_kind("add_rms_norm", jln.Float8()), X, X, SCALE)
    assert [k.times for k in triton_kernels(report)] == [1, 1]
    assert report.bytes_total <= 1.01 * (3 * 2 + 2 + 1) * ROWS * H


@jax.custom_vjp
def product(z, kernel):
    numbers = jax.lax.dot(z.values, kernel.astype("float8_e4m3fn"), preferred_element_type="float32")
    return (numbers * z.scale).astype("bfloat16")


def product_forward(z, kernel):
    return product(z, kernel), (z._replace(carrier=None), kernel)


def product_backward(kept, dy):
    z, kernel = kept
    return jln.Quantized(None, None, None, dy @ kernel.T), (z.dequantized("bfloat16").T @ dy)


product.defvjp(product_forward, product_backward)


def test_a_step_with_a_product_of_ones_own():
    """Nothing writes the carrier, and the kernels are the plain norm's, but for the eight bits that forward writes."""

    def step(quantize):
        def loss(x, scale, kernel):
            z = jln.rms_norm(x, scale, quantize=quantize)
            y = z @ kernel if quantize is None else product(z, kernel)
            return jnp.sum(jnp.sin(y.astype("float32")))

        return jax.grad(loss, (0, 1, 2))

    operands = X, SCALE, struct(H, H)
    ours, plain = (program.compile_for(step(quantize), *operands) for quantize in (jln.Float8(0.02), None))
    backward = [[(k.bytes_read, k.bytes_written) for k in triton_kernels(a)[1:]] for a in (ours, plain)]
    assert len(backward[0]) == 2 and backward[0] == backward[1]
    forward = [triton_kernels(a)[0].bytes_written for a in (ours, plain)]
    assert forward == [ROWS * (H + 4 + 4), ROWS * (2 * H + 4)]
    assert ours.temp_bytes < plain.temp_bytes - ROWS * H
    assert not any(k.bytes_read == 0 for k in ours.kernels)
