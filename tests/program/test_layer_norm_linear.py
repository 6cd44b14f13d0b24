"""Tests: kernels that norms with Linears launch on an H200 and bytes that they move, both ways; -s prints them."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jln
import program
from absent_gpu import H, M, N, assert_no_more, both_ways, some_gradients, struct
from workloads import WORKLOADS

# Our kernels, XLA's, MB moved and MB temporary. Behind it the MB that the norm and separate products move.
STEPS = {
    "linear-4096-12288": (3, 5, 1720, 67),
    "linear-1024-3072": (3, 5, 732, 34),
    "linear-4096-256": (4, 0, 309, 9),
    "router": (4, 0, 278, 2),
    "adapter": (4, 0, 271, 1),
    "llama-4096-q-k-v": (3, 9, 1598, 201),  # 1670
    "llama-4096-add-gate-up": (3, 6, 3192, 67),  # 3264
    "q-k-v-1024": (3, 18, 1051, 105),  # 1086
    "adapters": (3, 15, 1174, 203),  # 1241
    "norms-both-sides-qkv": (3, 9, 2089, 201),  # 2156
}


@pytest.mark.parametrize("name", STEPS)
def test_workloads(name):
    workload = WORKLOADS[name]
    report = program.compile_for(workload.step(workload.function()), *workload.step_arguments())
    assert_no_more(report, STEPS[name], name)
    assert report.collectives == ()


def operands(m, h, n, parameter_dtype="float32", dtype="bfloat16"):
    """Return shapes of x, scale, offset, kernel and bias."""
    norm = struct(h, dtype=parameter_dtype)
    return struct(m, h), norm, norm, struct(h, n, dtype=dtype), struct(n, dtype=dtype)


def as_one(x, scale, *kernels):
    """One Linear of all features, whose result is split."""
    return tuple(jnp.split(jln.rms_norm_linear(x, scale, jnp.concatenate(kernels, -1)), 3, -1))


def precise(x, kernel):
    return jln.layer_norm_linear(x, None, None, kernel, precision=jax.lax.Precision.HIGHEST)


X, ROW, FEW, OTHERS = struct(8192, 4096), struct(4096), struct(4096, 16), struct(4096, 64)
PRECISE = struct(256, 64, dtype="float32")
EXAMPLES, OF_EACH, EXPERTS = struct(4, 2048, 4096), struct(4, 4096), (struct(8, H, 512), struct(512))
PARAMETERS = struct(H), struct(H), struct(H, N), struct(N)
linear, rms = jln.layer_norm_linear, jln.rms_norm_linear
in_forward_mode = functools.partial(linear, forward_mode=True)
of_rows = functools.partial(jax.vmap, in_axes=(0, *[None] * 4))
of_examples = functools.partial(jax.vmap, in_axes=(0, 0, 0, None, None))

# A function, its operands, and what its step has, as above.
FORMS = {
    # Of the first dkernel has so few tiles that XLA splits its sum, and adds up the shares in a kernel more.
    "768 to 2304": (linear, operands(8192, 768, 2304), (3, 6, 310, 25)),
    "4096 to 1024": (linear, operands(8192, 4096, 1024), (3, 5, 705, 67)),
    "few rows": (linear, operands(2048, 4096, 11008), (3, 4, 610, 17)),
    "parameters in float32": (linear, operands(8192, 4096, 128, dtype="float32"), (4, 0, 301, 4)),
    # One fused program would have all rows, and read 2 MB of kernel by itself. Backward, several share that work.
    "64 rows": (linear, operands(64, 4096, 256), (4, 3, 27, 4)),
    "no parameters": (lambda x, kernel: rms(x, None, kernel), (X, FEW), (4, 0, 271, 1)),
    "one row, fused": (linear, operands(1, 768, 16), (4, 0, 0, 0)),
    "one row, composed": (linear, operands(1, 4096, 512), (2, 5, 17, 0)),
    "as_one of 16": (as_one, (X, ROW, *[FEW] * 3), (4, 8, 281, 3)),
    "as_one of 64": (as_one, (X, ROW, *[OTHERS] * 3), (4, 8, 316, 11)),
    "products in float32": (precise, (struct(512, 256, dtype="float32"), PRECISE), (2, 5, 7, 1)),
    # No example has a dkernel of its own.
    "rows by vmap": (of_rows(linear), (struct(16, 256, H), *PARAMETERS), (3, 5, 204, 8)),
    "rows by vmap, forward_mode": (of_rows(in_forward_mode), (struct(16, 256, H), *PARAMETERS), (3, 5, 204, 8)),
    "groups": (of_examples(linear), (EXAMPLES, OF_EACH, OF_EACH, struct(4096, 4096), ROW), (3, 5, 982, 67)),
    "groups, few features": (of_examples(linear), (EXAMPLES, OF_EACH, OF_EACH, OTHERS, struct(64)), (3, 7, 652, 75)),
    # Plain jnp's step.
    "experts": (jax.vmap(rms, (0, None, 0, None)), (struct(8, M, H), struct(H), *EXPERTS), (0, 10, 463, 67)),
    "members": (jax.vmap(rms, (None, 0, 0, None)), (struct(M, H), struct(8, H), *EXPERTS), (0, 10, 407, 67)),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    function, given, expected = FORMS[name]
    assert_no_more(both_ways(function, *given), expected, name)


# Of x, scale, offset, kernel and bias those whose gradients are asked for; features, our kernels, XLA's and MB.
FROZEN = [
    (linear, (0,), 12288, (2, 2, 1074)),  # as of norm and product apart
    (linear, (0, 1, 2), 12288, (3, 2, 1082)),
    (in_forward_mode, (0, 1, 2), 12288, (3, 2, 1082)),
    (linear, (3,), 12288, (2, 2, 1007)),
    (linear, (2,), 12288, (1, 4, 806)),
    (linear, (0,), 256, (3, 0, 288)),  # x is read three times, dx is written
    (linear, (0, 1, 2), 256, (4, 0, 290)),
    (linear, (3,), 256, (3, 1, 168)),  # x is read twice
    (linear, (4,), 256, (1, 2, 78)),
]


@pytest.mark.parametrize(("function", "some", "features", "expected"), FROZEN)
def test_frozen_arguments(function, some, features, expected):
    """No z or dz is made for gradients that do not need it: with them the first five moved 1143 to 1512 MB."""
    report = some_gradients(function, operands(8192, 4096, features), some, result=True)
    assert_no_more(report, expected, some, features)


def test_layers_under_lora():
    """Three checkpointed layers in a scan have no kernel that writes a dscale, a doffset, or a z for dkernel."""
    m, h, rank = 8192, 4096, 16
    frozen = [struct(3, *a.shape, dtype=a.dtype) for a in operands(m, h, h)[1:]]
    adapters = [struct(3, h, rank), struct(3, rank, h)]

    def loss(adapters, x, *frozen):
        def layer(x, p):
            *frozen, a, b = p
            return x + linear(x, *frozen) + jln.layer_norm(x, *frozen[:2]) @ a @ b, None

        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, (*frozen, *adapters))[0].astype("float32")))

    report = program.compile_for(jax.grad(loss), adapters, struct(m, h), *frozen)
    written = [k.bytes_written for k in report.kernels if k.is_triton]
    assert len(written) <= 6  # of each norm: forward, forward again, and backward
    assert max(written) <= 2 * m * h + 2 * 4 * m


def test_dbias_is_added_up_where_dy_is_made():
    """No kernel reads dy for dbias alone in front of an activation, as in every MLP."""
    m, n = 8192, 16384
    report = both_ways(lambda *a: jax.nn.gelu(linear(*a)), *operands(m, 4096, n))
    assert [k.name for k in report.kernels if k.bytes_read >= 2 * m * n and k.bytes_written <= 0.1 * 2 * m * n] == []


# How a process has products multiplied from the start: by cuBLAS alone.
BY_CUBLAS = {
    "cuBLAS": ("--xla_gpu_enable_triton_gemm=false", {"xla_gpu_enable_triton_gemm": False}),
    "cuBLAS, of pure products": ("--xla_gpu_triton_gemm_any=0", {"xla_gpu_triton_gemm_any": False}),
}


@pytest.mark.parametrize("by", BY_CUBLAS)
def test_no_pass_adds_up_the_cotangents_of_several_linears(by, monkeypatch):
    """Each product by cuBLAS adds what is there. In the other order it left a pass, and the step moved 1707 MB."""
    flags, options = BY_CUBLAS[by]
    monkeypatch.setenv("XLA_FLAGS", flags)
    workload = WORKLOADS["llama-4096-q-k-v"]
    step, arguments = workload.step(workload.function()), workload.step_arguments()
    report = program.compile_for(step, *arguments, compiler_options=options)
    assert [k.name for k in report.kernels if not (k.is_triton or k.product)] == []
    assert_no_more(report, (3, 9, 1636, 71), by)
