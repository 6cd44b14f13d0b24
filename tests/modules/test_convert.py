"""Conversions of NNX and Equinox models: their numbers stay, their step has the kernels, and `undo` goes back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from jln import convert
from parity import equations

nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")

WIDTH, HEADS, LAYERS = 16, 2, 3
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6))

# The tolerance for two float32 programs that differ by the rounding of a dozen norms.
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, normalize_qk=True, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 11, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


ATTENTION = ("attention.query", "attention.key", "attention.value")
PAIRS = {NnxBlock: [("norm", ATTENTION), ("norm2", "up")], NnxModel: [("norm", "head")]}


@nnx.jit
def nnx_step(model):
    def loss(model):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(TOKENS), TOKENS))

    return nnx.value_and_grad(loss)(model)


def nnx_pure(tree):
    return nnx.to_pure_dict(nnx.state(tree) if isinstance(tree, nnx.Module) else tree)


@pytest.mark.parametrize(
    ("fuse", "copy"),
    [
        pytest.param(False, False, id="swapped"),
        pytest.param(True, True, id="fused in a copy"),
        pytest.param(False, True, id="swapped in a copy", marks=pytest.mark.heavy),
        pytest.param(True, False, id="fused", marks=pytest.mark.heavy),
    ],
)
def test_nnx_transformer(fuse, copy):
    model = NnxModel(nnx.Rngs(0))
    loss, gradients = nnx_step(model)
    before = nnx_pure(model)
    parameters = [id(p) for _, p in nnx.iter_graph(model) if isinstance(p, nnx.Param)]

    conversion = convert.nnx(model, fuse=fuse, copy=copy)
    assert (conversion.model is model) != copy
    assert type(model.norm) is nnx.LayerNorm if copy else isinstance(model.norm, jln.nnx.LayerNorm)
    swapped = [c for c in conversion.changes if c.after.startswith("jln.nnx.")]
    # The attention of a block has two more norms and four more Linears.
    assert len(swapped) == LAYERS * 4 + 1 + (LAYERS * 6 + 1 if fuse else 0)
    jax.tree.map(np.testing.assert_array_equal, nnx_pure(conversion.model), before)  # the tree of variables is the same
    if not copy:
        assert [id(p) for _, p in nnx.iter_graph(model) if isinstance(p, nnx.Param)] == parameters

    new_loss, new_gradients = nnx_step(conversion.model)
    close(new_loss, loss)
    jax.tree.map(close, nnx_pure(new_gradients), nnx_pure(gradients))

    routes = jln.explain(conversion.model, TOKENS)
    reading = LAYERS * 4 + 1 if fuse else 0  # of each block queries, keys, values and up, and the head
    assert [r.path for r in routes].count("fused") == reading
    assert [r.path for r in routes].count("norm") == len(routes) - reading == LAYERS * 4 + 1

    graphdef, state = nnx.split(conversion.model)
    step = equations(jax.make_jaxpr(lambda s: jax.tree.leaves(nnx_step(nnx.merge(graphdef, s))))(state))
    # Every norm is fused with its Linears, which have few features, except the two within attention, which have none.
    assert step["jln_norm_backward"] == (LAYERS * 2 if fuse else LAYERS * 4 + 1)
    assert step["jln_norm_linear_backward"] == reading

    assert conversion.undo() is conversion.model
    assert [type(m) for _, m in nnx.iter_modules(conversion.model)] == [
        type(m) for _, m in nnx.iter_modules(NnxModel(nnx.Rngs(0)))
    ]
    np.testing.assert_array_equal(nnx_step(conversion.model)[0], loss)


def test_nnx_training_goes_on_and_undo_keeps_what_was_learned():
    model = NnxModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    conversion = convert.nnx(model, fuse=PAIRS)

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx_step(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    converted = model(TOKENS)
    conversion.undo()
    close(model(TOKENS), converted)
    assert float(step(model, optimizer)) < losses[-1]


def test_nnx_shared_layers_metadata_and_subclasses():
    class Mine(nnx.LayerNorm):
        def __call__(self, x, *, mask=None):
            return super().__call__(x, mask=mask) + 1

    class Other(nnx.LayerNorm):
        def __call__(self, x):
            return x

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.LayerNorm(8, bias_metadata={"tag": "kept"}, rngs=rngs)
            self.again = self.one
            self.mine = Mine(8, rngs=rngs)
            self.other = Other(8, rngs=rngs)
            self.ready = jln.nnx.RMSNorm(8, rngs=rngs)

    model = Model(nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), "float32")
    y = model.mine(x)
    conversion = convert.nnx(model)
    assert model.one is model.again
    assert type(model.one) is jln.nnx.LayerNorm
    assert model.one.bias.get_metadata()["tag"] == "kept"
    assert [(c.path, c.after) for c in conversion.changes] == [
        (path, "jln.nnx.LayerNorm") for path in ("again", "mine", "other")
    ]
    assert [c.why for c in conversion.changes] == ["swapped", *["swapped, if its own call makes the framework's"] * 2]
    assert isinstance(model.mine, Mine)
    close(model.mine(x), y)
    assert model.other(x) is x
    assert [r.path for r in jln.explain(model.mine, x)] == ["norm"]
    assert not jln.explain(model.other, x)
    assert convert.nnx(Model(nnx.Rngs(0))).model.mine.__class__ is model.mine.__class__  # one class for all models
    assert not convert.nnx(model).changes
    conversion.undo()
    assert type(model.mine) is Mine
    assert str(convert.nnx(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))) == "nothing to convert"
    assert convert.nnx(nnx.LayerNorm(8, rngs=nnx.Rngs(0))).changes[0].path == ""  # a model may be a norm itself


@pytest.mark.parametrize(
    "pairs",
    [
        [("norm", "missing")],
        [("norm", "norm2")],
        [("up", "norm")],
        [("attention", "up")],
    ],
)
def test_bad_pairs_change_nothing(pairs):
    model = NnxModel(nnx.Rngs(0))
    with pytest.raises(ValueError, match="NnxBlock"):
        convert.nnx(model, fuse={NnxBlock: pairs})
    assert type(model.norm) is nnx.LayerNorm
    assert type(model.blocks[0].norm) is nnx.LayerNorm


def test_not_a_model():
    with pytest.raises(TypeError, match=r"flax\.nnx\.Module; got dict"):
        convert.nnx({})


class EqxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(WIDTH, dtype="float32")
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.norm2 = eqx.nn.RMSNorm(WIDTH, dtype="float32")
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[1], dtype="float32")
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2], dtype="float32")

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x))))


class EqxModel(eqx.Module):
    embed: jax.Array
    blocks: list[EqxBlock]
    head: eqx.nn.Sequential

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 2)
        self.embed = jax.random.normal(keys[0], (11, WIDTH), "float32")
        self.blocks = [EqxBlock(k) for k in keys[1:-1]]
        norm = eqx.nn.LayerNorm(WIDTH, dtype="float32")
        self.head = eqx.nn.Sequential([norm, eqx.nn.Linear(WIDTH, 11, key=keys[-1], dtype="float32")])

    def __call__(self, tokens):
        x = self.embed[tokens]
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def eqx_model():
    return jax.tree.map(lambda a: a.astype("float32") if eqx.is_array(a) else a, EqxModel(jax.random.key(0)))


@eqx.filter_jit
@eqx.filter_value_and_grad
def eqx_step(model):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(TOKENS), TOKENS))


@pytest.mark.parametrize("fuse", [False, True], ids=["swapped", "fused"])
def test_equinox_transformer(fuse):
    model = eqx_model()
    loss, gradients = eqx_step(model)
    conversion = convert.equinox(model, fuse=fuse)
    assert type(model.blocks[0].norm) is eqx.nn.LayerNorm
    assert {c.path for c in conversion.changes} >= {".blocks[0].norm", ".blocks[2].norm2", ".head.layers[0]"}
    new_loss, new_gradients = eqx_step(conversion.model)
    close(new_loss, loss)
    jax.tree.map(close, conversion.undo(new_gradients), gradients)
    routes = jln.explain(jax.vmap(conversion.model), TOKENS)
    reading = LAYERS * 4 + 1 if fuse else 0  # of each block queries, keys, values and up, and the head
    assert [r.path for r in routes].count("fused") == reading
    assert [r.path for r in routes].count("norm") == len(routes) - reading == LAYERS * 2 + 1
    for a, b in zip(jax.tree.leaves(conversion.model), jax.tree.leaves(model), strict=True):
        assert a is b

    step = equations(eqx.filter_make_jaxpr(eqx_step)(conversion.model)[0])
    assert step["jln_norm_backward"] == (0 if fuse else LAYERS * 2 + 1)  # norms are fused with Linears of few features
    assert step["jln_norm_linear_backward"] == reading

    doubled = conversion.undo(jax.tree.map(lambda a: 2 * a, conversion.model))
    assert eqx.tree_equal(doubled, jax.tree.map(lambda a: 2 * a, model))  # classes, structure and leaves


def test_equinox_subclasses_and_layers_that_are_ours():
    class Mine(eqx.nn.LayerNorm):
        def __call__(self, x, state=None, *, key=None):
            return x

    class Ending(eqx.nn.LayerNorm):
        def __call__(self, x, state=None, *, key=None):
            return 2 * super().__call__(x)

    tree = {"mine": Mine(8), "ready": jln.equinox.LayerNorm(8), "theirs": eqx.nn.LayerNorm(8)}
    conversion = convert.equinox(tree)
    assert [(c.path, c.after) for c in conversion.changes] == [
        ("['mine']", "jln.equinox.LayerNorm"),
        ("['theirs']", "jln.equinox.LayerNorm"),
    ]
    x = jnp.arange(8.0)
    assert conversion.model["mine"](x) is x and isinstance(conversion.model["mine"], Mine)
    inner = convert.equinox(Ending(8)).model
    close(inner(x), Ending(8)(x))
    assert [r.path for r in jln.explain(inner, x)] == ["norm"] and not convert.equinox(inner).changes
    assert {k: type(v) for k, v in conversion.undo().items()} == {k: type(v) for k, v in tree.items()}
