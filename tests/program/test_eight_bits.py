"""Rung 4: what norms that quantise move, on one H200."""

import jax
import pytest

import jln
from absent_gpu import struct, triton_kernels
from jln import program

ROWS, H = 8192, 4096
X, SCALE, NUMBER = struct(ROWS, H), struct(H), struct(dtype="float32")


def delayed(name):
    return lambda *a: getattr(jln, name)(*a[:-1], quantize=jln.Float8(a[-1]))


def with_kind(name, quantize):
    return lambda *a: getattr(jln, name)(*a, quantize=quantize)


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
