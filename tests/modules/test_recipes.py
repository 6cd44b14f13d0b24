"""A model's own norms, converted by recipes: they keep their numbers, and without a recipe there is a hint."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from jln import convert
from parity import normal

nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")
hk = pytest.importorskip("haiku")
eqx = pytest.importorskip("equinox")

H = 16
SHAPE = (3, 5, H)

# The tolerance for two float64 programs of a norm over 16 elements.
close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


def rms(x, scale, epsilon):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * jnp.expand_dims(scale, range(x.ndim - 1))


class NnxGemmaNorm(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.linspace(-0.5, 0.5, H))
        self.eps = 1e-3

    def __call__(self, x):
        return rms(x, 1 + self.weight[...], self.eps)


class LinenGemmaNorm(nn.Module):
    eps: float = 1e-3

    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", lambda _, n: jnp.linspace(-0.5, 0.5, n), x.shape[-1])
        return rms(x, 1 + weight, self.eps)


class HaikuGemmaNorm(hk.Module):
    def __call__(self, x):
        weight = hk.get_parameter("weight", (x.shape[-1],), x.dtype, lambda s, d: jnp.linspace(-0.5, 0.5, *s, dtype=d))
        return rms(x, 1 + weight, 1e-3)


class EqxGemmaNorm(eqx.Module):
    weight: jax.Array
    eps: float = eqx.field(static=True)

    def __call__(self, x, *, key=None):
        return rms(x, 1 + self.weight, self.eps)


def gemma(weight, epsilon):
    return {"kind": "rms_norm", "scale": weight, "epsilon": epsilon, "zero_centered_scale": True}


RECIPES = {
    "nnx": {NnxGemmaNorm: lambda m: gemma(m.weight[...], m.eps)},
    "linen": {LinenGemmaNorm: lambda m: gemma(m.get_variable("params", "weight"), m.eps)},
    "haiku": {HaikuGemmaNorm: lambda m: gemma(m.params_dict()[f"{m.module_name}/weight"], 1e-3)},
    "equinox": {EqxGemmaNorm: lambda m: gemma(m.weight, m.eps)},
}


def of_nnx(norms):
    model = nnx.Sequential(NnxGemmaNorm(), nnx.Linear(H, 300, param_dtype=float, rngs=nnx.Rngs(0)))
    converted = convert.nnx(model, copy=True, fuse=True, norms=norms).model
    return tuple((lambda s, x, g=g: nnx.merge(g, s)(x), s) for g, s in map(nnx.split, (model, converted)))


def of_linen(norms):
    model = nn.Sequential([LinenGemmaNorm(), nn.Dense(300, param_dtype=float)])

    def converted(variables, x):
        with convert.linen(fuse=True, norms=norms):
            return model.apply(variables, x)

    variables = model.init(jax.random.key(0), jnp.ones(SHAPE))
    return (model.apply, variables), (converted, variables)


def of_haiku(norms):
    model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(300)(HaikuGemmaNorm(name="norm")(x))))

    def converted(parameters, x):
        with convert.haiku(fuse=True, norms=norms):
            return model.apply(parameters, x)

    parameters = model.init(jax.random.key(0), jnp.ones(SHAPE))
    return (model.apply, parameters), (converted, parameters)


def of_equinox(norms):
    linear = eqx.nn.Linear(H, 300, dtype=float, key=jax.random.key(0))
    model = eqx.nn.Sequential([eqx.nn.Lambda(lambda x: x), EqxGemmaNorm(jnp.linspace(-0.5, 0.5, H), 1e-3), linear])
    converted = convert.equinox(model, fuse=True, norms=norms).model

    def parted(tree):
        parameters, rest = eqx.partition(tree, eqx.is_array)
        leaves, tree = jax.tree.flatten(parameters)
        return lambda leaves, x: jax.vmap(jax.vmap(eqx.combine(tree.unflatten(leaves), rest)))(x), leaves

    return parted(model), parted(converted)


FRAMEWORKS = {"nnx": of_nnx, "linen": of_linen, "haiku": of_haiku, "equinox": of_equinox}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_own_norm_and_the_linear_behind_it(framework):
    (theirs, parameters), (ours, converted) = FRAMEWORKS[framework](RECIPES[framework])
    x = normal(0, SHAPE, "float64")
    wanted = jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(theirs(p, x))), (0, 1))(parameters, x)
    own = jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(ours(p, x))), (0, 1))(converted, x)
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(wanted), strict=True):
        close(a, b)
    assert [r.path for r in jln.explain(ours, converted, x)] == ["norm", "fused"]
    compiled = jax.jit(ours).lower(converted, x).as_text()
    assert compiled.count("stablehlo.rsqrt") == 1  # nothing is left of the model's own call


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_a_recipe_it_is_named_with_the_line_that_would_do(framework):
    line = 'norms={{{}: lambda m: dict(kind="rms_norm", scale={}, epsilon=m.epsilon)}}'
    if framework in ("nnx", "equinox"):
        model = NnxGemmaNorm() if framework == "nnx" else EqxGemmaNorm(jnp.ones(H), 1e-3)
        conversion = getattr(convert, framework)(model)
        assert [c.after for c in conversion.changes] == [""]
        assert line.format(type(model).__name__, "m.scale") in str(conversion)
        return
    (theirs, parameters), _ = FRAMEWORKS[framework](None)
    with getattr(convert, framework)() as routes:
        theirs(parameters, jnp.ones(SHAPE))
    (route,) = routes
    assert route.path == "plain" and "GemmaNorm" in route.layer
    scale = {"linen": 'm.get_variable("params", "scale")', "haiku": 'm.params_dict()[f"{m.module_name}/scale"]'}
    assert line.format(route.layer.rpartition(".")[2].partition(" ")[0], scale[framework]) in route.why


def test_norms_that_are_the_frameworks_are_not_named():
    model = nnx.Sequential(nnx.BatchNorm(H, rngs=nnx.Rngs(0)), nnx.GroupNorm(H, num_groups=2, rngs=nnx.Rngs(0)))
    assert not convert.nnx(model).changes


class Own(nnx.Module):
    """A model's own LayerNorm or RMSNorm of x [5, 16], by `kind`, over the first axis or the last."""

    def __init__(self, kind="layer_norm", axis=-1, dtype=None):
        n = 5 if axis == 0 else H
        self.scale, self.offset = (nnx.Param(jnp.linspace(*ends, n, dtype="float32")) for ends in ((1, 2), (0, 1)))
        self.kind, self.axis, self.dtype = kind, axis, dtype

    def __call__(self, x, mode=None):
        wide = x.astype("float32")
        if self.kind == "layer_norm":
            wide = wide - wide.mean(self.axis, keepdims=True)
        wide = wide * jax.lax.rsqrt((wide * wide).mean(self.axis, keepdims=True) + 1e-6)
        along = (slice(None), None) if self.axis == 0 else (None, slice(None))
        y = wide * self.scale[...][along] + self.offset[...][along]
        return y.astype(self.dtype or x.dtype) if mode is None else y * mode


def recipe(m):
    return {"kind": m.kind, "scale": m.scale[...], "offset": m.offset[...], "epsilon": 1e-6, "axis": m.axis}


@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("axis", [0, -1, (1,)])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_kind_offset_axis_and_the_dtype_of_its_own_result(kind, axis, dtype, x_dtype):
    x, model = normal(0, (5, H), x_dtype), Own(kind, axis, dtype)
    y = model(x)
    convert.nnx(model, norms={Own: recipe})
    own = model(x)
    assert own.dtype == y.dtype
    # One rounding of the result's dtype. In bfloat16 it is two, as results that differ by a float32 rounding may be
    # rounded to two neighbours.
    tolerance = 2**-7 if own.dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(own.astype("float32"), y.astype("float32"), rtol=tolerance, atol=tolerance)
    assert [r.path for r in jln.explain(model, x)] == ["norm"]


def test_a_dtype_that_the_recipe_names():
    model = Own()
    convert.nnx(model, norms={Own: lambda m: {**recipe(m), "dtype": "bfloat16"}})
    assert model(normal(0, (5, H), "float32")).dtype == jnp.bfloat16


def test_a_call_with_more_than_an_array_is_the_models_own():
    x, model = normal(0, (5, H), "float32"), Own()
    y = model(x, 2.0)
    convert.nnx(model, norms={Own: recipe})
    np.testing.assert_array_equal(model(x, 2.0), y)
    (route,) = jln.explain(model, x, 2.0)
    assert route.path == "plain" and "more than an array" in route.why


class Heir(Own):
    pass


def test_an_heir_has_its_parents_recipe_and_conversion_its_way_back():
    model = nnx.Sequential(Heir(), Own())
    conversion = convert.nnx(model, norms={Own: recipe})
    assert [c.after for c in conversion.changes] == ["jln", "jln"]
    assert not convert.nnx(model, norms={Own: recipe}).changes
    assert isinstance(model.layers[0], Heir)
    conversion.undo()
    assert [type(m) for m in model.layers] == [Heir, Own]


WRONG = [
    (lambda m: None, TypeError, "must return a mapping with kind and epsilon"),
    (lambda m: {"kind": "rms_norm"}, TypeError, "with kind and epsilon"),
    (lambda m: {"kind": "rms_norm", "epsilon": 1e-6, "eps": 1}, TypeError, "'eps'"),
    (lambda m: {"kind": "batch_norm", "epsilon": 1e-6}, ValueError, "got 'batch_norm'"),
    (lambda m: {"kind": "rms_norm", "epsilon": 1e-6, "zero_centered_scale": True}, ValueError, "needs a scale"),
    (lambda m: {"kind": "rms_norm", "epsilon": 1e-6, "scale": 2.0}, TypeError, "an array or None as scale; got 2.0"),
    (lambda m: {"kind": "rms_norm", "epsilon": 1e-6, "axis": "H"}, TypeError, "as axis; got 'H'"),
    (lambda m: {"kind": "rms_norm", "epsilon": 1e-6, "dtype": "flaot"}, TypeError, "as dtype; got 'flaot'"),
]


@pytest.mark.parametrize(("wrong", "error", "match"), WRONG)
def test_recipes_that_are_wrong(wrong, error, match):
    model = nnx.List([nnx.LayerNorm(H, rngs=nnx.Rngs(0)), Own(), nnx.LayerNorm(H, rngs=nnx.Rngs(0))])
    with pytest.raises(error, match=match):
        convert.nnx(model, norms={Own: wrong})
    assert [type(m) for m in model] == [nnx.LayerNorm, Own, nnx.LayerNorm]
    module = nn.Sequential([LinenGemmaNorm()])
    variables = module.init(jax.random.key(0), jnp.ones((2, H)))
    with convert.linen(norms={LinenGemmaNorm: wrong}), pytest.raises(error, match=match):
        module.apply(variables, jnp.ones((2, H)))


class Unhashable:
    __hash__ = None

    def __call__(self, m):
        return recipe(m)


@pytest.mark.parametrize(
    ("norms", "error", "match"),
    [
        ([Own], TypeError, "must be a mapping"),
        ({Own: "rms_norm"}, TypeError, "must be a mapping from classes to functions"),
        ({"Own": recipe}, TypeError, "must name classes of"),
        ({dict: recipe}, TypeError, "must name classes of"),
        ({Own: Unhashable()}, TypeError, "that can be hashed"),
        ({nnx.LayerNorm: recipe}, ValueError, "which jln knows without a recipe"),
    ],
)
def test_norms_that_are_wrong(norms, error, match):
    with pytest.raises(error, match=match):
        convert.nnx(Own(), norms=norms)


class NnxSubclass(nnx.LayerNorm):
    def __call__(self, x):
        return super().__call__(x)


class EqxSubclass(eqx.nn.LayerNorm):
    pass


def gemma_norm(m):
    return {"kind": "rms_norm", "scale": m.weight, "epsilon": m.eps, "zero_centered_scale": True}


@pytest.mark.parametrize("protocol", [2, 5])
def test_converted_subclasses_and_own_norms_are_pickled(protocol):
    """Converted norms can be pickled, though under their class's name pickle finds the model's own class."""
    x = normal(0, SHAPE, "float32")
    norms = [NnxGemmaNorm(), NnxSubclass(H, rngs=nnx.Rngs(0))]
    models = [convert.nnx(norm, norms={NnxGemmaNorm: gemma_norm}).model for norm in norms]
    for norm in (EqxGemmaNorm(jnp.ones(H), 1e-3), EqxSubclass(H)):
        models.append(convert.equinox(norm, norms={EqxGemmaNorm: gemma_norm}).model)
    for model in models:
        again, read = pickle.loads(pickle.dumps(model, protocol)), x if isinstance(model, nnx.Module) else x[0, 0]
        assert type(again) is type(model)
        np.testing.assert_array_equal(again(read), model(read))
        assert type(copy.deepcopy(model)) is type(model)


def test_an_own_norm_is_listed_with_its_place():
    model = nnx.Sequential(NnxGemmaNorm(), NnxGemmaNorm())
    convert.nnx(model, norms={NnxGemmaNorm: gemma_norm})
    routes = jln.explain(model, normal(0, SHAPE, "float32"))
    assert [r.layer.partition(" ")[2] for r in routes] == ["layers.0", "layers.1"]
    tree = eqx.nn.Sequential([eqx.nn.Lambda(jnp.sin), EqxGemmaNorm(jnp.ones(H), 1e-3)])
    tree = convert.equinox(tree, norms={EqxGemmaNorm: gemma_norm}).model
    (route,) = jln.explain(tree, normal(0, (H,), "float32"))
    assert route.layer.partition(" ")[2] == ".layers[1]"


def test_what_a_recipe_raises_tells_which_it_was():
    with pytest.raises(AttributeError, match="gamma") as raised:
        convert.nnx(Own(), norms={Own: lambda m: {"kind": "rms_norm", "scale": m.gamma}})
    assert raised.value.__notes__ == ["raised by norms[Own], a recipe"]


def test_an_own_norm_may_be_called_by_keyword():
    model, x = convert.nnx(NnxGemmaNorm(), norms={NnxGemmaNorm: gemma_norm}).model, normal(0, SHAPE, "float64")
    (route,) = jln.explain(lambda x: model(x=x), x)
    assert route.path == "norm"
    np.testing.assert_array_equal(model(x=x), model(x))


class NnxOwnCall(nnx.RMSNorm):
    def __call__(self, x):
        return rms(x, 1 + self.scale[...], 1e-3)


class LinenOwnCall(nn.RMSNorm):
    @nn.compact
    def __call__(self, x):
        return rms(x, 1 + self.param("scale", nn.initializers.ones, x.shape[-1:]), 1e-3)


def test_a_frameworks_heir_with_a_call_of_its_own_has_its_own_recipe():
    x = normal(0, SHAPE, "float64")
    of = {"kind": "rms_norm", "epsilon": 1e-3, "zero_centered_scale": True}
    norm = NnxOwnCall(H, param_dtype="float64", rngs=nnx.Rngs(0))
    y = norm(x)
    convert.nnx(norm, norms={NnxOwnCall: lambda m: of | {"scale": m.scale}})
    assert [r.path for r in jln.explain(norm, x)] == ["norm"]
    np.testing.assert_allclose(norm(x), y, rtol=1e-5, atol=1e-6)
    norm = LinenOwnCall()
    variables = norm.init(jax.random.key(0), x)
    y = norm.apply(variables, x)
    recipes = {LinenOwnCall: lambda m: of | {"scale": m.get_variable("params", "scale")}}
    with convert.linen(norms=recipes) as routes:
        np.testing.assert_allclose(norm.apply(variables, x), y, rtol=1e-5, atol=1e-6)
    assert [r.path for r in routes] == ["norm"]
