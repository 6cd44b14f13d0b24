"""Pairs of norm and Linear, declared rightly and wrongly: one operator or an error, and never another number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from jln import convert
from parity import normal

nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")

# Two float32 programs of a norm and a product or two.
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


class Declared(nnx.Module):
    norm_linear_pairs = (("norm", "inner.up"),)

    def __init__(self, rngs, use=lambda self, x: self.inner.up(self.norm(x))):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.inner = nnx.Dict(up=nnx.LinearGeneral(8, (2, 3), rngs=rngs))
        self.use = nnx.static(use)

    def __call__(self, x):
        return self.use(self, x)


def test_nnx_pair_declared_by_the_model():
    x = normal(0, (4, 8), "float32")
    model = Declared(nnx.Rngs(0))
    y = model(x)
    conversion = convert.nnx(model, fuse=True)
    close(model(x), y)
    assert [r.path for r in jln.explain(model, x)] == ["fused"]
    assert "fused with inner.up" in str(conversion)
    mask = jnp.arange(8) < 5
    masked = Declared(nnx.Rngs(0), lambda self, x: self.inner.up(self.norm(x, mask=mask)))
    y = masked(x)
    convert.nnx(masked, fuse=True)
    np.testing.assert_array_equal(masked(x), y)


@pytest.mark.parametrize("options", [{"axis": 0}, {"batch_axis": {0: 8}}], ids=str)
def test_nnx_linear_over_another_axis(options):
    """Of a square x, so that every shape fits the operator as well."""
    x = normal(0, (8, 8), "float32")
    model = Declared(nnx.Rngs(0))
    model.inner.up = nnx.LinearGeneral(8, 3, rngs=nnx.Rngs(0), **options)
    y = model(x)
    convert.nnx(model, fuse=True)
    close(model(x), y)
    (route,) = jln.explain(model, x)
    assert route.path == "norm" and "not over the last axis alone" in route.why


def test_a_converted_model_converts_to_itself():
    model = Declared(nnx.Rngs(0))
    convert.nnx(model, fuse=True)
    assert not convert.nnx(model, fuse=True).changes and not convert.nnx(model).changes
    tree = convert.equinox(EqxPair(), fuse={EqxPair: [("norm", "linear")]}).model
    again = convert.equinox(tree, fuse={EqxPair: [("norm", "linear")]})
    assert not again.changes and jax.tree.structure(again.model) == jax.tree.structure(tree)


def test_nnx_pair_with_a_sharding_asked_for():
    """What the fused operator would not give its result."""
    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((2,), ("m",), axis_types=explicit, devices=jax.devices()[:2])):
        by_features = jax.sharding.PartitionSpec(None, "m", None)
        model = Declared(nnx.Rngs(0), lambda self, x: self.inner.up(self.norm(x), out_sharding=by_features))
        x = jnp.asarray(np.asarray(normal(0, (4, 8), "float32")))
        y = model(x)
        convert.nnx(model, fuse=True)
        close(model(x), y)
        assert jax.typeof(model(x)) == jax.typeof(y)
        assert jax.typeof(y).sharding.spec == by_features


@pytest.mark.parametrize(
    "use",
    [
        lambda self, x: x + self.norm(x),
        lambda self, x: jnp.sin(self.norm(x)),
        lambda self, x: jnp.dot(self.norm(x), jnp.ones((8, 2))),
        lambda self, x: nnx.Linear(8, 2, rngs=nnx.Rngs(0))(self.norm(x)),
        lambda self, x: self.norm(self.norm(x)),
        lambda self, x: x * (self.norm(x) == 0),
        lambda self, x: x * (x != self.norm(x)),
        lambda self, x: nnx.Dropout(0.5, rngs=nnx.Rngs(0))(self.norm(x)),
    ],
)
def test_nnx_pair_declared_wrongly(use):
    """The norm's result goes elsewhere too: an error and never another number."""
    model = Declared(nnx.Rngs(0), use)
    x = normal(0, (4, 8), "float32")
    assert model(x).shape
    convert.nnx(model, fuse=True)
    with pytest.raises(TypeError, match="Deferred"):
        model(x)


def reshaped(z, linear, x):
    assert isinstance(z.shape, tuple) and z.shape == x.shape and z.ndim == x.ndim and z.dtype == x.dtype
    return jnp.reshape(linear(z), (*z.shape[:-1], -1))


def test_what_is_known_of_a_norm_before_it_is_computed():
    """Attention reads the batch and the length off the norm's result."""
    x = normal(0, (4, 8), "bfloat16")
    model = Declared(nnx.Rngs(0), lambda self, x: reshaped(self.norm(x), self.inner.up, x))
    model.norm = nnx.LayerNorm(8, dtype="bfloat16", rngs=nnx.Rngs(0))
    y = model(x)
    convert.nnx(model, fuse=True)
    close(model(x), y, atol=0.1)  # bfloat16

    class Block(EqxPair):
        def __call__(self, x):
            return reshaped(jax.vmap(self.norm)(x), jax.vmap(self.linear), x)

    x = x.astype("float32")
    converted = convert.equinox(Block(), fuse={Block: [("norm", "linear")]}).model
    close(converted(x), Block()(x))


def scanned(function, x):
    return jax.lax.scan(lambda carry, row: (carry, function(row)), None, x)[1]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    "use",
    [
        lambda self, x: self.inner.up(jax.vmap(self.norm)(x)),
        lambda self, x: self.inner.up(scanned(self.norm, x)),
    ],
)
def test_nnx_norm_transformed_before_the_linear(use, affine):
    """Its axes are another shape's: an error and never another number."""
    model = Declared(nnx.Rngs(0), use)
    if not affine:
        model.norm = nnx.LayerNorm(8, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
    x = normal(0, (4, 8), "float32")
    assert model(x).shape
    convert.nnx(model, fuse=True)
    with pytest.raises(TypeError, match="transformed before the Linear"):
        model(x)


def test_nnx_captured_intermediates_are_flaxs():
    """Also the norm's result, which the model sows and `method_outputs` lists."""

    def use(self, x):
        z = self.norm(x)
        self.sow(nnx.Intermediate, "z", z)
        return self.inner.up(z)

    def captured(model):
        y, intermediates = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)
        return y, nnx.to_pure_dict(intermediates)

    x = normal(0, (4, 8), "float32")
    model = Declared(nnx.Rngs(0), use)
    theirs = captured(model)
    assert theirs[1]["norm"]["__call__"][0].shape == x.shape
    convert.nnx(model, fuse=True)
    jax.tree.map(close, captured(model), theirs)
    pair = jln.nnx.RMSNormLinear(8, 3, rngs=nnx.Rngs(0))
    y, seen = captured(pair)
    jax.tree.map(np.testing.assert_array_equal, seen, {"__call__": (y,), "linear": {"__call__": (y,)}})


def test_nnx_norm_and_linear_transformed_alike():
    x = normal(0, (4, 8), "float32")
    model = Declared(nnx.Rngs(0), lambda self, x: jax.vmap(self.inner.up)(jax.vmap(self.norm)(x)))
    y = model(x)
    convert.nnx(model, fuse=True)
    close(model(x), y)
    assert [r.path for r in jln.explain(model, x)] == ["fused"]


@pytest.mark.parametrize("use", [lambda x, z: z, lambda x, z: z == 0, lambda x, z: x != z])
def test_equinox_pair_declared_wrongly(use):
    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        up: eqx.nn.Linear
        norm_linear_pairs = (("norm", "up"),)

        def __call__(self, x):
            return self.up(self.norm(x)) + use(x, self.norm(x))

    block = Block(eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 8, key=jax.random.key(0)))
    converted = convert.equinox(block, fuse=True).model
    with pytest.raises(TypeError, match="Deferred"):
        converted(jnp.ones(8))
    with pytest.raises(ValueError, match="declares 'up' as"):
        convert.equinox(block, fuse={Block: [("up", "up")]})


class EqxPair(eqx.Module):
    norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear

    def __init__(self):
        self.norm = eqx.nn.LayerNorm(8, dtype="float32")
        self.linear = eqx.nn.Linear(8, 8, dtype="float32", key=jax.random.key(0))


def test_equinox_files_are_those_of_the_unfused_tree(tmp_path):
    """Where a norm stands before another in the class and is fused with a Linear behind it, leaves change places."""

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        last: eqx.nn.LayerNorm
        up: eqx.nn.Linear

    block = Block(eqx.nn.LayerNorm(8), eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 8, key=jax.random.key(0)))
    block = eqx.tree_at(lambda b: b.norm.weight, block, 2 + jnp.arange(8.0))
    conversion = convert.equinox(block, fuse={Block: [("norm", "up")]})
    eqx.tree_serialise_leaves(tmp_path / "leaves.eqx", conversion.undo(conversion.model))
    read = eqx.tree_deserialise_leaves(tmp_path / "leaves.eqx", block)
    assert eqx.tree_equal(read, block)


class EqxTwice(EqxPair):
    def __call__(self, x):
        return self.linear(jax.nn.gelu(self.linear(self.norm(x))))


class EqxSkipped(EqxPair):
    def __call__(self, x):
        return self.linear(x)


@pytest.mark.parametrize(("cls", "paths"), [(EqxTwice, ["fused"]), (EqxSkipped, [])])
def test_equinox_fused_linear_reads_other_arrays_as_they_are(cls, paths):
    x = normal(0, (8,), "float32")
    model = cls()
    converted = convert.equinox(model, fuse={cls: [("norm", "linear")]}).model
    close(converted(x), model(x))
    assert [r.path for r in jln.explain(converted, x)] == paths


class NnxHeir(Declared):
    pass


class EqxHeir(EqxTwice):
    pass


MODELS = [
    (convert.nnx, lambda: NnxHeir(nnx.Rngs(0)), Declared, ("norm", "inner.up")),
    (convert.equinox, lambda: [EqxHeir()], EqxTwice, ("norm", "linear")),
]


@pytest.mark.parametrize(("converting", "make", "base", "pair"), MODELS)
def test_pairs_of_a_class_hold_for_its_heirs(converting, make, base, pair):
    assert "fused with norm" in str(converting(make(), fuse={base: [pair]}))


@pytest.mark.parametrize(("converting", "make", "base", "pair"), MODELS)
def test_malformed_fuse(converting, make, base, pair):
    with pytest.raises(ValueError, match="of which the model has none"):
        converting(make(), fuse={base: [pair], nnx.Conv: [pair]})
    for fuse in ([pair], {base: pair}, {base: [pair[0]]}, {base: [(*pair, "more")]}, {"Block": [pair]}, {base: None}):
        with pytest.raises(TypeError, match="fuse"):
            converting(make(), fuse=fuse)
