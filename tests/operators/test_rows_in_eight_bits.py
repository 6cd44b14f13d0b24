"""Norms whose results are in eight bits in blocks along the rows, `jln.MXFloat8(axis=-2)`."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from catalogue import FORMS, sizes
from in_eight_bits import along_last, blocks_of_rows, compare, every_bfloat16
from matrix import mesh

NORMS = [name for name, form in FORMS.items() if not form.is_linear]
ALONG_ROWS = jln.MXFloat8(axis=-2)
E4M3 = ml_dtypes.float8_e4m3fn


def operands(name, shape, dtype="bfloat16"):
    """The operands of a form, in the order of its names."""
    arrays = [a.of(sizes(shape, -1, ()), dtype, dtype) for a in FORMS[name].arguments]
    return [workbench.normal(i, a.shape, a.dtype) for i, a in enumerate(arrays)]


def called(name, arrays, **how):
    """The result of a form, and its total or None."""
    form = FORMS[name]
    result = form.in_order(getattr(jln, form.name), form.names, **how)(*arrays)
    return result if form.adds else (result, None)


# Two blocks in each of two axes of rows; more than a tile of blocks, of columns that fill no tile.
@pytest.mark.parametrize("shape", [(2, 64, 96), (160, 40)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_every_norm(name, shape, implementation):
    """The bits are those of the result in float32, but for numbers that its last bits put on another side of a tie."""
    given = operands(name, shape)
    got, total = called(name, given, quantize=ALONG_ROWS, implementation=implementation)
    y, true_total = called(name, given, dtype="float32", implementation=implementation)
    chex.assert_trees_all_equal(total, true_total)
    true = blocks_of_rows(np.asarray(y), False, E4M3)
    assert got.values.shape == shape and got.scale.shape == (*shape[:-2], shape[-2] // 32, shape[-1])
    assert np.mean(np.asarray(got.scale, "float32") != true.scale) < 2e-3
    assert np.mean(np.asarray(got.values).view("u1") != true.values.view("u1")) < 5e-3
    spread = np.repeat(np.asarray(got.scale, "float32"), 32, -2)
    np.testing.assert_array_equal(got.dequantized(), np.asarray(got.values, "float32") * spread)


@pytest.mark.parametrize("to", [E4M3, ml_dtypes.float8_e5m2])
def test_every_number_of_bfloat16(to, implementation):
    """Rows of ones are their own norm, whose scale the numbers are: of rows that are all alike."""
    numbers = every_bfloat16(flushed=True).reshape(-1)
    ones = jnp.ones((32, numbers.size), "bfloat16")
    got = jln.rms_norm(ones, numbers, epsilon=0.0, quantize=jln.MXFloat8(to, -2), implementation=implementation)
    compare(*along_last(False, got, blocks_of_rows(np.broadcast_to(numbers, ones.shape), False, to)))


@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm", "rms_norm_gated", "layer_norm_add_layer_norm"])
def test_gradients_go_straight_through(name, implementation):
    """Gradients are the plain norm's for the same cotangents, bit for bit."""
    given = operands(name, (2, 32, 64), "float32")
    dy = workbench.normal(9, (2, 32, 64), "float32")

    def gradients(quantize):
        def y(*given):
            y, total = called(name, given, quantize=quantize, implementation=implementation)
            return y if quantize is None else y.dequantized(), total

        (_, total), pullback = jax.vjp(y, *given)
        return pullback((dy, None if total is None else dy))

    ours, plain = (jax.jit(gradients, static_argnums=0)(quantize) for quantize in (ALONG_ROWS, None))
    chex.assert_trees_all_equal(ours, plain)


@pytest.mark.parametrize(("axis", "implementation"), [(0, "triton"), (0, "xla"), (1, "xla"), (2, "xla")])
def test_vmap_is_a_loop(axis, implementation):
    """Each example has blocks of its own rows, wherever its axis is, inside of a derivative and around one."""
    x, w = workbench.normal(0, (3, 64, 40), "float32"), workbench.normal(1, (3, 40), "float32")

    def loss(x, w):
        q = jln.rms_norm(x, w, quantize=ALONG_ROWS, implementation=implementation)
        return jnp.sum(jnp.sin(q.dequantized())), (q.values, q.scale)

    moved = jnp.moveaxis(x, 0, axis)
    for of_w, in_axes in ((w[0], None), (w, 0)):
        loop = [jax.grad(loss, (0, 1), has_aux=True)(a, w[0] if in_axes is None else w[i]) for i, a in enumerate(x)]
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *loop)
        around = jax.jit(jax.vmap(jax.grad(loss, (0, 1), has_aux=True), (axis, in_axes)))(moved, of_w)
        chex.assert_trees_all_close(around, stacked, rtol=2e-5, atol=2e-5)

        def inside(x, w, in_axes=in_axes):
            sums, aux = jax.vmap(loss, (axis, in_axes))(x, w)
            return jnp.sum(sums), aux

        (dx, dw), bits = jax.jit(jax.grad(inside, (0, 1), has_aux=True))(moved, of_w)
        chex.assert_trees_all_equal(bits, stacked[1])
        dw_of_loop = stacked[0][1] if in_axes == 0 else jnp.sum(stacked[0][1], 0)
        chex.assert_trees_all_close((jnp.moveaxis(dx, axis, 0), dw), (stacked[0][0], dw_of_loop), rtol=2e-5, atol=2e-5)


def test_a_part_of_the_result(implementation):
    """The values, or the scales, of which a program reads nothing else."""
    x = workbench.normal(0, (64, 40), "float32")
    both = jln.layer_norm(x, quantize=ALONG_ROWS, implementation=implementation)
    for name in ("values", "scale"):
        alone = jax.jit(lambda x, name=name: getattr(jln.layer_norm(x, quantize=ALONG_ROWS), name))(x)
        np.testing.assert_array_equal(np.asarray(alone).view("u1"), np.asarray(getattr(both, name)).view("u1"))


# Blocks that a device has, of which each has a half, and of columns of its own.
SPECS = {"rows": P("data"), "halves of blocks": P(None, "data"), "H": P(None, None, "tensor"), "whole": P()}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_on_a_mesh(spec, axes, implementation):
    x, scale, over = workbench.normal(0, (4, 64, 128), "float32"), workbench.normal(1, (128,), "float32"), mesh(axes)

    def f(x, scale):
        y, total = jln.add_rms_norm(x, x, scale, quantize=ALONG_ROWS, implementation=implementation)
        return y.values, y.scale, total

    true = jax.jit(f)(x, scale)
    placed = jax.device_put(x, NamedSharding(over, SPECS[spec]))
    with jax.set_mesh(over):
        got = jax.jit(f)(placed, scale)
    chex.assert_trees_all_equal(got[2], true[2])
    for a, b in zip(got[:2], true[:2], strict=True):
        same = np.mean(np.asarray(a).view("u1") == np.asarray(b).view("u1"))
        assert same == 1 if spec != "H" else same > 0.99


WRONG = {
    "rows of 24": ("every 32 rows", lambda x: jln.rms_norm(x[:24], quantize=ALONG_ROWS)),
    "a row without others": ("every 32 rows", lambda x: jln.rms_norm(x[0], quantize=ALONG_ROWS)),
    "another normalised axis": ("every 32 rows", lambda x: jln.rms_norm(x, axis=0, quantize=ALONG_ROWS)),
    "another axis": ("axis of MXFloat8 must be -1 or -2", lambda x: jln.rms_norm(x, quantize=jln.MXFloat8(axis=0))),
    "no number": ("axis of MXFloat8", lambda x: jln.rms_norm(x, quantize=jln.MXFloat8(axis="rows"))),
    "Linears": ("got axis=-2", lambda x: jln.rms_norm_linear(x, None, x.T, quantize=ALONG_ROWS)),
    "a scale of rows": ("all rows must share the scale", lambda x: jln.rms_norm(x, x, quantize=ALONG_ROWS)),
    "an offset of examples": (
        "all rows must share the offset",
        lambda x: jln.layer_norm(x[None].repeat(2, 0), None, jnp.ones((2, 1, 64), "float32"), quantize=ALONG_ROWS),
    ),
}


@pytest.mark.parametrize(("message", "call"), WRONG.values(), ids=WRONG)
def test_what_is_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call(workbench.normal(0, (64, 64), "float32"))
