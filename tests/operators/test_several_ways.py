"""Norms whose kernel makes a result in several ways: each is what a call for it alone makes, and gradients add up."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from catalogue import FORMS, sizes
from jln._operators.eight_bits import Ways
from jln._triton import target
from jln._triton.chip import CHIPS

H = 64
NORMS = [name for name, form in FORMS.items() if not form.is_linear]
KINDS = {
    "three scales": (jln.Float8(0.02), jln.Float8(0.003), jln.Float8(0.05, "float8_e5m2")),
    "blocks, a scale and itself": (jln.MXFloat8(), jln.Float8(0.02), None),
    "a current scale, itself and a scale": (jln.Float8(), None, jln.Float8(0.02)),
    "blocks and itself": (jln.MXFloat8("float8_e5m2"), None),
}


def operands(name, shape, dtype="bfloat16"):
    arrays = [a.of(sizes(shape, -1, ()), dtype, dtype) for a in FORMS[name].arguments]
    return [workbench.normal(i, a.shape, a.dtype) for i, a in enumerate(arrays)]


def function(name, implementation, **how):
    """The operator's result without the total."""
    form = FORMS[name]
    operator = form.in_order(getattr(jln, form.name), form.names, implementation=implementation, **how)
    return lambda *a: operator(*a)[0] if form.adds else operator(*a)


def ways_of(name, implementation, kinds):
    return function(name, implementation, quantize=Ways(kinds), **({"dtype": "float32"} if None in kinds else {}))


def alone(name, implementation, kind):
    return function(name, implementation, **({"dtype": "float32"} if kind is None else {"quantize": kind}))


# One tile of rows, whole and ragged; chunks.
@pytest.mark.parametrize("shape", [(5, 64), (37, 96), (2, 20000)], ids=str)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_way_is_that_of_a_call_for_it_alone(kind, name, shape, implementation):
    """Bit for bit, but where other arrays make other tiles, whose sums differ in their last bits."""
    given, kinds = operands(name, shape), KINDS[kind]
    made = jax.jit(ways_of(name, implementation, kinds))(*given)
    for of, got in zip(kinds, made.ways, strict=True):
        wanted = jax.jit(alone(name, implementation, of))(*given)
        got, wanted = (jax.tree.leaves(a if of is None else a._replace(carrier=None)) for a in (got, wanted))
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            a, b = (np.asarray(v, "float32") for v in (a, b))
            assert np.mean(a != b) < 1e-2 or np.allclose(a, b, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm_add_layer_norm"])
def test_gradients_add_up(name, kind, implementation):
    """The cotangents of all ways are one of the norm's result."""
    given, kinds = operands(name, (37, H), "float32"), KINDS[kind]
    dys = [workbench.normal(7 + i, (37, H), "float32") for i in range(len(kinds))]

    def of_ways(*given):
        ways = ways_of(name, implementation, kinds)(*given).ways
        return sum(jnp.sum(d * (y if k is None else y.dequantized())) for d, k, y in zip(dys, kinds, ways, strict=True))

    def of_norm(*given):
        return jnp.sum(sum(dys) * alone(name, implementation, None)(*given))

    argnums = tuple(range(len(given)))
    got, wanted = (jax.jit(jax.grad(f, argnums))(*given) for f in (of_ways, of_norm))
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["blocks, a scale and itself", "blocks and itself", "three scales"])
def test_vmap(kind, implementation):
    """Examples with scales of their own, by XLA in the middle; derivatives inside of it and around it."""
    x, w, factors = workbench.normal(0, (3, 4, H), "float32"), workbench.normal(1, (H,), "float32"), jnp.arange(1.0, 4)
    place = 1 if implementation == "xla" else 0
    moved = jnp.moveaxis(x, 0, place)

    def f(x, w, factor):
        kinds = [jln.Float8(k.scale * factor, k.dtype) if isinstance(k, jln.Float8) else k for k in KINDS[kind]]
        made = ways_of("rms_norm", implementation, tuple(kinds))(x, w)
        return [y if k is None else y.dequantized() for k, y in zip(kinds, made.ways, strict=True)], made.rstd

    def loss(x, w, factor):
        return sum(jnp.sum(jnp.sin(y)) for y in f(x, w, factor)[0])

    axes = (place, None, 0)
    for g in (f, jax.grad(loss, (0, 1))):
        got = jax.vmap(g, axes)(moved, w, factors)
        for i in range(3):
            wanted = g(x[i], w, factors[i])
            chex.assert_trees_all_close(jax.tree.map(lambda a, i=i: a[i], got), wanted, rtol=1e-5, atol=1e-5)
    got = jax.grad(lambda w: jnp.sum(jax.vmap(loss, axes)(moved, w, factors)))(w)
    wanted = sum(jax.grad(loss, 1)(x[i], w, factors[i]) for i in range(3))
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_parameters_of_examples(implementation):
    """Groups have one scale in a copy for each."""
    x, w = workbench.normal(0, (3, 5, H), "float32"), workbench.normal(1, (3, 1, H), "float32")
    kinds = KINDS["three scales"]
    made = ways_of("rms_norm", implementation, kinds)(x, w)
    for kind, got in zip(kinds, made.ways, strict=True):
        wanted = jln.rms_norm(x, w, quantize=kind, implementation=implementation)
        chex.assert_trees_all_equal(got, wanted)


def test_statistics_are_those_of_the_norm(implementation):
    x = workbench.normal(0, (37, 96), "bfloat16")
    made = jax.jit(ways_of("layer_norm", implementation, KINDS["three scales"]))(*operands("layer_norm", (37, 96)))
    x = np.asarray(operands("layer_norm", (37, 96))[0], "float64")
    np.testing.assert_allclose(made.mean[:, 0], x.mean(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made.rstd[:, 0], (x.var(-1) + 1e-6) ** -0.5, rtol=1e-5)


def test_eight_bits_have_no_derivative():
    def f(x, way):
        return jnp.sum(jln.rms_norm(x, quantize=Ways(KINDS["three scales"])).ways[way].values)

    x = workbench.normal(0, (4, H), "float32")
    for way in range(3):
        with pytest.raises(TypeError, match="no derivative"):
            jax.grad(f)(x, way)


@pytest.mark.parametrize(("chip", "dtypes"), [("a100", {"y": "float32"}), ("h200", None)])
def test_one_launch_makes_all(chip, dtypes):
    with target.using(target.Recorder(CHIPS[chip])) as recorder:
        step = jax.jit(ways_of("rms_norm", "triton", KINDS["blocks, a scale and itself"]))
        step.trace(*operands("rms_norm", (64, 1024))).lower(lowering_platforms=("cuda",))
    (launch,) = recorder.launches
    written = {name: a.dtype.name for name, a in launch.results.items()}
    of_ways = {"y": "float8_e4m3fn", "y2": "float8_e4m3fn", "y3": "float32", "y_max": "float32", "block_scale": "uint8"}
    assert written == (dtypes or of_ways) | {"rstd": "float32"}


def test_each_example_has_a_largest_magnitude_of_its_own():
    """Examples of a vmap that have one scale have not one `amax`, of which a next scale is made."""
    x, scale = (workbench.normal(i, s, "float32") for i, s in enumerate([(3, 4, H), (3, H)]))
    kinds = Ways((jln.MXFloat8(), jln.Float8(0.5)))
    largest = [jnp.max(jnp.abs(jln.rms_norm(*a))) for a in zip(x, scale, strict=True)]
    got = jax.vmap(lambda *a: jln.rms_norm(*a, quantize=kinds).ways[1].amax)(x, scale)
    chex.assert_trees_all_close(got, jnp.stack(largest), rtol=1e-6)
