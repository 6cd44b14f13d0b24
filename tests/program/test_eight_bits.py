"""Tests: norms and Linears in eight bits: what multiplies (on a B200 cuDNN), is moved, and held; -s prints MB."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import program
from absent_gpu import MB, assert_no_more, both_ways, counted, struct, triton_kernels, with_gradients
from eight_bit_products import PRODUCTS

ROWS, H = 8192, 4096
X, SCALE, NUMBER, KERNEL = struct(ROWS, H), struct(H), struct(dtype="float32"), struct(H, H)
BLOCKS = jln.MXFloat8()


def quantised(name, *operands, quantize=BLOCKS):
    """The results without the carrier, which no product reads."""
    result = getattr(jln, name)(*operands, quantize=quantize)
    y, *total = (result,) if isinstance(result, jln.Quantized) else result
    return y._replace(carrier=None), *total


def norm(name, **how):
    return functools.partial(quantised, name, **how)


def delayed(name):
    return lambda *a: quantised(name, *a[:-1], quantize=jln.Float8(a[-1]))


# Norms in eight bits, their operands, our kernels, XLA's, which are small, and MB.
NORMS = {
    "rms_norm in blocks": (norm("rms_norm"), (X, SCALE), (1, 0, 102)),
    "rms_norm, delayed": (delayed("rms_norm"), (X, SCALE, NUMBER), (1, 2, 101)),
    "add_rms_norm, delayed": (delayed("add_rms_norm"), (X, X, SCALE, NUMBER), (1, 2, 235)),
    "layer_norm in blocks": (norm("layer_norm"), (X, SCALE, SCALE), (1, 0, 102)),
    "both sides in blocks": (norm("rms_norm_add_rms_norm"), (X, X, SCALE, SCALE), (1, 0, 236)),
    "gated in blocks": (norm("rms_norm_gated"), (X, X, SCALE), (1, 0, 169)),
    "vmap, in blocks": (jax.vmap(norm("rms_norm"), (1, None), 1), (struct(64, 128, H), SCALE), (1, 0, 102)),
    "add_rms_norm, current": (norm("add_rms_norm", quantize=jln.Float8()), (X, X, SCALE), (2, 2, 302)),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_array_once(name):
    """One kernel reads what is given and writes the rest. Current scales take one more, which makes the sum."""
    f, operands, expected = NORMS[name]
    assert_no_more(program.compile_for(f, *operands), (*expected, 0), name)


@jax.custom_vjp
def product(z, kernel):
    numbers = jax.lax.dot(z.values, kernel.astype("float8_e4m3fn"), preferred_element_type="float32")
    return (numbers * z.scale).astype("bfloat16")


def product_backward(kept, dy):
    z, kernel = kept
    return jln.Quantized(None, None, None, dy @ kernel.T), (z.dequantized("bfloat16").T @ dy)


product.defvjp(lambda z, kernel: (product(z, kernel), (z._replace(carrier=None), kernel)), product_backward)


def test_a_step_with_a_product_of_ones_own():
    """Nothing writes the carrier, and the kernels are the plain norm's, but for the eight bits that forward writes."""

    def step(quantize):
        def loss(x, scale, kernel):
            z = jln.rms_norm(x, scale, quantize=quantize)
            y = z @ kernel if quantize is None else product(z, kernel)
            return jnp.sum(jnp.sin(y.astype("float32")))

        return jax.grad(loss, (0, 1, 2))

    ours, plain = (program.compile_for(step(quantize), X, SCALE, KERNEL) for quantize in (jln.Float8(0.02), None))
    backward = [[(k.bytes_read, k.bytes_written) for k in triton_kernels(a)[1:]] for a in (ours, plain)]
    assert len(backward[0]) == 2 and backward[0] == backward[1]
    forward = [triton_kernels(a)[0].bytes_written for a in (ours, plain)]
    assert forward == [ROWS * (H + 4 + 4), ROWS * (2 * H + 4)]
    assert ours.temp_bytes < plain.temp_bytes - ROWS * H
    assert not any(k.bytes_read == 0 for k in ours.kernels)


def by_jax(x, scale, kernel):
    """Plain JAX's norm, and its quantisation and products, by the same recipe."""
    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    how = {"preferred_element_type": jnp.bfloat16, "configs": [config] * 3}
    return jax.nn.scaled_dot_general(jln.reference.rms_norm(x, scale), kernel, (((1,), (0,)), ((), ())), **how)


def linear(quantize):
    def f(x, scale, kernel):
        y = jln.rms_norm_linear(x, scale, kernel, quantize=quantize)
        return y.y if isinstance(y, jln.Scaled) else y

    return f


# MB of a step, and of temporary memory: by plain JAX, and by ours. Then what multiplies.
STEPS = {"b200": (1475, 1368, 72, "__cudnn$blockScaledDot"), "h200": (3511, 1693, 135, "dot(")}


@pytest.mark.parametrize("chip", STEPS)
def test_bytes_of_blocks(chip):
    """Fewer than of plain JAX with the same recipe; on Blackwell cuDNN multiplies, in every product."""
    theirs, most, held, multiplies = STEPS[chip]
    *_, by_hand, _ = counted(both_ways(by_jax, X, SCALE, KERNEL, chip=chip), chip, "JAX")
    report = both_ways(linear(BLOCKS), X, SCALE, KERNEL, chip=chip)
    assert_no_more(report, (3, 99, most, held), chip)
    assert by_hand >= 0.97 * theirs
    assert sum(multiplies in line and " = " in line for line in report.hlo.splitlines()) >= 3
    assert sum(k.product for k in report.kernels) == 3


@pytest.mark.parametrize(
    ("chip", "quantize", "kind"),
    [
        ("h200", jln.Float8(), "__cublas$lt$matmul$f8"),
        ("b200", jln.Float8(0.01), "__cublas$lt$matmul$f8"),
        ("h200", BLOCKS, "__cublas$lt$matmul"),  # nothing has a pair of dtypes that libraries refuse
    ],
)
def test_libraries_multiply(chip, quantize, kind):
    options = {"xla_gpu_enable_triton_gemm": False}
    report = both_ways(linear(quantize), X, SCALE, KERNEL, chip=chip, compiler_options=options)
    assert [k.kind for k in report.kernels if k.product] == [kind] * 3


@pytest.mark.parametrize("chip", STEPS)
def test_rows_and_features_that_no_block_fills(chip):
    report = both_ways(linear(BLOCKS), struct(1000, H), SCALE, struct(H, 1001), chip=chip)
    assert sum(k.product for k in report.kernels) == 3


@pytest.mark.parametrize("quantize", [BLOCKS, jln.Float8()], ids=["blocks", "one scale"])
def test_x_is_all_that_layers_hold(quantize):
    """A layer more takes an x more, its statistics, and 1 MB of magnitudes, which XLA makes in front of the loop."""

    def memory(layers):
        def loss(x, scales, kernels):
            def layer(x, parameters):
                return linear(quantize)(x, *parameters), None

            return jnp.sum(jax.lax.scan(layer, x, (scales, kernels))[0].astype("float32"))

        stacked = struct(layers, H), struct(layers, H, H)
        return program.compile_for(jax.grad(loss, (1, 2)), X, *stacked).temp_bytes

    assert memory(8) - memory(4) <= 4 * 1.001 * (2 * ROWS * H + 4 * ROWS + 2 * H * H // 32)


def test_transformations_leave_the_products_to_cudnn():
    """No vmap, shard_map or policy adds a product on Blackwell, and a vmap inside of a derivative no byte."""
    f, examples = linear(BLOCKS), struct(8, ROWS // 8, H)
    around, inside = jax.vmap(with_gradients(f), (0, 0, None, None)), jax.vmap(f, (0, None, None))
    mesh = program.mesh("b200", (4,), ("data",))
    spread = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    rows, whole = (functools.partial(struct, sharding=NamedSharding(mesh, spec)) for spec in (P("data"), P()))
    on_mesh = rows(ROWS, H), rows(ROWS, H), whole(H), whole(H, H)
    policy = jax.checkpoint_policies.save_only_these_names(jln.PRODUCT)
    reports = [
        both_ways(inside, examples, SCALE, KERNEL, chip="b200"),
        program.compile_for(around, examples, examples, SCALE, KERNEL, chip="b200"),
        program.compile_for(with_gradients(jax.checkpoint(f, policy=policy)), X, X, SCALE, KERNEL, chip="b200"),
        program.compile_for(with_gradients(spread), *on_mesh, chip="b200", devices=4),
        program.compile_for(with_gradients(f), *on_mesh, chip="b200", devices=4),
    ]
    for report in reports:
        assert [k.kind for k in report.kernels if k.product] == ["__cudnn$blockScaledDot"] * 3
    assert round(reports[0].bytes_total / MB) <= STEPS["b200"][1]
    assert reports[3].collectives and all(c.bytes <= 2 * H * H for report in reports for c in report.collectives)


# Products behind a norm: which, behind a sum, and how many. The norm, its parameters, MB of a forward pass and a step.
FUSED = {
    ("JAX", False, 1): ("layer_norm", 2, (522, 1482)),
    ("Flax", False, 1): ("layer_norm", 2, (403, 965)),
    ("Flax", False, 3): ("layer_norm", 2, (805, 2341)),
    ("Flax, rounded", True, 1): ("layer_norm", 2, (638, 1519)),
    ("current scales", True, 1): ("layer_norm", 2, (638, 1384)),
    ("Flax", True, 1): ("rms_norm", 1, (470, 1361)),
}


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_norms_in_front_of_products_in_eight_bits(case):
    """An operator takes a LayerNorm, whose step moves less for it. XLA keeps an RMSNorm, and moves what it did."""
    (which, adds, number), name, parameters, (forward, step) = case, *FUSED[case]
    multiply, scales = PRODUCTS[which]

    def function(x, residual, parameters, kernels, scales):
        total = x if residual is None else x + residual
        y = getattr(jln.reference, name)(total, *parameters)
        products = [multiply(y, kernel, *of) for kernel, of in zip(kernels, scales, strict=True)]
        return products, total if adds else None

    of_each = jax.eval_shape(lambda: scales)
    operands = X, X if adds else None, [SCALE] * parameters, [KERNEL] * number, [of_each] * number
    fused, chip = jln.fuse(function), "b200" if which == "JAX" else "h200"
    ours = name == "layer_norm"
    assert_no_more(program.compile_for(fused, *operands, chip=chip), (ours, 99, forward), case)
    assert_no_more(both_ways(fused, *operands, chip=chip), (3 * ours, 99, step), case)
