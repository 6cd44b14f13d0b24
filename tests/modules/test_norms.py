"""The norms of all frameworks beside their own: results and gradients, which code runs, and what is rejected."""

import functools
import inspect

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jln
import jln.nnx
from frameworks import FRAMEWORKS, WITH_LINEARS, made_norm, norms, parity, with_linears
from parity import SHAPE, described, every_equation, normal, pairwise

NORMS = ("LayerNorm", "RMSNorm")
MASK = np.random.default_rng(0).random(SHAPE) > 0.3
# The arguments that the operators take. `axes` are those of the norm and of its parameters.
COMMON = {
    "name": NORMS,
    "x": ["float32", "bfloat16", "float16"],
    "residual": [None, "float32", "bfloat16", "float16"],
    "epsilon": [1e-6, 1e-2],
    "use_scale": [True, False],
    "use_offset": [True, False],
}
FLAX = COMMON | {
    "dtype": [None, "bfloat16", "float32", "float16"],
    "param_dtype": ["float32", "bfloat16"],
    "scale_init": [nnx.initializers.ones, nnx.initializers.normal(1.0)],
    "offset_init": [nnx.initializers.zeros, nnx.initializers.normal(1.0)],
    "axis_index_groups": [None, [[0, 1]]],
    "use_fast_variance": [True, False],
    "axes": [(-1, -1), ((2,), [-1]), ([-1], (2,)), (np.int64(-1), np.int64(2))],
}
WITH_FLOAT64 = COMMON | {"x": ["float32", "bfloat16", "float16", "float64"]}
ARGUMENTS = {
    "linen": FLAX,
    "nnx": FLAX,
    "haiku": WITH_FLOAT64 | {
        "epsilon": [1e-5, 1e-2, 0],
        "scale_init": [None, hk.initializers.RandomNormal()],
        "offset_init": [None, hk.initializers.RandomNormal()],
        "use_fast_variance": [False, True],
        "axes": [(-1, -1), (-1, None), ([2], -1), (2, (2,))],
    },
    "equinox": WITH_FLOAT64 | {"param_dtype": ["float32", "bfloat16"], "shape": [8, (8,)]},
}  # fmt: skip


@pytest.mark.parametrize(("framework", "case"), pairwise(ARGUMENTS))
def test_values_and_every_gradient(framework, case):
    case = dict(case)
    x, residual = normal(1, SHAPE, case.pop("x")), case.pop("residual")
    if "axes" in case:
        names = ("axis", "param_axis") if framework == "haiku" else ("reduction_axes", "feature_axes")
        case |= dict(zip(names, case.pop("axes"), strict=True))
    x = x if residual is None else (x, normal(2, SHAPE, residual))
    assert parity(norms, framework, case, x) == "norm"


def doubled(args, dtype=None):
    """A promote_dtype of the user's: not a mere cast."""
    return tuple(None if a is None else 2 * a for a in nnx.nn.dtypes.promote_dtype(args, dtype=dtype))


# What else a call may have, and how its reason begins where the framework's own code runs.
OTHER_AXES = "the norm is not over the last axis alone"
FLAX_PATHS = [
    ({"reduction_axes": (1, 2)}, OTHER_AXES),
    ({"reduction_axes": -1, "feature_axes": (1, 2)}, OTHER_AXES),
    ({"reduction_axes": 1}, OTHER_AXES),
    ({"mask": MASK}, "mask is given"),
    ({"axis_name": "rows"}, "statistics are averaged over the mesh axis 'rows'"),
    ({"epsilon": -1e-6}, "epsilon is -1e-06, not a Python number"),
    ({"x": "complex64"}, "x is complex64"),
    ({"x": "int32"}, "x is int32"),
    ({"x": "float64", "dtype": "float32"}, "some of it is float64, and x or the result is not"),
    ({"param_dtype": "float64"}, "some of it is float64, and x or the result is not"),
    ({"x": "float64", "param_dtype": "float64"}, None),
]
PATHS = {
    "linen": [*FLAX_PATHS, ({"force_float32_reductions": False}, "force_float32_reductions=False: statistics in x's")],
    "nnx": [
        *FLAX_PATHS,
        ({"promote_dtype": doubled}, "promote_dtype is not Flax's"),
        ({"epsilon": jnp.float32(1e-3)}, "epsilon is "),
        ({"epsilon": 1e308}, "epsilon is 1e+308, not a Python number"),  # more than a float32 holds
    ],
    "haiku": [
        ({"axis": (1, 2)}, OTHER_AXES),
        ({"axis": slice(1, None), "param_axis": slice(1, None)}, OTHER_AXES),
        ({"axis": -2, "param_axis": -1}, OTHER_AXES),
        ({"param_axis": (1, 2)}, OTHER_AXES),
        ({"axis": slice(0, 0), "use_scale": False, "use_offset": False}, OTHER_AXES),
        ({"epsilon": -1e-5}, "epsilon is "),
        ({"epsilon": np.float64(1e-5)}, "eps is a float64"),
        ({"x": "int32"}, "x is int32"),
    ],
    "equinox": [
        ({"shape": (4, 8)}, "x of shape (4, 8) in a norm of shape (4, 8)"),
        ({"shape": ()}, "x is float32[]"),
        ({"x": "int32"}, "x is int32"),
        ({"param_dtype": "float64"}, "some of it is float64"),
    ],
}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(
    ("framework", "changed", "why"),
    [
        pytest.param(framework, changed, why, id=f"{framework} {described(changed)}")
        for framework, cases in PATHS.items()
        for changed, why in cases
    ],
)
def test_path(framework, changed, why):
    """Arguments that the operators lack run as the framework's own code: the same bits, of the sum with a residual."""
    options = {"x": "float32"} | changed
    x = (8 * normal(0, SHAPE, "float32")).astype(options.pop("x"))
    given = {"mask": options.pop("mask")} if "mask" in options else {}
    x = (x, x / 2) if jnp.issubdtype(x.dtype, jnp.floating) and options.get("shape") != () else x
    variables = norms(framework, **(options | {"axis_name": None} if "axis_name" in options else options))[0].init(x)
    theirs, ours = (
        jax.vmap(functools.partial(layer.apply, variables, **given), axis_name="rows")
        for layer in norms(framework, **options)
    )
    x = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x)
    (route,) = jln.explain(ours, x)
    assert route.path == ("plain" if why else "norm")
    assert route.layer.split()[0] == f"jln.{framework}.{options.get('name', 'LayerNorm')}"
    if why:
        assert route.why.startswith(why)
        same = functools.partial(np.testing.assert_array_equal, strict=True)
        jax.tree.map(same, jax.jit(ours)(x), jax.jit(theirs)(x))


X, EIGHT = jnp.ones(SHAPE, "float32"), jnp.ones(8, "float32")
FLAX_REJECTS = [
    ({"reduction_axes": 7}, X),
    ({"dtype": jnp.int32}, X),
    ({"axis_name": "nowhere"}, X),
    ({"scale": True}, X),
    ({}, [1.0, 2.0]),
    ({}, "x"),
    ({}, jnp.ones(())),
]
REJECTED = {
    "linen": [*FLAX_REJECTS, ({"feature_axes": 7}, X)],
    "nnx": [*FLAX_REJECTS, ({}, X[..., :5])],  # Linen takes the number of x
    "haiku": [({"axis": "foo"}, X), ({"axis": ["foo"]}, X), ({}, "x"), ({}, jnp.ones(())),
              ({"name": "RMSNorm", "axis": 7}, X), ({"name": "RMSNorm", "axis": (-1, 2)}, X)],
    "equinox": [({}, X[..., :5]), ({}, [1.0] * 8), ({"scale": 1e-5}, EIGHT), ({"shape": "8"}, EIGHT)],
}  # fmt: skip


@pytest.mark.parametrize("framework", REJECTED)
def test_what_the_framework_rejects_ours_rejects_with_the_same_type_of_error(framework):
    of = FRAMEWORKS[framework]

    def call(library, options, x):
        name, others = options.get("name", "LayerNorm"), {k: v for k, v in options.items() if k != "name"}
        layer = of.layer(made_norm(framework, library, name, **others))
        return layer.apply(layer.init(x), x)

    for options, x in REJECTED[framework]:
        with pytest.raises(Exception) as theirs:
            call(of.theirs, options, x)
        with pytest.raises(type(theirs.value)):
            call(of.ours, options, x)


MODULES = [*((norms, framework) for framework in FRAMEWORKS), *((with_linears, f) for f in WITH_LINEARS)]


@pytest.mark.parametrize(
    ("make", "framework", "given"),
    [
        *(pytest.param(make, framework, {}, id=f"{framework} {make.__name__}") for make, framework in MODULES),
        pytest.param(norms, "nnx", {"mask": MASK[0, 0]}, id="nnx mask"),
    ],
)
def test_residuals_that_are_rejected_and_none(make, framework, given):
    """A residual is an array of the shape of x, and None is as if it were not there."""
    layer = make(framework)[1]
    variables = layer.init(EIGHT)
    call = functools.partial(layer.apply, variables, **given)
    for x, residual, error, message in (
        (EIGHT, EIGHT[:1], ValueError, r"^residual must have shape \(8,\), that of x; got float32\[1\]"),
        (EIGHT, jnp.ones(8, "int32"), TypeError, r"^residual must have one of the dtypes .*got int32"),
        (EIGHT, [1.0] * 8, TypeError, r"^residual must be an array; got list"),
        ([1.0] * 8, EIGHT, TypeError, r"^x must be an array; got list"),
    ):
        with pytest.raises(error, match=message):
            call(x, residual=residual)
    np.testing.assert_array_equal(call(EIGHT, residual=None), call(EIGHT))


def own_arguments(call):
    """The names and kinds of the arguments of a method, in order."""
    return [(p.name, p.kind) for p in inspect.signature(call).parameters.values()]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_call_takes_what_the_frameworks_takes_and_a_residual_and_of_linears_eight_bits(framework):
    of, keyword = FRAMEWORKS[framework], inspect.Parameter.KEYWORD_ONLY
    for name in NORMS:
        theirs, ours = (getattr(library, name).__call__ for library in (of.theirs, of.ours))
        assert own_arguments(ours) == [*own_arguments(theirs), ("residual", keyword)]
        if framework in WITH_LINEARS:
            first = own_arguments(ours)[:2] + ([("precision", keyword)] if framework == "haiku" else [])
            pair = getattr(of.ours, name + of.linear).__call__
            assert own_arguments(pair) == [*first, ("residual", keyword), ("quantize", keyword)]


@pytest.mark.parametrize(("make", "framework"), MODULES)
@pytest.mark.parametrize("name", NORMS)
def test_one_operation_each_way_that_makes_the_sum_and_all_gradients(make, framework, name):
    x = normal(1, SHAPE, "float32"), normal(2, SHAPE, "float32")
    options = {} if make is norms else {"features": {"q": 6, "k": 300}}
    layer = make(framework, name, **options)[1]
    variables = layer.init(x)
    (route,) = jln.explain(layer.apply, variables, x)
    suffix = FRAMEWORKS[framework].linear if make is with_linears else ""
    assert route.layer.split()[0] == f"jln.{framework}.{name}{suffix}"
    assert (route.path, route.why) == ("fused" if suffix else "norm", "all arguments are the operator's")

    def loss(variables, x):
        return sum(map(jnp.sum, jax.tree.leaves(layer.apply(variables, x))))

    equations = list(every_equation(jax.make_jaxpr(jax.grad(loss, (0, 1)))(variables, x)))
    seen = [e for e in equations if e.primitive.name.startswith("jln_norm")]
    assert sorted(e.primitive.name for e in seen) == ["jln_norm_backward", "jln_norm_forward"]
    forward, backward = sorted(seen, key=lambda e: e.primitive.name, reverse=True)
    assert forward.params["request"].dtypes.total is not None
    wanted = backward.params["request"].dtypes
    assert None not in (wanted.x, wanted.scale) and wanted.residual is None  # its gradient is that of x


def test_put_in_place_of_the_frameworks(monkeypatch):
    """Setting `nnx.LayerNorm = jln.nnx.LayerNorm` converts a library that cannot be edited.

    What the operators lack is still the framework's own code.
    """
    x = normal(0, SHAPE, "float32")
    wanted = nnx.LayerNorm(8, rngs=nnx.Rngs(0))(x, mask=MASK)
    monkeypatch.setattr(nnx, "LayerNorm", jln.nnx.LayerNorm)
    norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(norm(x, mask=MASK), wanted)
    assert [route.path for route in jln.explain(norm, x)] == ["norm"]


def test_metadata_is_flaxs():
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        options = {"scale_metadata": {"out_sharding": ("model",)}, "bias_metadata": {"mine": 1}}
        theirs, ours = (library.LayerNorm(8, rngs=nnx.Rngs(0), **options) for library in (nnx, jln.nnx))
    for parameter in ("scale", "bias"):
        assert getattr(ours, parameter).get_metadata() == getattr(theirs, parameter).get_metadata()
