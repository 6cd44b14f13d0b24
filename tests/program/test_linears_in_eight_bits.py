"""Rung 4: norms and Linears in eight bits: what multiplies, the bytes moved, and what is held between the passes.

`pytest -n0 -s --confcutdir=tests/program tests/program/test_linears_in_eight_bits.py` prints the table.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import program

if not program._folders("jax_plugins.xla_cuda13"):
    pytest.skip('compiling for an absent GPU needs pip install -e ".[cuda13]"', allow_module_level=True)

MB = 10**6
M, H, N = 8192, 4096, 4096
BY_LIBRARIES = {"xla_gpu_enable_triton_gemm": False}


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


OPERANDS = struct(M, H), struct(H), struct(H, N)


def plain_norm(x, scale):
    x = x.astype("float32")
    return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale).astype("bfloat16")


def by_jax(x, scale, kernel):
    """Plain JAX's norm, and its quantisation and products, by the same recipe."""
    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    how = {"preferred_element_type": jnp.bfloat16, "configs": [config] * 3}
    return jax.nn.scaled_dot_general(plain_norm(x, scale), kernel, (((1,), (0,)), ((), ())), **how)


def ours(quantize):
    def f(x, scale, kernel):
        y = jln.rms_norm_linear(x, scale, kernel, quantize=quantize)
        return y.y if isinstance(y, jln.Scaled) else y

    return f


def step(f):
    def value_and_gradients(dy, *operands):
        y, pullback = jax.vjp(f, *operands)
        return y, pullback(dy)

    return value_and_gradients


# MB forward and of a step, and of temporary memory in a step: with JAX's quantisation, and ours.
TABLE = {
    "b200": ((522, 1475, 57), (317, 1369, 73), "__cudnn$blockScaledDot"),
    "h200": ((1008, 3512, 186), (482, 1693, 136), "dot("),
}


@pytest.mark.parametrize("chip", TABLE)
def test_bytes_of_blocks(chip):
    """Fewer than of plain JAX with the same recipe; on Blackwell cuDNN multiplies, in every product."""

    def megabytes(f):
        forward = program.compile_for(f, *OPERANDS, chip=chip)
        both = program.compile_for(step(f), struct(M, N), *OPERANDS, chip=chip)
        return both, [b / MB for b in (forward.bytes_total, both.bytes_total, both.temp_bytes)]

    _, by_hand = megabytes(by_jax)
    report, found = megabytes(ours(jln.MXFloat8()))
    print(chip, "JAX", by_hand, "jln", found)
    theirs, most, product = TABLE[chip]
    assert all(a <= b for a, b in zip(found, most, strict=True))
    assert all(a >= 0.97 * b for a, b in zip(by_hand, theirs, strict=True))
    assert found[0] < by_hand[0] and found[1] < by_hand[1]
    assert sum(product in line and " = " in line for line in report.hlo.splitlines()) >= 3
    assert sum(k.product for k in report.kernels) == 3


@pytest.mark.parametrize("quantize", [jln.Float8(), jln.Float8(0.01)], ids=["current", "delayed"])
@pytest.mark.parametrize("chip", ["h200", "b200"])
def test_one_scale_is_multiplied_by_cublas_in_eight_bits(chip, quantize):
    report = program.compile_for(
        step(ours(quantize)), struct(M, N), *OPERANDS, chip=chip, compiler_options=BY_LIBRARIES
    )
    assert [k.kind for k in report.kernels if k.product] == ["__cublas$lt$matmul$f8"] * 3


def test_libraries_multiply_blocks_on_hopper():
    """Nothing that libraries multiply has a pair of dtypes that they refuse."""
    report = program.compile_for(step(ours(jln.MXFloat8())), struct(M, N), *OPERANDS, compiler_options=BY_LIBRARIES)
    assert [k.kind for k in report.kernels if k.product] == ["__cublas$lt$matmul"] * 3


def test_rows_and_features_that_no_block_fills():
    operands = struct(1000, H), struct(H), struct(H, 1001)
    for chip in TABLE:
        report = program.compile_for(step(ours(jln.MXFloat8())), struct(1000, 1001), *operands, chip=chip)
        assert sum(k.product for k in report.kernels) == 3


@pytest.mark.parametrize("quantize", [jln.MXFloat8(), jln.Float8()], ids=["blocks", "one scale"])
def test_x_is_all_that_layers_hold(quantize):
    """Layers in a loop keep of each x and its statistics: a layer more takes the memory of an x more.

    XLA may make the kernels' largest magnitudes of blocks for all layers, before the loop: 1 MB each.
    """

    def memory(layers):
        def loss(x, scales, kernels):
            def layer(x, parameters):
                return ours(quantize)(x, *parameters), None

            return jnp.sum(jax.lax.scan(layer, x, (scales, kernels))[0].astype("float32"))

        stacked = struct(layers, H), struct(layers, H, H)
        report = program.compile_for(jax.grad(loss, (1, 2)), struct(M, H), *stacked)
        return report.temp_bytes

    assert memory(8) - memory(4) <= 4 * 1.001 * (2 * M * H + 4 * M + 2 * H * H // 32)


def test_transformations_leave_the_products_to_cudnn():
    """No vmap, shard_map or policy adds a product on Blackwell, and a vmap inside of a derivative no byte."""
    f, (x, *parameters) = ours(jln.MXFloat8()), OPERANDS
    examples, dy = struct(8, M // 8, H), struct(8, M // 8, N)
    around = jax.vmap(step(f), (0, 0, None, None))
    inside = step(jax.vmap(f, (0, None, None)))
    mesh = program.mesh("b200", (4,), ("data",))
    split, whole = (NamedSharding(mesh, spec) for spec in (P("data"), P()))
    spread = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    on_mesh = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole) for a in parameters]
    of_rows = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=split) for a in (struct(M, N), x)]
    policy = jax.checkpoint_policies.save_only_these_names(jln.PRODUCT)
    reports = [
        program.compile_for(around, dy, examples, *parameters, chip="b200"),
        program.compile_for(inside, dy, examples, *parameters, chip="b200"),
        program.compile_for(step(jax.checkpoint(f, policy=policy)), struct(M, N), *OPERANDS, chip="b200"),
        program.compile_for(step(spread), *of_rows, *on_mesh, chip="b200", devices=4),
        program.compile_for(step(f), *of_rows, *on_mesh, chip="b200", devices=4),
    ]
    for report in reports:
        assert [k.kind for k in report.kernels if k.product] == ["__cudnn$blockScaledDot"] * 3
    assert reports[1].bytes_total / MB <= TABLE["b200"][1][1]
    assert all(c.bytes <= 2 * H * N for report in reports for c in report.collectives)
