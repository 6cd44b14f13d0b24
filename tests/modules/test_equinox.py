"""Norms of jln.equinox against equinox.nn: every argument, alone and in pairs."""

import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

eqx = pytest.importorskip("equinox")
import jln  # noqa: E402
from jln import equinox as ours  # noqa: E402
from parity import Layer, assert_parity, normal, pairwise_parameters, randomised  # noqa: E402

BATCH = 3
ARGUMENTS = {
    "norm": ["LayerNorm", "RMSNorm"],
    "x": ["float32", "bfloat16", "float16", "float64"],
    "shape": [8, (8,), (4, 8), [2, 3, 4]],
    "eps": [1e-5, 1e-2],
    "use_weight": [True, False],
    "use_bias": [True, False],
    "dtype": ["float32", "bfloat16", None],
}


def layer(cls, **options):
    """Return a Layer of `cls`, vmapped over a batch as users do."""
    made = cls(**options)
    arrays, rest = eqx.partition(made, eqx.is_array)
    return Layer(lambda x: _fields(arrays), lambda fields, x: jax.vmap(_with_fields(arrays, rest, fields))(x))


def _fields(arrays):
    return {jax.tree_util.keystr(path): a for path, a in jax.tree_util.tree_leaves_with_path(arrays)}


def _with_fields(arrays, rest, fields):
    leaves = [fields[name] for name in _fields(arrays)]  # in the layer's own order, as JAX sorts a dict
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), rest)


def shape_of(case):
    shape = case["shape"]
    return (BATCH, shape) if isinstance(shape, int) else (BATCH, *shape)


@pytest.mark.parametrize("case", pairwise_parameters(ARGUMENTS))
def test_norms(case):
    case = dict(case)
    name = case.pop("norm")
    x = normal(1, shape_of(case), case.pop("x"))
    theirs, own = (layer(getattr(c, name), **case) for c in (eqx.nn, ours))
    path = assert_parity(theirs, own, theirs, x)
    # under x64 Equinox's default parameters are float64
    wide = case["dtype"] is None and (case["use_weight"] or case["use_bias"])
    several_axes = len(shape_of(case)) > 2
    assert path == ("plain" if several_axes or (wide and x.dtype != jnp.float64) else "norm")


@pytest.mark.parametrize(
    ("shape", "dtype", "path"),
    [
        ((8,), "float32", "norm"),
        ((2, 4), "float32", "plain"),
        ((), "float32", "plain"),
        ((0,), "float32", "plain"),
        ((8,), "int32", "plain"),
    ],
)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_path(name, shape, dtype, path):
    x = jnp.ones(shape, dtype)
    (route,) = jln.explain(getattr(ours, name)(shape, dtype="float32"), x)
    assert (route.layer, route.path) == (f"jln.equinox.{name}", path)
    if path == "plain" and shape != (0,):
        theirs, own = (getattr(c, name)(shape, dtype="float32")(x) for c in (eqx.nn, ours))
        np.testing.assert_array_equal(theirs, own)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_state_and_key(name):
    """A norm hands `state` through and ignores `key`, as Equinox's own does."""
    x = normal(0, (8,), "float32")
    for module in (eqx.nn, ours):
        norm = getattr(module, name)(8)
        y, state = norm(x, "a state", key=jax.random.key(0))
        assert state == "a state"
        assert y.shape == x.shape
        assert norm(x, state=None)[1] is None
        assert norm(x).shape == x.shape


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_rejected_alike(name):
    calls = [
        lambda cls: cls(8)(jnp.ones(5)),
        lambda cls: cls(8)(jnp.ones((2, 8))),
        lambda cls: cls(8)([1.0] * 8),
        lambda cls: cls(8, epsilon=1e-5),
        lambda cls: cls("8"),
        lambda cls: eqx.tree_at(lambda norm: norm.weight, cls(8), 2.0)(jnp.ones(8)),
        lambda cls: eqx.partition(cls(8), eqx.is_array)[1](jnp.ones(8)),
        lambda cls: eqx.tree_at(lambda norm: norm.bias, cls(8, use_bias=True), None)(jnp.ones(8)),
    ]
    for call in calls:
        with pytest.raises(Exception) as theirs:
            call(getattr(eqx.nn, name))
        with pytest.raises(type(theirs.value)):
            call(getattr(ours, name))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_checkpoints_go_both_ways(name):
    for writer, reader in itertools.permutations((eqx.nn, ours)):
        written = randomised(getattr(writer, name)((4, 8), dtype="float32"))
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, written)
        file.seek(0)
        read = eqx.tree_deserialise_leaves(file, getattr(reader, name)((4, 8), dtype="float32"))
        np.testing.assert_array_equal(read.weight, written.weight)
        np.testing.assert_array_equal(read.bias, written.bias)


def test_put_in_place_of_equinoxs(monkeypatch):
    x = jnp.arange(8)
    wanted = eqx.nn.LayerNorm(8, dtype="float32")(x)
    monkeypatch.setattr(eqx.nn, "LayerNorm", ours.LayerNorm)
    np.testing.assert_array_equal(eqx.nn.LayerNorm(8, dtype="float32")(x), wanted)


def test_forward_mode():
    """The results of jvp, jacfwd and a forward-over-reverse Hessian-vector product are those of Equinox's own layer."""
    x, v = normal(0, (8,), "float32"), normal(1, (8,), "float32")

    def derivatives(cls):
        def function(x):
            return jnp.sum(jnp.sin(cls(8, dtype="float32")(x)))

        return jax.jvp(function, (x,), (v,))[1], jax.jvp(jax.grad(function), (x,), (v,))[1], jax.jacfwd(function)(x)

    for a, b in zip(derivatives(ours.LayerNorm), derivatives(eqx.nn.LayerNorm), strict=True):
        # some tens of float32 operations on numbers of the size of the largest result
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=64 * float(jnp.finfo("float32").eps) * np.max(np.abs(b)))


def test_deprecated_argument():
    with pytest.warns(UserWarning, match="elementwise_affine"):
        norm = ours.LayerNorm(8, elementwise_affine=False)
    assert norm.weight is None
    assert norm.bias is None


def test_inside_of_transformations():
    """Gradients are Equinox's inside of nested vmap, filter_jit, filter_checkpoint and a scan over stacked layers."""
    x = normal(0, (2, 3, 8), "float32")

    def gradients(cls):
        layers = eqx.filter_vmap(lambda key: cls(8, dtype="float32"))(jax.random.split(jax.random.key(0), 3))
        arrays, rest = eqx.partition(layers, eqx.is_array)

        @eqx.filter_jit
        @eqx.filter_grad
        def loss(arrays):
            def body(x, arrays):
                norm = eqx.combine(arrays, rest)
                return jnp.sin(jax.vmap(jax.vmap(eqx.filter_checkpoint(norm)))(x)), None

            return jnp.sum(jnp.cos(jax.lax.scan(body, x, arrays)[0]))

        return loss(arrays)

    theirs, own = gradients(eqx.nn.LayerNorm), gradients(ours.LayerNorm)
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(theirs), strict=True):
        # three layers in float32; each gradient is the sum of 6 rows
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_numpy_weights(name):
    x = normal(0, (8,), jnp.float32)
    norm = getattr(ours, name)(8, dtype="float32")
    in_numpy = jax.tree.map(np.asarray, norm)
    np.testing.assert_array_equal(in_numpy(x), norm(x))
    assert [route.path for route in jln.explain(in_numpy, x)] == ["norm"]
