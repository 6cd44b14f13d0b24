"""Linears that read a norm's result, found or named: the numbers are the framework's, and of x and z only x is kept."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from jln import convert
from jln._modules import origins
from parity import normal

nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")
hk = pytest.importorskip("haiku")
eqx = pytest.importorskip("equinox")

H, WIDE = 8, 300  # 300 features are too many for one kernel
SHAPE = (3, 5, H)

# The tolerance for two float64 programs of a norm and products of 8 and 300 terms.
close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(H, WIDE, param_dtype="float64", rngs=rngs)])

    def __call__(self, z):
        return self.layers[0](z)


class NnxBlock(nnx.Module):
    """A norm whose result every kind of Linear reads, one of them in another module, and sin too."""

    def __init__(self, rngs):
        of = {"param_dtype": "float64", "rngs": rngs}
        self.norm = nnx.LayerNorm(H, **of)
        self.q = nnx.LinearGeneral(H, (4, 75), **of)
        self.kv = nnx.Einsum("...D,CDN->C...N", (2, H, WIDE), (2, WIDE), **of)
        self.few = nnx.Linear(H, 3, **of)
        self.mlp = NnxMlp(rngs)

    def __call__(self, x):
        z = self.norm(x)
        return self.q(z), self.kv(z), self.few(z), self.mlp(z), jnp.sin(z)


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, z):
        return nn.Dense(WIDE, param_dtype="float64", name="up")(z)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        of = {"param_dtype": "float64"}
        z = nn.LayerNorm(**of)(x)
        q = nn.DenseGeneral((4, 75), **of, name="q")(z)
        kv = nn.Einsum((2, H, WIDE), "...D,CDN->C...N", **of, name="kv")(z)
        return q, kv, nn.Dense(3, **of, name="few")(z), LinenMlp(name="mlp")(z), jnp.sin(z)


class HaikuMlp(hk.Module):
    def __call__(self, z):
        return hk.Linear(WIDE, name="up")(z)


class EqxBlock(eqx.Module):
    norm: eqx.nn.RMSNorm
    q: eqx.nn.Linear
    few: eqx.nn.Linear
    mlp: eqx.nn.Sequential

    def __init__(self):
        keys, of = jax.random.split(jax.random.key(0), 3), {"dtype": "float64"}
        self.norm = eqx.nn.RMSNorm(H, **of)
        self.q = eqx.nn.Linear(H, WIDE, key=keys[0], **of)
        self.few = eqx.nn.Linear(H, 3, use_bias=False, key=keys[1], **of)
        self.mlp = eqx.nn.Sequential([eqx.nn.Linear(H, WIDE, key=keys[2], **of)])

    def __call__(self, x):
        """Return the results for a sequence, or for a batch of sequences."""

        def mapped(f):
            return functools.reduce(lambda f, _: jax.vmap(f), range(x.ndim - 1), f)

        z = mapped(self.norm)(x)
        return mapped(self.q)(z), mapped(self.few)(z), mapped(self.mlp)(z), jnp.sin(z)


def haiku_block(x):
    z = hk.LayerNorm(-1, True, True, name="norm")(x)
    return hk.Linear(WIDE, name="q")(z), hk.Linear(3, name="few")(z), HaikuMlp(name="mlp")(z), jnp.sin(z)


def nnx_functions():
    """Return (a model as a function of parameters and x, the same converted, the parameters, its Linears' names)."""
    model = NnxBlock(nnx.Rngs(0))
    converted = convert.nnx(model, copy=True, fuse=True).model

    def of(model):
        graphdef, state = nnx.split(model)
        return lambda state, x: nnx.merge(graphdef, state)(x), state

    (theirs, state), (ours, _) = of(model), of(converted)
    names = ["LinearGeneral", "Einsum", "Linear", "Linear"]
    return theirs, ours, state, [f"jln.nnx.{name}" for name in names]


def linen_functions():
    model = LinenBlock()
    variables = model.init(jax.random.key(0), jnp.zeros(SHAPE))

    def ours(variables, x):
        with convert.linen(fuse=True):
            return model.apply(variables, x)

    names = ["DenseGeneral q", "Einsum kv", "Dense few", "Dense mlp/up"]
    return model.apply, ours, variables, [f"jln.linen.{name}" for name in names]


def haiku_functions():
    model = hk.without_apply_rng(hk.transform(haiku_block))
    parameters = model.init(jax.random.key(0), jnp.zeros(SHAPE))

    def ours(parameters, x):
        with convert.haiku(fuse=True):
            return model.apply(parameters, x)

    return model.apply, ours, parameters, [f"jln.haiku.Linear {name}" for name in ("q", "few", "mlp/up")]


def equinox_functions():
    model = EqxBlock()
    converted = convert.equinox(model, fuse=True).model
    parameters, rest = eqx.partition(model, eqx.is_array)
    _, converted_rest = eqx.partition(converted, eqx.is_array)
    leaves, tree = jax.tree.flatten(parameters)
    of_converted = jax.tree.structure(eqx.filter(converted, eqx.is_array))

    def theirs(leaves, x):
        return eqx.combine(tree.unflatten(leaves), rest)(x)

    def ours(leaves, x):
        return eqx.combine(of_converted.unflatten(leaves), converted_rest)(x)

    return theirs, ours, leaves, ["jln.equinox.Linear"] * 3


FRAMEWORKS = {"nnx": nnx_functions, "linen": linen_functions, "haiku": haiku_functions, "equinox": equinox_functions}
each_framework = pytest.mark.parametrize("framework", FRAMEWORKS)


def functions(framework):
    theirs, ours, parameters, names = FRAMEWORKS[framework]()
    r = np.random.default_rng(0)
    return theirs, ours, jax.tree.map(lambda a: jnp.asarray(r.normal(size=a.shape)), parameters), names


def loss(function, *args):
    return sum(jnp.sum(jnp.sin(y)) for y in function(*args))


@each_framework
def test_every_linear_behind_a_norm_is_found_and_all_numbers_are_the_frameworks(framework):
    theirs, ours, parameters, names = functions(framework)
    x = normal(0, SHAPE, "float64")
    jax.tree.map(close, ours(parameters, x), jax.jit(theirs)(parameters, x))
    own, wanted = (jax.grad(functools.partial(loss, f), (0, 1)) for f in (ours, theirs))
    wanted = jax.jit(wanted)(parameters, x)
    for gradients in (own, jax.jit(own)):
        jax.tree.map(close, gradients(parameters, x), wanted)
    tangents = jax.tree.map(jnp.cos, (parameters, x))
    jax.tree.map(close, *(jax.jit(functools.partial(jax.jvp, f))((parameters, x), tangents) for f in (ours, theirs)))
    fused = [route.layer for route in jln.explain(ours, parameters, x) if route.path == "fused"]
    assert fused == names


@each_framework
def test_of_a_norms_size_only_x_is_kept(framework):
    """A converted model keeps x alone of x's size for the backward pass, where the framework's own keeps z as well.

    The model's last result, sin(z), is left out: what other readers of z keep is not known.
    """
    theirs, ours, parameters, _ = functions(framework)
    x = normal(0, (7, 11, H), "float64")

    def kept(f):
        _, pull = jax.eval_shape(lambda p, x: jax.vjp(lambda p, x: f(p, x)[:-1], p, x), parameters, x)
        return sum(a.shape == x.shape for a in jax.tree.leaves(pull))

    assert kept(theirs) > 1
    own = jax.make_jaxpr(lambda p, x: jax.vjp(lambda p, x: ours(p, x)[:-1], p, x)[1])(parameters, x)
    large = [v for v in dict.fromkeys(own.jaxpr.outvars) if v.aval.shape == x.shape]
    assert len(large) <= 1


@each_framework
def test_vmap_over_examples_scan_and_checkpoint(framework):
    theirs, ours, parameters, _ = functions(framework)
    x = normal(0, (2, *SHAPE), "float64")

    def scanned(f):
        def total(parameters, x):
            return jax.lax.scan(lambda carry, x: (carry + loss(f, parameters, x), None), jnp.zeros(()), x)[0]

        return total

    for transformed in (
        lambda f: jax.vmap(jax.grad(functools.partial(loss, f)), (None, 0)),
        lambda f: jax.grad(lambda p, x: jnp.sum(jax.vmap(functools.partial(loss, f), (None, 0))(p, x))),
        lambda f: jax.grad(jax.checkpoint(functools.partial(loss, f))),
        lambda f: jax.grad(scanned(f)),
    ):
        jax.tree.map(close, *(jax.jit(transformed(f))(parameters, x) for f in (ours, theirs)))


@each_framework
def test_nothing_is_remembered_for_longer_than_a_trace(framework):
    _, ours, parameters, _ = functions(framework)

    def failing(parameters, x):
        ours(parameters, x)
        raise RuntimeError("in the middle of a trace")

    gc.collect()
    before = len(origins._known)
    with jax.checking_leaks():
        jax.jit(jax.grad(functools.partial(loss, ours)))(parameters, normal(0, SHAPE, "float64"))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="middle"):
            jax.jit(failing)(parameters, normal(0, SHAPE, "float64"))
    gc.collect()
    assert len(origins._known) == before


@each_framework
def test_what_is_between_the_norm_and_the_linear_makes_another_array(framework):
    """A Linear is fused if it reads the norm's own result, and not if jit or any operation is in between."""
    x = normal(0, SHAPE, "float64")

    def routes(between):
        if framework == "nnx":
            model = NnxBlock(nnx.Rngs(0))
            convert.nnx(model, fuse=True)
            return jln.explain(lambda x: model.few(between(model.norm(x))), x)
        if framework == "equinox":
            model = convert.equinox(EqxBlock(), fuse=True).model
            return jln.explain(lambda x: model.few(between(model.norm(x))), x[0, 0])
        if framework == "linen":
            with convert.linen(fuse=True):
                return jln.explain(nn.Sequential([nn.LayerNorm(param_dtype=float), between, nn.Dense(3)]), x)
        model = hk.transform(lambda x: hk.Linear(3)(between(hk.LayerNorm(-1, True, True)(x))))
        with convert.haiku(fuse=True):
            return jln.explain(model, x)

    assert [r.path for r in routes(lambda z: z)] == ["norm", "fused"]
    for between in (lambda z: z * 1, jax.jit(lambda z: z), lambda z: z.astype("float32").astype("float64")):
        assert [r.path for r in routes(between)] == ["norm"]


def test_fuse_may_name_linears_by_the_paths_that_conversions_print():
    for pairs, names in (
        ([("norm", ("q", "kv"))], ["q", "kv"]),
        ([("norm", "mlp.layers[0]"), ("norm", "few")], ["mlp.layers.0", "few"]),
        ([], []),
    ):
        model = NnxBlock(nnx.Rngs(0))
        conversion = convert.nnx(model, fuse={NnxBlock: pairs})
        assert sorted(c.path for c in conversion.changes) == sorted(["norm", *names])
        assert [r.path for r in jln.explain(model, normal(0, SHAPE, "float64"))].count("fused") == len(names)
        again = convert.nnx(model, fuse={NnxBlock: pairs})
        assert not again.changes
        conversion.undo()
        assert [type(m) for _, m in nnx.iter_modules(model)] == [
            type(m) for _, m in nnx.iter_modules(NnxBlock(nnx.Rngs(0)))
        ]
    block = EqxBlock()
    conversion = convert.equinox(block, fuse={EqxBlock: [("norm", "mlp.layers[0]")]})
    assert [c.path for c in conversion.changes] == [".norm", ".mlp.layers[0]"]
    assert eqx.tree_equal(conversion.undo(), block)
    assert not convert.equinox(conversion.model, fuse={EqxBlock: [("norm", "mlp.layers[0]")]}).changes


class NnxHeir(NnxBlock):
    pass


class EqxHeir(EqxBlock):
    pass


MODELS = [
    (convert.nnx, lambda: NnxHeir(nnx.Rngs(0)), NnxBlock),
    (convert.equinox, lambda: [EqxHeir()], EqxBlock),
]


@pytest.mark.parametrize(("converting", "make", "base"), MODELS)
def test_pairs_of_a_class_hold_for_its_heirs(converting, make, base):
    assert "q: " in str(converting(make(), fuse={base: [("norm", "q")]}))


@pytest.mark.parametrize(("converting", "make", "base"), MODELS)
def test_malformed_fuse(converting, make, base):
    pair = ("norm", "q")
    with pytest.raises(ValueError, match="of which the model has none"):
        converting(make(), fuse={base: [pair], nnx.Conv: [pair]})
    for pairs in ([("norm", "missing")], [("norm", "norm")], [("q", "q")], [("norm", "mlp")], [("norm", "mlp[x]")]):
        with pytest.raises(ValueError, match=base.__name__.replace("Block", "(Block|Heir)")):
            converting(make(), fuse={base: pairs})
    for fuse in ([pair], {base: pair}, {base: ["norm"]}, {base: [(*pair, "more")]}, {"Block": [pair]}, {base: None}):
        with pytest.raises(TypeError, match="fuse"):
            converting(make(), fuse=fuse)
    for fuse in ({base: [("norm", 1)]}, {base: [("norm", ("q", 1))]}, None, 1):
        with pytest.raises(TypeError, match="fuse"):
            converting(make(), fuse=fuse)


@pytest.mark.parametrize("context", [convert.linen, convert.haiku])
def test_contexts_take_no_pairs(context):
    with pytest.raises(TypeError, match="fuse must be a bool"), context(fuse={nn.Module: [("norm", "q")]}):
        pass


def test_captured_intermediates_are_flaxs():
    x = normal(0, SHAPE, "float64")
    model = NnxBlock(nnx.Rngs(0))

    def captured(model):
        y, intermediates = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)
        return y, nnx.to_pure_dict(intermediates)

    theirs = captured(model)
    assert theirs[1]["norm"]["__call__"][0].shape == x.shape
    convert.nnx(model, fuse=True)
    jax.tree.map(close, captured(model), theirs)
