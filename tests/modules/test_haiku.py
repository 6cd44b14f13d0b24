"""Norms and LayerNorm+Linear of jln.haiku against Haiku: every argument, alone and in pairs.

Haiku's own tests of its norms pass with our classes in their place.
"""

import contextlib
import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

hk = pytest.importorskip("haiku")
import jln  # noqa: E402
from jln import haiku as ours  # noqa: E402
from parity import Layer, assert_parity, described, normal, noting, pairwise_parameters, precisions, randomised  # noqa: E402

SHAPE = (3, 4, 8)

ARGUMENTS = {
    "norm": ["LayerNorm", "RMSNorm"],
    "x": ["float32", "bfloat16", "float16", "float64"],
    "axis": [-1, (1, 2), slice(1, None), 0, (-1, 0), slice(0, -1), [2]],
    "param_axis": [-1, None, (1, 2), (2, 1), slice(1, None), 1],
    "create_scale": [True, False],
    "create_offset": [True, False],
    "eps": [1e-5, 1e-2],
    "scale_init": [None, hk.initializers.RandomNormal()],
    "offset_init": [None, hk.initializers.RandomNormal()],
    "use_fast_variance": [False, True],
    "scale": [None, normal(5, (8,), "float32"), normal(6, (4, 1), "float32")],
    "offset": [None, normal(7, (1, 1, 8), "float32"), normal(8, (4, 8), "bfloat16")],
}
ONLY_LAYER_NORM = ("create_offset", "offset_init", "use_fast_variance", "scale", "offset")


# The ways to name the last axis, with that of the parameters.
AXES = [(-1, -1), (-1, None), ([2], -1), (2, (2,))]
BY_THE_OPERATOR = {
    "norm": ARGUMENTS["norm"],
    "x": ARGUMENTS["x"],
    "axes": AXES,
    "create_scale": [True, False],
    "create_offset": [True, False],
    "eps": ARGUMENTS["eps"],
    "use_fast_variance": [False, True],
}


def layer(cls, scale=None, offset=None, **options):
    given = () if scale is None and offset is None else (scale, offset)
    module = hk.without_apply_rng(hk.transform(lambda x: cls(**options)(x, *given)))
    return Layer(lambda x: module.init(jax.random.key(0), x), module.apply)


def parity(case):
    case = dict(case)
    name = case.pop("norm")
    x = normal(1, SHAPE, case.pop("x"))
    if not case["create_scale"]:  # Haiku rejects an initialiser of what it does not create
        case["scale_init"] = None
    if not case.get("create_offset", True):
        case["offset_init"] = None
    double = case | ({"use_fast_variance": False} if name == "LayerNorm" else {})
    for argument in ("scale", "offset"):
        if double.get(argument) is not None:
            double[argument] = double[argument].astype("float64")
    return assert_parity(
        layer(getattr(hk, name), **case), layer(getattr(ours, name), **case), layer(getattr(hk, name), **double), x
    )


@pytest.mark.parametrize("case", pairwise_parameters(BY_THE_OPERATOR, ("create_offset", "use_fast_variance")))
def test_norms_by_the_operator(case):
    case = dict(case) | {"scale_init": None, "offset_init": None}
    case["axis"], case["param_axis"] = case.pop("axes")
    if case["norm"] == "RMSNorm":
        case = {k: v for k, v in case.items() if k not in ONLY_LAYER_NORM}
    assert parity(case) == "norm"


@pytest.mark.parametrize("case", pairwise_parameters(ARGUMENTS, ONLY_LAYER_NORM))
def test_norms(case):
    parity(case)


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({}, "norm"),
        ({"x": "bfloat16"}, "norm"),
        ({"axis": [2], "param_axis": None}, "norm"),
        ({"axis": (1, 2)}, "plain"),
        ({"axis": slice(1, None), "param_axis": slice(1, None)}, "plain"),
        ({"axis": 1, "param_axis": 1}, "plain"),
        ({"axis": 1}, "plain"),
        ({"param_axis": (1, 2)}, "plain"),
        ({"axis": 0, "create_scale": False, "create_offset": False}, "plain"),
        ({"axis": slice(0, 0), "create_scale": False, "create_offset": False}, "plain"),
        ({"eps": -1e-5}, "plain"),
        ({"x": "int32"}, "plain"),
        ({"x": "complex64"}, "plain"),
    ],
    ids=lambda a: described(a) if isinstance(a, dict) else a,
)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_path(name, changed, path):
    case = {k: v[0] for k, v in ARGUMENTS.items() if k not in ("norm", "scale", "offset")} | changed
    x = jnp.ones(SHAPE, case.pop("x"))
    for argument in ("create_offset", "offset_init", "use_fast_variance") if name == "RMSNorm" else ():
        case.pop(argument)
    (route,) = jln.explain(hk.transform(lambda x: getattr(ours, name)(**case)(x)), x)
    assert route.path == path, route
    assert route.layer.startswith(f"jln.haiku.{name} ")


def test_scale_and_offset_of_a_call():
    x, a = normal(0, SHAPE, "float32"), normal(1, (4, 1), "float32")

    def function(cls):
        return hk.transform(lambda x, a: cls(-1, False, False)(x, a, 2 * a))

    (route,) = jln.explain(function(ours.LayerNorm), x, a)
    assert (route.path, route.why) == ("plain", "scale or offset is given: jln.layer_norm takes them")
    theirs, own = (function(c.LayerNorm).apply({}, None, x, a) for c in (hk, ours))
    np.testing.assert_array_equal(own, theirs)


def test_rounding_of_16_bits_happens_once():
    """Haiku's bfloat16 norm rounds mean, variance and every product; ours is half a rounding from the truth."""
    x = normal(0, (64, 256), "bfloat16") + 4
    wide = np.asarray(x, "float64")
    eps = float(np.asarray(1e-5, jnp.bfloat16))
    true = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + eps)
    theirs, own = (
        np.asarray(hk.transform(lambda x, c=c: c.LayerNorm(-1, False, False)(x)).apply({}, None, x), "float64")
        for c in (hk, ours)
    )
    half = float(jnp.finfo(jnp.bfloat16).eps) / 2
    assert np.all(np.abs(own - true) <= half * np.abs(true) + 16 * np.finfo("float32").eps)
    assert np.max(np.abs(own - true)) < np.max(np.abs(theirs - true))


LINEAR = {
    "norm": ["LayerNorm", "RMSNorm"],
    "x": ["float32", "bfloat16", "float64"],
    "output_size": [16, 3],
    "create_scale": [True, False],
    "create_offset": [True, False],
    "eps": [1e-5, 1e-2],
    "with_bias": [True, False],
    "w_init": [None, hk.initializers.RandomNormal()],
    "b_init": [None, hk.initializers.RandomNormal()],
    "precision": [None, jax.lax.Precision.HIGHEST],
}


class Pair(hk.Module):
    """A norm and a Linear in Haiku's own modules, for which LayerNormLinear and RMSNormLinear stand."""

    def __init__(self, norm, output_size, create_scale, eps, with_bias, w_init, b_init, create_offset=None):
        super().__init__(name="layer_norm_linear" if norm == "LayerNorm" else "rms_norm_linear")
        options = {} if create_offset is None else {"create_offset": create_offset}
        self.norm = functools.partial(getattr(hk, norm), -1, create_scale=create_scale, eps=eps, **options)
        self.linear = (output_size, with_bias, w_init, b_init)

    def __call__(self, x, precision):
        return hk.Linear(*self.linear)(self.norm()(x), precision=precision)


@pytest.mark.parametrize("case", pairwise_parameters(LINEAR, ("create_offset",)))
def test_pairs(case):
    case = dict(case)
    x, precision, norm = normal(1, SHAPE, case.pop("x")), case.pop("precision"), case.pop("norm")

    def made(cls):
        module = hk.without_apply_rng(hk.transform(lambda x: cls(**case)(x, precision=precision)))
        return Layer(lambda x: module.init(jax.random.key(0), x), module.apply)

    theirs = made(functools.partial(Pair, norm))
    assert assert_parity(theirs, made(getattr(ours, f"{norm}Linear")), theirs, x) == "fused"


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("eps", [np.float64(1e-5), np.float32(1e-5), 0])
def test_epsilon_of_numpy_promotes_as_in_haiku(name, eps):
    """An epsilon of numpy promotes as in Haiku: its float64, though a Python float, is added as an array."""
    x = normal(0, SHAPE, "bfloat16")
    options = {"eps": eps} | ({"create_scale": True, "create_offset": True} if name == "LayerNorm" else {})
    theirs, own = (layer(getattr(module, name), axis=-1, **options) for module in (hk, ours))
    assert own.apply(own.init(x), x).dtype == theirs.apply(theirs.init(x), x).dtype


@pytest.mark.parametrize("cls", [ours.LayerNormLinear, ours.RMSNormLinear])
@pytest.mark.parametrize("precision", [None, jax.lax.Precision.HIGHEST])
def test_precision_reaches_every_product(cls, precision):
    x = normal(0, SHAPE, "float32")
    module = hk.without_apply_rng(hk.transform(lambda x: cls(5)(x, precision=precision)))
    assert set(precisions(module.apply, module.init(jax.random.key(0), x), x)) == {precision}


def test_epsilon_takes_the_dtype_of_the_inputs():
    """An epsilon of 1e-8 is zero in float16, as in Haiku, and so a constant row gives 0 / 0, NaN."""
    x = jnp.ones(SHAPE, "float16")
    for cls in (hk.LayerNorm, ours.LayerNorm):
        made = layer(cls, axis=-1, create_scale=True, create_offset=True, eps=1e-8)
        assert jnp.isnan(made.apply(made.init(x), x)).all()


def test_linear_of_another_dtype_is_not_fused():
    """A Linear whose parameters have another dtype than the norm's is not fused, and promotes as Haiku's does.

    A getter or a checkpoint can give them that dtype.
    """
    x = normal(0, SHAPE, "bfloat16")
    module = hk.without_apply_rng(hk.transform(lambda x: ours.LayerNormLinear(5)(x)))
    variables = module.init(jax.random.key(0), x)
    wide = jax.tree.map(lambda a: a.astype("float32"), variables)
    mixed = variables | {"layer_norm_linear/linear": wide["layer_norm_linear/linear"]}
    assert module.apply(variables, x).dtype == jnp.bfloat16
    for params, path in ((variables, "fused"), (mixed, "norm"), (wide, "fused")):
        with noting() as routes:
            y = module.apply(params, x)
        assert routes[-1].path == path
        assert y.dtype == (jnp.bfloat16 if params is variables else jnp.float32)


@pytest.mark.parametrize("cls", [ours.LayerNormLinear, ours.RMSNormLinear])
def test_the_modules_of_a_pair_are_read_through_getters(cls):
    """Getters see the modules' own parameters, and interceptors how these are read."""
    x = normal(0, (3, 8), "float32")
    module = hk.without_apply_rng(hk.transform(lambda x: cls(5)(x)))
    params = module.init(jax.random.key(0), x)
    called, read = [], []

    def interceptor(call, args, kwargs, context):
        y = call(*args, **kwargs)
        if context.method_name != "__init__":
            called.append(f"{context.module.module_name}.{context.method_name}")
        return y

    def getter(call, value, context):
        read.append(context.full_name)
        return call(2 * value)

    def observed(x):
        with hk.intercept_methods(interceptor), hk.custom_getter(getter):
            return cls(5)(x)

    y = hk.transform(observed).apply(params, None, x)
    np.testing.assert_array_equal(y, module.apply(jax.tree.map(lambda a: 2 * a, params), x))
    name = "rms_norm" if cls is ours.RMSNormLinear else "layer_norm"
    assert sorted(read) == sorted(f"{module}/{a}" for module, inner in params.items() for a in inner)
    assert set(called) == {f"{name}_linear{rest}" for rest in (f"/{name}._read", "/linear._read", ".__call__")}
    assert f"{name}_linear/linear" in hk.experimental.tabulate(module)(x)


@pytest.mark.parametrize("transform", [hk.transform, hk.transform_with_state])
@pytest.mark.parametrize("strip", [lambda a: a, hk.without_apply_rng], ids=["rng", "no rng"])
def test_explain_of_every_transform(transform, strip):
    routes = jln.explain(strip(transform(lambda x: ours.RMSNormLinear(5, name="pair")(x))), jnp.ones((3, 8)))
    assert [(r.layer, r.path) for r in routes] == [("jln.haiku.RMSNormLinear pair", "fused")]


BAD = {
    "an axis that is a string": lambda c: c("foo"),
    "an axis of strings": lambda c: c(["foo"]),
    "an initialiser for no scale": lambda c: c(-1, create_scale=False, scale_init=jnp.ones),
    "an unknown argument": lambda c: c(-1, epsilon=1e-5),
}


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bad", BAD)
def test_rejected_alike(name, bad):
    def run(module):
        def function(x):
            cls = getattr(module, name)
            return BAD[bad](lambda *a, **k: cls(*a, **({"create_scale": True} | extra | k)))(x)

        extra = {"create_offset": True} if name == "LayerNorm" else {}
        return hk.transform(function).init(jax.random.key(0), jnp.ones(SHAPE))

    with pytest.raises(Exception) as theirs:
        run(hk)
    with pytest.raises(type(theirs.value)):
        run(ours)


@pytest.mark.parametrize(
    "call",
    [
        lambda module: module.RMSNorm((-1, 2))(jnp.ones(SHAPE)),
        lambda module: module.RMSNorm(7)(jnp.ones(SHAPE)),
        lambda module: module.LayerNorm(-1, True, True)(jnp.ones(())),
        lambda module: module.LayerNorm(-1, True, False)(jnp.ones(SHAPE), jnp.ones(8)),
        lambda module: module.LayerNorm(-1, False, True)(jnp.ones(SHAPE), None, jnp.ones(8)),
        lambda module: module.LayerNorm(-1, False, False)(jnp.ones(SHAPE), jnp.ones(5)),
        lambda module: module.LayerNorm(-1, True, True)("x"),
    ],
)
def test_rejected_calls(call):
    with pytest.raises(Exception) as theirs:
        hk.transform(lambda: call(hk)).init(jax.random.key(0))
    with pytest.raises(type(theirs.value)):
        hk.transform(lambda: call(ours)).init(jax.random.key(0))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_parameters_go_both_ways(name):
    """Parameters of Haiku's norm or of ours give the same result in both; their tree is Haiku's checkpoint."""
    x = normal(0, SHAPE, "float32")
    arguments = (-1, True, True) if name == "LayerNorm" else (-1,)
    theirs, own = (
        hk.without_apply_rng(hk.transform(lambda x, c=c: getattr(c, name)(*arguments)(x))) for c in (hk, ours)
    )
    for writer, reader in ((theirs, own), (own, theirs)):
        params = randomised(writer.init(jax.random.key(0), x))
        np.testing.assert_allclose(reader.apply(params, x), writer.apply(params, x), rtol=1e-5, atol=1e-5)


class _Swapped:
    """A mixin for Haiku's own test cases that puts our class where the tests look for Haiku's."""

    def setUp(self):
        super().setUp()
        self.contexts = contextlib.ExitStack()
        self.contexts.enter_context(jax.enable_x64(False))  # Haiku runs its tests so
        self.contexts.enter_context(pytest.MonkeyPatch.context()).setattr(*self.swapped)

    def tearDown(self):
        self.contexts.close()
        super().tearDown()

    def test_that_it_is_ours(self):
        module, name, cls = self.swapped
        tested = getattr(sys.modules[type(self).__mro__[2].__module__], module.__name__.rpartition(".")[2])
        assert getattr(tested, name) is cls


def haikus(name):
    return importlib.import_module(f"haiku._src.{name}")


class TestHaikusLayerNorm(_Swapped, haikus("layer_norm_test").LayerNormTest):
    swapped = (haikus("layer_norm"), "LayerNorm", ours.LayerNorm)


# One of Haiku's tests returns a value, and unittest warns about it.
@pytest.mark.filterwarnings("ignore:It is deprecated to return a value:DeprecationWarning")
class TestHaikusRMSNorm(_Swapped, haikus("rms_norm_test").RMSNormTest):
    swapped = (haikus("rms_norm"), "RMSNorm", ours.RMSNorm)
