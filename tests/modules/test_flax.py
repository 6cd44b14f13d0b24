"""The layers of jln.linen and jln.nnx against Flax, where both have the same arguments: each alone and in pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import linen, nnx, serialization

import jln
from parity import (
    MASK,
    SHAPE,
    Layer,
    assert_parity,
    described,
    doubled,
    named,
    normal,
    pairwise_parameters,
    precisions,
    randomised,
)

FLAX = {"linen": linen, "nnx": nnx}
OURS = {"linen": jln.linen, "nnx": jln.nnx}


# Arguments that the operators lack, or take some values of only, and the ways to name the last axis.
LACKING = ("force_float32_reductions", "mask", "axis_name", "reduction_axes", "feature_axes", "promote_dtype")
AXES = [-1, (2,), [-1]]
ARGUMENTS = {
    "norm": ["LayerNorm", "RMSNorm"],
    "x": ["float32", "bfloat16", "float16"],
    "dtype": [None, "bfloat16", "float32", "float16"],
    "param_dtype": ["float32", "bfloat16"],
    "epsilon": [1e-6, 1e-2],
    "use_scale": [True, False],
    "use_bias": [True, False],
    "scale_init": [nnx.initializers.ones, nnx.initializers.normal(1.0)],
    "bias_init": [nnx.initializers.zeros, nnx.initializers.normal(1.0)],
    "reduction_axes": [-1, (1, 2), (-1, 0), 1],
    "feature_axes": [-1, (1, 2), (2,)],
    "axis_name": [None, "rows"],
    "axis_index_groups": [None, [[0, 1]]],
    "use_fast_variance": [True, False],
    "mask": [None, MASK],
}
ARGUMENTS = {
    "linen": ARGUMENTS | {"force_float32_reductions": [True, False]},
    "nnx": ARGUMENTS | {"promote_dtype": [nnx.nn.dtypes.promote_dtype, doubled]},
}
ONLY_LAYER_NORM = ("use_bias", "bias_init")
PAIR = {
    "norm": ["LayerNorm", "RMSNorm"],
    "x": ["float32", "bfloat16"],
    "features": [16, (2, 3), (5,)],
    "dtype": [None, "bfloat16", "float32"],
    "param_dtype": ["float32", "bfloat16"],
    "epsilon": [1e-6, 1e-2],
    "use_scale": [True, False],
    "use_offset": [True, False],
    "use_bias": [True, False],
    "precision": [None, jax.lax.Precision.HIGHEST],
    "kernel_init": [nnx.initializers.lecun_normal(), nnx.initializers.normal(1.0)],
}
DOUBLE = {"dtype": None, "param_dtype": "float64"}
TWO_PASS = {
    "linen": DOUBLE | {"use_fast_variance": False, "force_float32_reductions": True},
    "nnx": DOUBLE | {"use_fast_variance": False},
}


def for_each_library(tables, only_layer_norm):
    return [
        pytest.param(library, *case.values, id=f"{library} {case.id}", marks=case.marks)
        for library, table in tables.items()
        for case in pairwise_parameters(table, only_layer_norm)
    ]


def linen_layer(module, mask=None, axis_name=None):
    def over_rows(call):
        """Return the call, mapped over x and 2 x where statistics are averaged over a mapped axis."""
        if not axis_name:
            return call
        return lambda x: jax.vmap(call, axis_name=axis_name, out_axes=(0, None))(jnp.stack([x, 2 * x]))

    given = {} if mask is None else {"mask": mask}
    return Layer(
        lambda x: over_rows(lambda x: module.init_with_output(jax.random.key(0), x, **given))(x)[1],
        lambda variables, x: over_rows(
            lambda x: module.apply(variables, x, mutable=["intermediates"], **given)
        )(x)[0],
    )  # fmt: skip


def nnx_layer(make, mask=None, axis_name=None):
    """Return the Layer of what `make` returns, with its variables as a dict of arrays."""

    def apply(variables, x):
        graphdef, state = nnx.split(make(nnx.Rngs(0)))
        nnx.replace_by_pure_dict(state, variables)
        call = functools.partial(nnx.merge(graphdef, state), **({} if mask is None else {"mask": mask}))
        return call(x) if axis_name is None else jax.vmap(call, axis_name=axis_name)(jnp.stack([x, 2 * x]))

    return Layer(lambda x: nnx.to_pure_dict(nnx.state(make(nnx.Rngs(0)))), apply)


def layer(library, cls, mask=None, **options):
    axis_name, axes = options.get("axis_name"), np.atleast_1d(options.get("feature_axes", -1))
    if library == "linen":
        return linen_layer(cls(**options), mask, axis_name)
    features = int(np.prod([SHAPE[a] for a in axes]))
    return nnx_layer(lambda rngs: cls(features, rngs=rngs, **options), mask, axis_name)


def parity(library, case):
    case = dict(case)
    name = case.pop("norm")
    x = normal(1, SHAPE, case.pop("x"))
    theirs, own = (layer(library, getattr(a[library], name), **case) for a in (FLAX, OURS))
    return assert_parity(theirs, own, layer(library, getattr(FLAX[library], name), **(case | TWO_PASS[library])), x)


BY_THE_OPERATOR = {
    library: {k: v for k, v in table.items() if k not in LACKING} | {"axes": AXES}
    for library, table in ARGUMENTS.items()
}


@pytest.mark.parametrize(("library", "case"), for_each_library(BY_THE_OPERATOR, ONLY_LAYER_NORM))
def test_norms_by_the_operator(library, case):
    case = dict(case)
    case["reduction_axes"] = case["feature_axes"] = case.pop("axes")
    assert parity(library, case) == "norm"


@pytest.mark.parametrize(("library", "case"), for_each_library(ARGUMENTS, ONLY_LAYER_NORM))
def test_norms(library, case):
    parity(library, case)


class LinenPair(linen.Module):
    """A norm and a Linear in Flax's own layers, for which LayerNormDense and RMSNormDense stand."""

    norm: str
    both: dict
    norm_options: dict
    dense_options: dict

    @linen.compact
    def __call__(self, x):
        norm = getattr(linen, self.norm)(name="norm", **self.norm_options, **self.both)
        return linen.DenseGeneral(name="dense", **self.dense_options, **self.both)(norm(x))


class NnxPair(nnx.Module):
    """A norm and a Linear in Flax's own layers, for which LayerNormLinear and RMSNormLinear stand."""

    def __init__(self, norm, both, norm_options, linear_options, rngs):
        self.norm = getattr(nnx, norm)(8, **norm_options, **both, rngs=rngs)
        features = linear_options.pop("features")
        cls = nnx.Linear if isinstance(features, int) else nnx.LinearGeneral
        self.linear = cls(8, features, **linear_options, **both, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.norm(x))


def pair(library, norm, **options):
    both = {k: options.pop(k) for k in ("dtype", "param_dtype")}
    norm_options = {k: options.pop(k) for k in ("epsilon", "use_scale")}
    if norm == "LayerNorm":
        norm_options["use_bias"] = options.pop("use_offset")
    if library == "linen":
        return linen_layer(LinenPair(norm, both, norm_options, options))
    return nnx_layer(lambda rngs: NnxPair(norm, both, norm_options, dict(options), rngs))


def own_pair(library, norm, features, **options):
    if library == "linen":
        return linen_layer(getattr(jln.linen, f"{norm}Dense")(features, **options))
    return nnx_layer(lambda rngs: getattr(jln.nnx, f"{norm}Linear")(8, features, rngs=rngs, **options))


@pytest.mark.parametrize(("library", "case"), for_each_library(dict.fromkeys(FLAX, PAIR), ("use_offset",)))
def test_pairs(library, case):
    case = dict(case)
    x = normal(1, SHAPE, case.pop("x"))
    path = assert_parity(pair(library, **case), own_pair(library, **case), pair(library, **(case | DOUBLE)), x)
    assert path in ("fused", "norm")
    if case["dtype"] is None and case["param_dtype"] == "float32":
        assert path == "fused"


@pytest.mark.parametrize("library", FLAX)
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("features", [16, (2, 3)])
@pytest.mark.parametrize("precision", [None, jax.lax.Precision.HIGHEST])
def test_precision_reaches_every_product(library, norm, features, precision):
    x = normal(0, SHAPE, "float32")
    module = own_pair(library, norm, features, precision=precision)
    assert set(precisions(module.apply, module.init(x), x)) == {precision}


# The path that a call takes with these arguments changed: "plain" where the framework's own code runs.
PATHS = [
    ({}, "norm"),
    ({"x": "bfloat16"}, "norm"),
    ({"dtype": "bfloat16"}, "norm"),
    ({"reduction_axes": (2,), "feature_axes": [-1]}, "norm"),
    ({"reduction_axes": (1, 2)}, "plain"),
    ({"reduction_axes": (1, 2), "feature_axes": (1, 2)}, "plain"),
    ({"axis_index_groups": [[0, 1]]}, "norm"),
    ({"mask": MASK}, "plain"),
    ({"axis_name": "rows"}, "plain"),
    ({"reduction_axes": 1}, "plain"),
    ({"reduction_axes": -1, "feature_axes": (1, 2)}, "plain"),
    ({"epsilon": -1e-6}, "plain"),
    ({"x": "complex64"}, "plain"),
    ({"x": "int32"}, "plain"),
    ({"x": "float64", "dtype": "float32"}, "plain"),
    ({"param_dtype": "float64"}, "plain"),
    ({"x": "float64", "param_dtype": "float64"}, "norm"),
]
ONLY_LINEN = [({"force_float32_reductions": False}, "plain")]
ONLY_NNX = [({"promote_dtype": doubled}, "plain"), ({"epsilon": jnp.float32(1e-3)}, "plain")]


@pytest.mark.parametrize(
    ("library", "changed", "path"),
    [("linen", *case) for case in PATHS + ONLY_LINEN] + [("nnx", *case) for case in PATHS + ONLY_NNX],
    ids=lambda a: described(a) if isinstance(a, dict) else a,
)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_path(library, name, changed, path):
    case = {"x": "float32"} | changed
    x = jnp.ones(SHAPE, case.pop("x"))
    own = layer(library, getattr(OURS[library], name), **case)
    (route,) = jln.explain(own.apply, own.init(x), x)
    assert route.path == path, route
    assert route.layer == f"jln.{library}.{name}"


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_axes_that_are_numpy_integers(library):
    x = normal(0, SHAPE, "float32")
    axes = {"reduction_axes": np.int64(-1), "feature_axes": np.int64(2)}
    given, default = (layer(library, OURS[library].LayerNorm, **options) for options in (axes, {}))
    np.testing.assert_array_equal(given.apply(given.init(x), x), default.apply(default.init(x), x))
    assert [route.path for route in jln.explain(given.apply, given.init(x), x)] == ["norm"]


BAD = {
    "features that x does not have": ({}, jnp.ones((3, 4, 5))),
    "an axis out of range": ({"reduction_axes": 7}, jnp.ones(SHAPE)),
    "a feature axis out of range": ({"feature_axes": 7}, jnp.ones(SHAPE)),
    "an integer dtype": ({"dtype": jnp.int32}, jnp.ones(SHAPE)),
    "an unbound axis_name": ({"axis_name": "nowhere"}, jnp.ones(SHAPE)),
    "an unknown argument": ({"scale": True}, jnp.ones(SHAPE)),
    "a list": ({}, [1.0, 2.0]),
    "a string": ({}, "x"),
    "a scalar": ({}, jnp.ones(())),
    "a mask of another shape": ({"mask": jnp.ones((5, 5), bool)}, jnp.ones(SHAPE)),
}


@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bad", BAD)
def test_rejected_alike(library, name, bad):
    options, x = BAD[bad]
    options = dict(options)
    mask = options.pop("mask", None)

    def call(libraries):
        cls = getattr(libraries[library], name)
        if library == "nnx":
            return cls(8, rngs=nnx.Rngs(0), **options)(x, mask=mask)
        return cls(**options).init_with_output(jax.random.key(0), x, mask=mask)

    try:
        call(FLAX)
    except Exception as error:
        with pytest.raises(type(error)):
            call(OURS)
    else:
        assert bad == "features that x does not have" and library == "linen"  # Linen takes x's
        call(OURS)


@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_checkpoints_go_both_ways(library, name, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    x = jnp.ones(SHAPE)

    def variables(libraries, seed):
        cls = getattr(libraries[library], name)
        return cls().init(jax.random.key(seed), x) if library == "linen" else nnx.state(cls(8, rngs=nnx.Rngs(seed)))

    def pure(tree):
        return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree

    with checkpoint.StandardCheckpointer() as checkpointer:
        for i, (writer, reader) in enumerate([(FLAX, OURS), (OURS, FLAX)]):
            written = randomised(variables(writer, 0))
            checkpointer.save(tmp_path / f"{i}", written)
            checkpointer.wait_until_finished()
            template = variables(reader, 1)
            for read in (
                checkpointer.restore(tmp_path / f"{i}", template),
                serialization.from_bytes(pure(template), serialization.to_bytes(pure(written))),
            ):
                assert named(pure(read)).keys() == named(pure(written)).keys()
                jax.tree.map(np.testing.assert_array_equal, pure(read), pure(written))
