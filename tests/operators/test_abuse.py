"""Tests of what operators survive: stores out of bounds, numbers near the end of their range, many calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from jln._triton.target import interpreting
from junctions import made
from workbench import LINEAR_OPERATORS, OPERATORS

ALL = OPERATORS | LINEAR_OPERATORS


def gradients(name, implementation, **options):
    """Return a jitted function of arrays by name that gives the results of an operator and a loss's gradients."""

    def loss(arrays):
        results = getattr(jln, name)(**arrays, implementation=implementation, **options)
        return sum(jnp.sum(jnp.sin(a.astype("float32"))) for a in jax.tree.leaves(results)), results

    return jax.jit(jax.grad(loss, has_aux=True))


# Kernels between guard words

# The kernels by file and name, each with the results that it writes in these tests.
OUTPUTS = {
    "forward.forward_kernel": ("r.y", "r.total", "r.mean", "r.rstd"),
    "backward.row_sums_kernel": ("c1", "c2"),
    "backward.backward_kernel": ("d.x", "d.scale", "d.offset", "shares", "d.y", "d.residual"),
    "backward.reduce_kernel": ("d.scale", "d.offset", "d.x_bias", "d.gate"),
    "with_linear.forward_kernel": ("r.y", "r.mean", "r.rstd"),
    "with_linear_backward.row_sums_kernel": ("c1", "c2", "dbias"),
    "with_linear_backward.backward_kernel": ("d.x", "g", "dscale"),
    "with_linear_backward.parameters_kernel": ("d.kernel", "d.scale", "d.offset", "d.bias"),
}


@pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")
def test_every_output_of_every_kernel_is_guarded_and_written(monkeypatch):
    """Guard words follow every output of every kernel, and every program writes a part of the outputs.

    With a buffer one element too short the guard behind it is hit: the kernel stores the last element, and a store
    beyond the buffer is noticed. With one program fewer there is NaN, as nothing else writes that program's part.
    """
    from jln._triton import interpreter

    original = interpreter.run
    seen = {}

    def checked(launch, arrays):
        function = launch.kernel.fn
        key = f"{function.__module__.split('.')[-1]}.{function.__name__}"
        launch = dataclasses.replace(launch, in_place={})  # every result has memory, and guards, of its own
        for name, result in launch.results.items():
            short = {name: jax.ShapeDtypeStruct((result.size - 1,), result.dtype)}
            with pytest.raises(interpreter.OutOfBoundsStore, match=f"after {name} "):
                original(dataclasses.replace(launch, results=launch.results | short), arrays)
            seen.setdefault(key, set()).add(name)
        if launch.programs > launch.scalars.get("groups", 1) == 1:  # of each group as many
            too_few = dataclasses.replace(launch, programs=launch.programs - 1)
            assert any(np.isnan(a.astype("float32")).any() for a in original(too_few, arrays))
        written = original(launch, arrays)
        assert not any(np.isnan(a.astype("float32")).any() for a in written)
        return written

    monkeypatch.setattr(interpreter, "run", checked)
    # A Linear of few features is fused, of many composed; wide rows in float64 need the pass for their sums, and in 16
    # bits those of an RMSNorm do not.
    cases = [("add_layer_norm", (40, 100), (), "float32"), ("layer_norm", (2, 9000), (), "float64")]
    cases += [("rms_norm", (5, 17000), (), "bfloat16")]
    cases += [("layer_norm_linear", (70, 100), (n,), "bfloat16") for n in (20, 300)]
    for name, shape, features, dtype in cases:
        jax.block_until_ready(gradients(name, "triton")(workbench.named(name, shape, dtype, features=features)))
    # Heads of odd sizes, between two axes of rows.
    heads = {"gate": "over the last", "varies": "over the last", "shape": (2, 9, 3, 37), "dtype": "float32"}
    given, options = made("add_layer_norm", **heads)
    jax.block_until_ready(gradients("add_layer_norm", "triton", **options)(given))
    assert seen == {key: set(names) for key, names in OUTPUTS.items()}


# Near the end of the range


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
# The norm takes a row of 100 columns whole and one of 20000 in chunks; the fused Linear takes every row in chunks.
@pytest.mark.parametrize(("linear", "width"), [(False, 100), (False, 20000), (True, 100)])
def test_a_mean_whose_square_overflows(linear, width, dtype, implementation):
    """Rows of mean 3e19 are normalised right, although the mean's square overflows float32.

    Their spread is 3e15, in bfloat16 5e16. Nothing that matters overflows.
    """
    if dtype == "bfloat16":  # its numbers are not so close together: one element in a hundred is 3.05e19
        x = jnp.full((3, width), 3e19, dtype).at[:, ::100].set(jnp.asarray(3.05e19, dtype))
    else:
        x = (3e19 * (1 + 1e-4 * workbench.normal(0, (3, width), "float64"))).astype(dtype)
    kernel = jnp.eye(width, 4, dtype=dtype)

    def run(x, module, **options):
        if linear:
            return module.layer_norm_linear(x, None, None, kernel, **options)
        return module.layer_norm(x, **options)

    def both(x, module, **options):
        y, pullback = jax.vjp(lambda x: run(x, module, **options), x)
        return y, *pullback(jnp.ones_like(y))

    y, dx = both(x, jln, implementation=implementation)
    true, _ = both(x.astype("float64"), jln.reference)
    assert np.isfinite(y.astype("float64")).all() and np.isfinite(dx.astype("float64")).all()
    # Each row's mean may be off by some eps of itself, here counted in spreads.
    spread = float(jnp.std(x.astype("float64")))
    eps = float(jnp.finfo("float32").eps)
    rounding = 4 * eps * 3e19 / spread + float(jnp.finfo(dtype).eps) * np.max(np.abs(true))
    np.testing.assert_allclose(y.astype("float64"), true, rtol=0, atol=rounding)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [name for name in ALL if ALL[name].subtract_mean])
def test_rows_of_one_element(name, dtype, implementation):
    """A row of one element is its mean, and its gradient exactly 0: of a sum's parts the sum's own cotangent."""
    entry = ALL[name].entry
    arrays = workbench.named(name, (300, 1), dtype, features=(7,) * entry.is_linear)  # several tiles, the last ragged

    @jax.jit
    def pulled_back(arrays):
        results, pull = jax.vjp(lambda a: getattr(jln, name)(**a, implementation=implementation), arrays)
        cotangents = workbench.cotangents(results)
        return cotangents, pull(cotangents)[0]["x"]

    cotangents, dx = pulled_back(arrays)
    is_summand = entry.adds and not entry.both_sides
    np.testing.assert_array_equal(dx, cotangents[-1] if is_summand else jnp.zeros_like(dx))


# Many calls


compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compilations.append(event) if "backend_compile" in event else None
)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm_add_rms_norm", "rms_norm_gated", "add_layer_norm_linear"])
def test_repeated_calls_compile_nothing(name, implementation):
    """Repeated calls compile nothing, whether eager, jitted or differentiated."""
    arrays = workbench.named(name, (3, 10), "float32", features=(4,) if name.endswith("linear") else ())
    run = gradients(name, implementation)

    def once():
        call = functools.partial(getattr(jln, name), implementation=implementation)
        jax.vjp(lambda a: call(**a), arrays)[1](call(**arrays))
        run(arrays)

    start = len(compilations)
    once()
    assert len(compilations) > start  # or this test would see nothing
    once()
    before = len(compilations)
    for _ in range(3):
        once()
    assert len(compilations) == before
